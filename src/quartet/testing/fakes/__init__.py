"""Small deterministic services in memory, one a room, that keep to the contract.

They share one imaginary language model (`model.py`), so that what they say of the same tokens
fits: with no training, policy and reference agree exactly. Each has a `script` that makes calls
fail or wait, and records what was asked.
"""

from quartet.testing.fakes.learner import FakeLearner
from quartet.testing.fakes.model import EOS, VOCABULARY, entropies, logprobs, rewards, values
from quartet.testing.fakes.ref import FakeRef
from quartet.testing.fakes.reward import FakeReward
from quartet.testing.fakes.rollout import FakeRollout
from quartet.testing.fakes.script import Recorded, Script

__all__ = [
    "EOS",
    "VOCABULARY",
    "FakeLearner",
    "FakeRef",
    "FakeReward",
    "FakeRollout",
    "Recorded",
    "Script",
    "entropies",
    "logprobs",
    "rewards",
    "values",
]
