"""What a rollout server must do. The contract is in protos/quartet/api/rollout/v1.

    results = await run_checks(CHECKS, RolloutSubject(address="127.0.0.1:7001"))

With `reference`, a folder that transformers opens, tokens and log-probabilities are compared with a
forward pass of that model (torch is imported then), and new weights are made from its own. A server
that is not said to be `is_exclusive` is asked and never changed: no pause, no sleep, no push.

    rollout_service.py   calls: refusals, repeats, capacity, deadlines
    rollout_tokens.py    tokens and their numbers
    rollout_states.py    pause and sleep
    rollout_weights.py   pushes
    rollout_calls.py     the subject, and how it is called
    rollout_model.py     the model that it is compared with
    rollout_push.py      pushes of the suite's own, and taking them back
"""

from __future__ import annotations

from quartet.testing.conformance import (
    rollout_service,
    rollout_states,
    rollout_tokens,
    rollout_weights,
)
from quartet.testing.conformance.rollout_calls import RolloutSubject

CHECKS = (
    *rollout_service.CHECKS,
    *rollout_tokens.CHECKS,
    *rollout_states.CHECKS,
    *rollout_weights.CHECKS,
)

__all__ = ["CHECKS", "RolloutSubject"]
