"""What flags become on their way to the learners, and how a run is counted."""

from dataclasses import replace

import pytest

from quartet.config import ActorConfig, AdamConfig, PpoConfig
from quartet.trainer.schedule import PpoSchedule, SeededBatches
from quartet.trainer.seeds import sample_id, sample_seed
from quartet.trainer.settings import (
    mismatch_correction,
    nothing_left_note,
    policy_loss,
    run_spec,
    value_loss,
    warmup_note,
)
from quartet.trainer.shaping import ShapingSettings
from quartet.trainer.training import WeightedMeans
from tests.unit.trainer.players import ppo_config


def test_run_spec():
    actor = ActorConfig(adam=AdamConfig(lr=2e-5), lr_warmup_ratio=0.1, max_norm=0.5)
    spec = run_spec("r", actor, total_steps=40, seed=9, full_determinism=True)
    assert spec.optimizer.lr == 2e-5
    assert spec.optimizer.betas == (0.9, 0.95)
    assert spec.optimizer.muon is None
    assert (spec.schedule.total_steps, spec.schedule.warmup_ratio) == (40, 0.1)
    assert (spec.max_norm, spec.seed, spec.full_determinism) == (0.5, 9, True)
    # A schedule of no steps has no meaning; a run that trains nothing still starts.
    assert run_spec("r", actor, total_steps=0, seed=9).schedule.total_steps == 1


@pytest.mark.parametrize(
    ("steps", "changes", "noted"),
    [
        (1, {}, True),
        (3, {}, True),
        (4, {}, False),
        (1, {"lr_warmup_ratio": 0.0}, False),
        (1, {"lr_scheduler": "constant"}, False),
    ],
)
def test_short_runs_are_told_of_warm_up(steps, changes, noted):
    spec = run_spec("r", ActorConfig(**changes), total_steps=steps, seed=9)
    note = warmup_note(spec, "actor.")
    assert note.startswith("note: actor.lr_warmup_ratio: ") == noted
    assert (f"1 of {steps} optimizer steps trains nothing" in note) == noted


@pytest.mark.parametrize(
    ("behind", "total", "noted"),
    [(0, 0, False), (0, 4, False), (3, 4, False), (4, 4, True), (6, 4, True)],
)
def test_a_run_that_goes_on_from_its_end_is_told_what_gives_it_more(behind, total, noted):
    note = nothing_left_note(behind, total, "train.num_episodes")
    assert bool(note) == noted
    assert (f"of step {behind} and the run ends with step {total}" in note) == noted
    assert ("--train.num_episodes" in note) == noted


def test_policy_loss_follows_the_flags():
    loss = policy_loss(ppo_config(actor={"eps_clip_low_high": (0.2, 0.27)}), kl_coef=0.1)
    assert (loss.eps_clip_low, loss.eps_clip_high) == (0.2, 0.27)
    assert loss.kl_loss is None
    assert loss.entropy_coef is None
    kl = {"use_loss": True, "estimator": "k3", "init_coef": 0.02}
    loss = policy_loss(ppo_config(algo={"kl": kl}), kl_coef=0.1)
    assert (loss.kl_loss.coef, loss.kl_loss.estimator) == (0.1, "k3")


@pytest.mark.parametrize(
    ("mode", "given", "most", "length"),
    [
        ("token-mean", None, 64, 0),
        ("seq-mean-token-sum", 9, 64, 0),
        ("seq-mean-token-sum-norm", 9, 64, 9),
        ("seq-mean-token-sum-norm", None, 64, 64),
        ("seq-mean-token-sum-norm", None, None, 32),
    ],
)
def test_aggregations_by_name_and_their_length(mode, given, most, length):
    """Without a length the sum is divided by the longest completion there may be."""
    actor = {"loss_agg_mode": mode, "loss_agg_length": given, "policy_loss_type": "cispo"}
    loss = policy_loss(ppo_config(actor=actor, rollout={"max_new_tokens": most}), kl_coef=0.1)
    assert (loss.type, loss.aggregation, loss.aggregation_length) == ("cispo", mode, length)


def test_old_bounds_of_the_kl_and_old_spans_by_flag():
    advantage = {"estimator": "gae", "observation_spans": "decay"}
    algo = {"kl": {"use_loss": True, "bound_all": True}, "advantage": advantage}
    config = ppo_config(algo=algo)
    assert policy_loss(config, kl_coef=0.1).kl_loss.bound_all
    shaping = ShapingSettings.of(config)
    assert (shaping.kl_bounds, shaping.advantage.spans) == ("all", "decay")
    plain = ShapingSettings.of(ppo_config())
    assert (plain.kl_bounds, plain.advantage.spans) == ("k3", "carry")


def test_one_correction_threshold_is_the_upper_end():
    level = {"is_correction_level": "token", "is_correction_threshold": (3.0,)}
    advantage = ppo_config(algo={"advantage": level}).algo.advantage
    correction = mismatch_correction(advantage)
    assert (correction.threshold_low, correction.threshold_high) == (0.0, 3.0)
    assert mismatch_correction(replace(advantage, is_correction_level="off")) is None


def test_value_loss():
    assert value_loss(PpoConfig()).value_clip == 0.5


@pytest.mark.parametrize(
    ("changes", "rollouts", "policy", "critic"),
    [
        ({}, 3, 3 * 2 + 0, 6),
        ({"num_episodes": 2}, 6, 12, 12),
        ({"max_epochs": 3}, 3, 18, 18),
        ({"freezing_steps": 1}, 3, 4, 6),
        ({"freezing_steps": 9}, 3, 0, 6),
        ({"max_rollouts": 2}, 2, 4, 4),
        ({"num_prompts": 9}, 3, 2 + 2 + 1, 5),
    ],
)
def test_schedule_counts_what_is_really_done(changes, rollouts, policy, critic):
    base = {
        "num_prompts": 12,
        "rollout_batch_size": 4,
        "samples_per_prompt": 2,
        "train_batch_size": 5,
    }
    schedule = PpoSchedule(**(base | changes))
    assert schedule.num_rollouts == rollouts
    assert (schedule.policy_steps, schedule.critic_steps) == (policy, critic)


def test_batches_skip_across_epochs():
    batches = SeededBatches(range(7), batch_size=3, seed=1)
    whole = list(batches.run(3))
    for skip in range(10):
        assert list(batches.run(3, skip=skip)) == whole[skip:]


def test_seeds_differ_in_every_part_and_never_otherwise():
    base = {"run_seed": 1, "episode": 0, "prompt_id": "p", "index": 0}
    changed = [{}, {"run_seed": 2}, {"episode": 1}, {"prompt_id": "q"}, {"index": 1}]
    seeds = [sample_seed(**(base | change)) for change in changed]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert sample_seed(**base) == seeds[0]
    assert sample_id(episode=2, prompt_id="p", index=3) == "2/p/3"


def test_means_are_weighted_and_a_missing_metric_does_not_count():
    means = WeightedMeans()
    means.add({"a": 1.0, "b": 5.0}, 3)
    means.add({"a": 3.0}, 1)
    assert means.means() == {"a": 1.5, "b": 5.0}
