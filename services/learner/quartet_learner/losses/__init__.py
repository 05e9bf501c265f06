"""Losses as pure functions of flat tensors.

To add one: its function in a file of its own, and its line in microbatch.run_micro_batch.
"""

from quartet_learner.losses.aggregation import token_weights
from quartet_learner.losses.balance import balance_by_sequence
from quartet_learner.losses.base import LossOutput, StepCounts, TokenBatch
from quartet_learner.losses.correction import correction_weights
from quartet_learner.losses.dpo import dpo_loss
from quartet_learner.losses.kl import kl_estimate, kl_with_unbiased_gradient
from quartet_learner.losses.pairwise import pairwise_loss
from quartet_learner.losses.policy import policy_loss
from quartet_learner.losses.sft import sft_loss
from quartet_learner.losses.value import value_loss

__all__ = [
    "LossOutput",
    "StepCounts",
    "TokenBatch",
    "balance_by_sequence",
    "correction_weights",
    "dpo_loss",
    "kl_estimate",
    "kl_with_unbiased_gradient",
    "pairwise_loss",
    "policy_loss",
    "sft_loss",
    "token_weights",
    "value_loss",
]
