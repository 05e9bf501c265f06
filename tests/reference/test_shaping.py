"""From flags and samples to advantages: what a run does, against the plain formulas in order.

penalties on the reward -> clip -> baseline -> placement with the KL penalty -> returns -> whitening
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.algorithms import ESTIMATORS
from quartet.data.samples import Prompt
from quartet.trainer.experience import Experience, Sample
from quartet.trainer.metrics import rollout_metrics
from quartet.trainer.shaping import ShapingSettings, shape
from quartet.types import FinishReason, LogprobKind, LogprobSpec, Reward
from tests.reference import advantages as plain
from tests.unit.trainer.players import ppo_config

LIMIT = 6
"""Most new tokens."""


@st.composite
def completions(draw):
    """Reward; logprobs of policy and reference, and values, by token; whether it was cut; and
    which tokens the policy chose: the first and the last, and any between."""
    length = draw(st.integers(1, LIMIT))
    numbers = st.lists(
        st.floats(-9, 0).map(lambda x: round(x, 2)), min_size=length, max_size=length
    )
    reward = draw(st.sampled_from([0.0, 1.0, -1.0, 0.1, 30.0, -0.4]))
    chosen = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    chosen[0] = chosen[-1] = True
    return reward, draw(numbers), draw(numbers), draw(numbers), draw(st.booleans()), chosen


def spans_of(chosen: list[bool], start: int) -> tuple[tuple[int, int], ...]:
    """Runs of chosen tokens, the completion beginning at `start`."""
    edges = np.flatnonzero(np.diff([0, *map(int, chosen), 0])) + start
    return tuple(zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True))


GROUPS = st.lists(st.lists(completions(), min_size=1, max_size=4), min_size=1, max_size=3)


def experience_of(groups) -> Experience:
    prompt = Prompt(prompt_id="p", text="?", token_ids=(1, 2))
    flat = [(g, c) for g, group in enumerate(groups) for c in group]

    def column(number: int) -> np.ndarray:
        return np.concatenate([[0.0, 0.0, *c[number]] for _, c in flat]).astype(np.float32)

    samples = tuple(
        Sample(
            sample_id=f"s{i}",
            group=group,
            prompt=prompt,
            token_ids=np.arange(2 + len(c[1]), dtype=np.int32),
            rollout_logprobs=np.zeros(2 + len(c[1]), np.float32),
            finish_reason=FinishReason.LENGTH if c[4] else FinishReason.STOP,
            first_policy_version=1,
            last_policy_version=1,
            replica="r",
            action_spans=() if all(c[5]) else spans_of(c[5], 2),
        )
        for i, (group, c) in enumerate(flat)
    )
    return Experience(
        samples=samples,
        rewards=tuple(Reward(reward=c[0], score=c[0]) for _, c in flat),
        old_logprobs=column(1),
        ref_logprobs=column(2),
        values=column(3),
        logprob_spec=LogprobSpec(kind=LogprobKind.PROCESSED),
    )


@st.composite
def flags(draw, estimator):
    """Sections of a configuration that say how to shape."""
    advantage = {
        "estimator": estimator,
        "lambd": draw(st.sampled_from([0.0, 0.9, 1.0])),
        "gamma": draw(st.sampled_from([1.0, 0.9])) if ESTIMATORS[estimator].uses_gamma else 1.0,
        "no_std_norm": draw(st.booleans()),
        "std_eps": draw(st.sampled_from([1e-6, 1e-9])),
        "observation_spans": draw(st.sampled_from(["carry", "decay"])),
    }
    kl = {
        "init_coef": draw(st.sampled_from([0.0, 0.02])),
        "estimator": draw(st.sampled_from(["k1", "k2", "k3"])),
        "use_loss": draw(st.booleans()),
        "bound_all": draw(st.booleans()),
    }
    reward = {
        "clip_range": draw(st.sampled_from([(-10.0, 10.0), (-0.5, 0.5)])),
        "clip_after_baseline": draw(st.booleans()),
        "overlong_buffer_len": draw(st.sampled_from([None, 2.0, 6.0])),
        "overlong_penalty_factor": draw(st.sampled_from([0.5, 1.0])),
        "stop_properly_penalty_coef": draw(st.sampled_from([None, 0.0, 0.3, -0.5])),
        "stop_properly_legacy": draw(st.booleans()),
    }
    return {"algo": {"advantage": advantage, "kl": kl}, "reward": reward}


def penalised(completion, reward: dict) -> float:
    value, cut = completion[0], completion[4]
    if reward["overlong_buffer_len"] is not None:
        value = plain.overlong(
            value,
            len(completion[1]),
            limit=LIMIT,
            buffer=reward["overlong_buffer_len"],
            factor=reward["overlong_penalty_factor"],
        )
    coef = reward["stop_properly_penalty_coef"]
    if coef is None:
        return value
    legacy = reward["stop_properly_legacy"]
    return plain.stop_properly(value, cut=cut, coef=coef, legacy=legacy)


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_flags_give_the_formulas(estimator, data):
    sections = data.draw(flags(estimator))
    groups = data.draw(GROUPS)
    advantage, kl, reward = (*sections["algo"].values(), sections["reward"])
    config = ppo_config(**sections, rollout={"max_new_tokens": LIMIT, "batch_size": 1})
    coef = kl["init_coef"] if not kl["use_loss"] else 0.0

    def estimate(old: float, ref: float) -> float:
        old, ref = float(np.float32(old)), float(np.float32(ref))
        return plain.kl_estimate(old, ref, kl["estimator"], bound_all=kl["bound_all"])

    cases = [
        plain.Case(
            (plain.Token(False),) * 2
            + tuple(
                plain.Token(chosen, estimate(old, ref), float(np.float32(value)))
                for old, ref, value, chosen in zip(c[1], c[2], c[3], c[5], strict=True)
            ),
            penalised(c, reward),
            number,
        )
        for number, group in enumerate(groups)
        for c in group
    ]
    gains, returns = plain.advantages(
        cases,
        plain.Recipe(
            estimator=estimator,
            gamma=advantage["gamma"],
            lam=advantage["lambd"],
            no_std_norm=advantage["no_std_norm"],
            kl_coef=coef,
            clip=reward["clip_range"],
            clip_after=reward["clip_after_baseline"],
            decay=advantage["observation_spans"] == "decay",
            eps=advantage["std_eps"],
        ),
    )
    lesson = shape(experience_of(groups), ShapingSettings.of(config), kl_coef=kl["init_coef"])
    expected = np.concatenate([np.array(row) for row in gains])
    atol = 3e-6 * (1 + np.abs(expected).max())
    np.testing.assert_allclose(lesson.advantages, expected, rtol=2e-6, atol=atol)
    back = np.concatenate([np.array(row) for row in returns])
    np.testing.assert_allclose(lesson.returns, back, rtol=2e-6, atol=2e-5)
    np.testing.assert_allclose(lesson.rewards, [case.reward for case in cases], rtol=1e-12)
    metrics = rollout_metrics(lesson, max_len=32)
    assert metrics["reward"] == pytest.approx(np.mean([case.reward for case in cases]))
    assert all(np.isfinite(value) for value in metrics.values())
