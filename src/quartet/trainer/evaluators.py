"""The models under which the tokens of a rollout are evaluated: policy, reference, critic."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.errors import FatalError
from quartet.trainer.experience import Group
from quartet.trainer.rooms import Reference, Trainee
from quartet.types import ForwardOutput, SequenceBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One model's evaluation of groups."""

    run: Callable[[Sequence[Group]], Coroutine[Any, Any, list[None]]]
    """Fills in the groups; the list is as long as they are."""
    width: int = 1
    """Calls that may be under way at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluators:
    """The models under which tokens are evaluated."""

    policy: Trainee
    reference: Reference | None = None
    """None when KL has no weight."""
    reference_width: int = 1
    """Calls that the reference replicas take at once."""
    critic: Trainee | None = None
    """None for estimators without values."""

    def of_learners(self, *, temperature: float) -> list[Pass]:
        """What the models in training evaluate: their numbers are of now."""
        found = [Pass(run=partial(_old_logprobs, self.policy, temperature))]
        if self.critic is not None:
            found.append(Pass(run=partial(_values, self.critic)))
        return found

    def of_frozen(self, *, temperature: float) -> list[Pass]:
        """What can be evaluated at any time; `temperature` divides the logits."""
        if self.reference is None:
            return []
        run = partial(_ref_logprobs, self.reference, temperature)
        return [Pass(run=run, width=self.reference_width)]


async def _old_logprobs(policy: Trainee, temperature: float, groups: Sequence[Group]) -> list[None]:
    batches = [group.batch() for group in groups]
    results = await policy.forward(batches, output=ForwardOutput.LOGPROBS, temperature=temperature)
    for group, batch, result in zip(groups, batches, results, strict=True):
        group.old_logprobs.update(_by_sample("policy's log-probability", batch, result.output))
    return [None] * len(groups)


async def _ref_logprobs(
    reference: Reference, temperature: float, groups: Sequence[Group]
) -> list[None]:
    batches = [group.batch() for group in groups]
    results = await reference.compute_logprobs(batches, temperature=temperature)
    for group, batch, result in zip(groups, batches, results, strict=True):
        group.ref_logprobs.update(_by_sample("reference's log-probability", batch, result))
    return [None] * len(groups)


async def _values(critic: Trainee, groups: Sequence[Group]) -> list[None]:
    batches = [group.batch() for group in groups]
    results = await critic.forward(batches, output=ForwardOutput.VALUES)
    for group, batch, result in zip(groups, batches, results, strict=True):
        group.values.update(_by_sample("critic's value", batch, result.output))
    return [None] * len(groups)


def _by_sample(
    what: str, batch: SequenceBatch, flat: NDArray[np.float32]
) -> dict[str, NDArray[np.float32]]:
    """Cut a flat [N] result into one array a sample, and refuse what is not finite."""
    rows = np.split(flat, batch.offsets[1:-1])
    for name, row in zip(batch.sample_ids, rows, strict=True):
        if not np.isfinite(row).all():
            position = int(np.flatnonzero(~np.isfinite(row))[0])
            raise FatalError(
                f"the {what} of token {position} is {row[position]}",
                reason="EVALUATION_NOT_FINITE",
                sample_id=name,
            )
    return dict(zip(batch.sample_ids, rows, strict=True))
