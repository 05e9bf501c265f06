"""Faults of the formulas between a reward and a gradient."""

import statistics
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from quartet_learner.checks import check_samples
from quartet_learner.losses import StepCounts, pairwise_loss

from quartet.algorithms import group_stats, whiten
from quartet.config.load import load
from quartet.config.methods import PpoConfig
from quartet.config.validate import problems
from quartet.errors import RequestError
from quartet.trainer.shaping import ShapingSettings, shape
from quartet.types import (
    LogprobKind,
    LogprobSpec,
    MismatchCorrection,
    PairwiseLoss,
    PolicyLoss,
    SequenceBatch,
    TrainSamples,
)
from tests.faults.loops import advantages_of, experience
from tests.unit.trainer.players import ppo_config

LINE = "--actor.model_name_or_path m --data.prompt_dataset d --reward.remote_url f.py "


def refusals(flags: str) -> set[str]:
    """Fields that a command line is refused for, before anything is started."""
    found = problems(load(PpoConfig, (LINE + flags).split(), environ={}).config)
    return {problem.info.field for problem in found}


def shaping(**advantage) -> ShapingSettings:
    return ShapingSettings.of(ppo_config(algo={"advantage": advantage}))


def test_fault_14_gamma_stays_what_the_flag_says():
    """One step after the other discounts; where nothing is discounted the flag is refused."""
    settings = shaping(estimator="reinforce", gamma=0.5, no_std_norm=True)
    rollout = experience([1.0, 0.0])
    first, second = (shape(rollout, settings, kl_coef=0.0) for _ in range(2))
    assert first.returns.tolist() == second.returns.tolist() == [0, 0.5, 1, 0, 0, 0]
    with pytest.raises(FrozenInstanceError):
        settings.advantage.gamma = 1.0  # pyright: ignore[reportAttributeAccessIssue]
    flags = "--algo.advantage.estimator rloo --rollout.n_samples_per_prompt 2 "
    assert refusals(flags + "--algo.advantage.gamma 0.5") == {"algo.advantage.gamma"}
    assert refusals(flags) == set()


def test_fault_15_a_cut_distribution_is_no_base_for_a_correction():
    """By the flags, and by what the samples say of themselves."""
    flags = "--algo.advantage.is_correction_level token "
    assert refusals(flags + "--rollout.top_p 0.95") == {"algo.advantage.is_correction_level"}
    assert refusals(flags) == set()
    tokens = np.full(3, -1, np.float32)
    samples = TrainSamples(
        sequences=SequenceBatch.of([[1, 2, 3]], ["s"]),
        action_mask=np.array([False, True, True]),
        advantages=tokens,
        old_logprobs=tokens,
        rollout_logprobs=tokens,
        rollout_logprob_spec=LogprobSpec(kind=LogprobKind.PROCESSED, top_p=0.95),
    )
    loss = PolicyLoss(mismatch_correction=MismatchCorrection(level="token"))
    with pytest.raises(RequestError, match="top-p or top-k"):
        check_samples(loss, [samples])
    whole = LogprobSpec(kind=LogprobKind.PROCESSED)
    check_samples(loss, [replace(samples, rollout_logprob_spec=whole)])


def with_observation(length: int):
    """A rollout of one answer in two turns of one token, with an observation between them."""
    plain = experience([1.0])
    (sample,) = plain.samples
    tokens = np.array([1, 2, *[9] * length, 3], np.int32)
    spans = ((1, 2), (2 + length, 3 + length))
    values = np.array([0, 0.5, *[7.0] * length, 0.25], np.float32)
    return replace(
        plain,
        samples=(replace(sample, token_ids=tokens, action_spans=spans),),
        old_logprobs=np.zeros(len(tokens), np.float32),
        values=values,
    )


def test_fault_19_what_a_tool_says_takes_no_time():
    """An answer of 40 tokens by the tool costs the action before it nothing."""
    settings = shaping(estimator="gae", gamma=0.9, lambd=0.5, no_std_norm=True)
    none, long = (shape(with_observation(n), settings, kl_coef=0.0) for n in (0, 40))
    # 0.9 V' - V + 0.45 A' and 1 - V', with V = 0.5 and V' = 0.25; the returns are A + V.
    expected = [0.9 * 0.25 - 0.5 + 0.45 * 0.75 + 0.5, 1.0]
    for lesson in (none, long):
        mask = lesson.experience.action_mask
        np.testing.assert_allclose(lesson.returns[mask], expected, rtol=1e-6)
        assert not lesson.advantages[~mask].any()
    legacy = shaping(estimator="gae", gamma=0.9, lambd=0.5, observation_spans="decay")
    lesson = shape(with_observation(40), legacy, kl_coef=0.0)
    assert lesson.returns[1] == pytest.approx(0.0, abs=1e-6)


def test_fault_26_groups_go_by_name():
    """Samples of two prompts in any order, and not as many of each."""
    rollout = experience([1.0, 10.0, 0.0, 20.0, 0.5])
    groups = (0, 1, 0, 1, 0)
    samples = tuple(
        replace(s, group=group) for s, group in zip(rollout.samples, groups, strict=True)
    )
    lesson = shape(replace(rollout, samples=samples), shaping(estimator="dr_grpo"), kl_coef=0.0)
    # Rewards are clipped to 10 before they are compared.
    assert advantages_of(lesson) == [0.5, 0.0, -0.5, 0.0, 0.0]


@pytest.mark.parametrize("n", [2, 3, 8, 64])
def test_fault_29_one_convention_each_and_equal_rewards_are_zero(n):
    """The deviation of a group is that of a sample, of the batch that of a population."""
    rewards = [0.1 * i for i in range(n)]
    stats = group_stats(np.array(rewards), np.zeros(n, np.int64), np.ones(n, bool))
    assert stats.std[0] == pytest.approx(statistics.stdev(rewards), rel=1e-12)
    white = whiten(np.array(rewards), np.ones(n, bool))
    assert statistics.pstdev(white.tolist()) == pytest.approx(1.0, rel=1e-9)
    for eps in (0.0, 1e-9, 1e-6):
        settings = shaping(estimator="group_norm", std_eps=eps)
        assert not shape(experience([0.1] * n), settings, kl_coef=0.0).advantages.any()


def test_fault_77_logexp_is_finite_whatever_the_difference():
    for difference in (89.0, 1000.0, 3e38):
        rewards = torch.tensor([0.0, difference], requires_grad=True)
        counts = StepCounts(tokens=2, sequences=2, pairs=1)
        out = pairwise_loss(PairwiseLoss(type="logexp"), rewards, None, counts)
        assert out.loss.item() == pytest.approx(difference)
        (grad,) = torch.autograd.grad(out.loss, rewards)
        assert grad.tolist() == [-1.0, 1.0]
