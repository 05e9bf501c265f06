"""A run logs every name that dashboards of OpenRLHF know, for the flags where it applies.

The players are fakes but for the losses: those are the learner's own, so their names are too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from quartet_learner.checks import used_fields
from quartet_learner.losses import TokenBatch, policy_loss, value_loss
from quartet_learner.microbatch import step_counts

from quartet.trainer.evaluate import metric_names
from quartet.types import PolicyLoss
from tests.faults.loops import play_ppo
from tests.unit.trainer.players import Cast, FakeTrainee, ppo_config


@dataclass
class Learner(FakeTrainee):
    """Answers with what the learner's losses say of the samples."""

    async def train(self, step: Any, samples: Any) -> Any:
        result = await super().train(step, samples)
        (part,) = samples
        mask = part.action_mask
        owners = np.repeat(np.arange(len(part.sequences)), part.sequences.lengths)
        batch = TokenBatch(
            segments=torch.from_numpy(owners[mask]),
            num_sequences=len(part.sequences),
            **{
                name: torch.from_numpy(getattr(part, name)[mask])
                for name in used_fields(step.loss, part)
                if name != "action_mask"
            },
        )
        counts = step_counts(part, step.loss)
        if isinstance(step.loss, PolicyLoss):
            old = batch.old_logprobs
            assert old is not None
            out = policy_loss(step.loss, batch, old + 0.01, torch.ones_like(old), counts)
        else:
            old = batch.old_values
            assert old is not None
            out = value_loss(step.loss, batch, old + 0.01, counts)
        return replace(result, metrics={k: v.item() for k, v in out.metrics.items()})


ALWAYS = {
    *("policy_loss", "ppo_clip_ratio", "ppo_kl", "kl", "logprobs_diff"),
    *("reward", "score", "return", "group_reward_std"),
    *("response_length", "total_length", "response_clip_ratio", "truncated"),
    *("actor_lr", "actor_grad_norm"),
    *(f"timing/{name}" for name in ("make_experience", "ppo_train", "broadcast")),
    *("timing/generation", "timing/step_total"),
    *("rollout/reward_mean", "rollout/reward_std", "rollout/response_length_mean"),
    *("rollout/truncated_rate", "rollout/num_samples"),
    # What the scorer of these runs logs.
    "digit",
}
CRITIC = {"critic_loss", "values", "critic_lr", "critic_grad_norm"}
CORRECTION = {"vllm_kl", "is_filter_ratio"}
GROUPS = {"advantage": {"estimator": "group_norm"}}
OF_FLAGS: list[tuple[dict[str, Any], set[str]]] = [
    ({}, set()),
    ({"actor": {"entropy_coef": 0.0}}, {"entropy_loss"}),
    ({"algo": GROUPS | {"kl": {"use_loss": True}}}, set()),
    ({"algo": {"advantage": {"estimator": "gae"}}}, CRITIC),
    *(
        ({"algo": {"advantage": {"estimator": "rloo", "is_correction_level": level}}}, CORRECTION)
        for level in ("token", "seq")
    ),
    ({"algo": GROUPS | {"dynamic_filtering_enable": True}}, {"dynamic_filtering_pass_rate"}),
    ({"actor": {"policy_loss_type": "gspo"}}, set()),
    ({"actor": {"policy_loss_type": "cispo"}}, set()),
]


@pytest.mark.parametrize(("flags", "more"), OF_FLAGS, ids=lambda value: str(value)[:60])
async def test_names_of_a_ppo_run(tmp_path, flags, more):
    critic = Learner(head="value") if more is CRITIC else None
    cast = Cast(policy=Learner(), critic=critic)
    await play_ppo(cast, ppo_config(**flags), tmp_path)
    optional = CRITIC | CORRECTION | {"entropy_loss", "dynamic_filtering_pass_rate"}
    for row in cast.metrics:
        assert ALWAYS | more <= set(row)
        assert not (optional - more) & set(row)
        assert all(np.isfinite(number) for number in row.values())


def test_names_of_an_evaluation():
    names = metric_names(["math"], num_samples=4)
    known = {"pass4", "pass1", "response_length_mean", "truncated_rate"}
    assert {f"eval_math_{name}" for name in known} <= names
    assert {"eval_response_length_mean", "eval_truncated_rate"} <= names
