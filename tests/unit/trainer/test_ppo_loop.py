"""The PPO loop on fake players: order, drops, freezing, KL control, determinism, the ledger."""

import asyncio

import numpy as np
import pytest

from quartet.errors import DataError, FatalError, InfraError
from quartet.trainer.ppo_loop import PpoLoop, schedule_of
from quartet.types import Failure, FinishReason, ForwardOutput, Reward
from tests.unit.trainer.players import Cast, FakeTrainee, inputs, ppo_config

BROKEN = Failure(error_class="DATA", reason="TIME_LIMIT", message="took too long")


async def play(cast, config, folder, *, num_prompts=8):
    """Run the loop; returns the run, its ledger still open until the caller's end of test."""
    folder.mkdir(parents=True, exist_ok=True)
    run = cast.run(config, folder)
    try:
        await PpoLoop(config, run, inputs(num_prompts), cast.players).run()
        return run, await run.ledger.counts(), await run.ledger.drop_reasons()
    finally:
        await run.ledger.close()
        run.progress.close()


def critic_config(**sections):
    return ppo_config(**{"algo": {"advantage": {"estimator": "gae"}}, **sections})


async def test_every_sample_is_trained_once_and_the_policy_exported(tmp_path):
    cast = Cast()
    run, counts, _ = await play(cast, ppo_config(), tmp_path)
    assert counts == {"trained": 16}
    trained = [
        name
        for _, _, samples in cast.policy.of("train")
        for s in samples
        for name in s.sequences.sample_ids
    ]
    assert sorted(trained) == sorted(f"0/p{i}/{j}" for i in range(8) for j in range(2))
    assert cast.policy.of("export") == [("export", "/exported", {})]
    assert run.summary["steps"] == 2
    assert run.summary["learner_output_dir"] == "/exported"


async def test_versions_rise_with_each_push_and_generation_asks_for_the_newest(tmp_path):
    cast = Cast()
    await play(cast, ppo_config(), tmp_path)
    assert [entry[1] for entry in cast.policy.of("push")] == [1, 2, 3]
    assert [r.min_policy_version for r in cast.sampler.log] == [1] * 4 + [2] * 4
    assert [m["policy_version"] for m in cast.metrics] == [1.0, 2.0]


async def test_order_within_a_step(tmp_path):
    cast = Cast(critic=FakeTrainee(head="value"))
    await play(cast, critic_config(), tmp_path, num_prompts=4)
    kinds = [entry[0] for entry in cast.policy.log]
    assert kinds[:2] == ["start", "push"]
    assert kinds.index("train") > max(i for i, k in enumerate(kinds) if k == "forward")
    assert kinds[-2:] == ["push", "export"]
    assert {e[0] for e in cast.critic.log} == {"start", "forward", "train"}


async def test_first_step_numbers_before_any_update(tmp_path):
    cast = Cast()
    await play(cast, ppo_config(), tmp_path)
    first = cast.metrics[0]
    assert first["kl"] == 0.0
    assert first["logprobs_diff"] == 0.0
    assert first["ppo_ratio_first"] == 1.0
    assert first["rollout_logprob_gap"] == 0.0
    assert 0.0 < first["reward"] < 1.0
    assert first["digit"] == pytest.approx(10 * first["reward"])
    assert first["group_reward_std"] > 0.0


async def test_policy_learner_gets_aligned_tensors(tmp_path):
    cast = Cast()
    await play(cast, ppo_config(), tmp_path, num_prompts=4)
    (_, step, (samples,)) = cast.policy.of("train")[0]
    assert step.loss.temperature == 1.0
    assert samples.ref_logprobs is None  # KL is in the reward
    for tokens, mask, advantages, logprobs in zip(
        samples.sequences.rows(),
        samples.sequences.rows(samples.action_mask),
        samples.sequences.rows(samples.advantages),
        samples.sequences.rows(samples.old_logprobs),
        strict=True,
    ):
        assert mask.tolist() == [False] * 3 + [True] * (len(tokens) - 3)
        assert (advantages[:3] == 0).all()
        assert len(logprobs) == len(tokens)


async def test_last_partial_batch_is_trained_and_counted_in_the_schedule(tmp_path):
    cast = Cast()
    config = ppo_config(train={"batch_size": 3, "seed": 7, "max_epochs": 2})
    await play(cast, config, tmp_path, num_prompts=5)
    sizes = [sum(len(s.sequences) for s in e[2]) for e in cast.policy.of("train")]
    # Rollouts of 4 and 1 prompts, 2 samples each, two passes over each.
    assert sizes == [3, 3, 2, 3, 3, 2, 2, 2]
    assert cast.policy.of("start")[0][1].schedule.total_steps == len(sizes)


@pytest.mark.parametrize(("enabled", "beta"), [(True, 0.9), (False, None)])
async def test_only_the_policy_is_averaged(tmp_path, enabled, beta):
    cast = Cast(critic=FakeTrainee(head="value"))
    config = critic_config(train={"enable_ema": enabled, "ema_beta": 0.9})
    await play(cast, config, tmp_path)
    assert cast.policy.of("start")[0][1].ema_beta == beta
    assert cast.critic.of("start")[0][1].ema_beta is None


async def test_failed_completion_is_dropped_and_its_group_goes_on(tmp_path):
    cast = Cast()
    config = ppo_config(rollout={"batch_size": 4, "n_samples_per_prompt": 3, "max_new_tokens": 8})
    cast.sampler.failures["0/p1/0"] = BROKEN
    _, counts, reasons = await play(cast, config, tmp_path, num_prompts=4)
    assert counts == {"trained": 11, "dropped": 1}
    assert reasons == {"rollout_time_limit": 1}
    assert cast.metrics[0]["dropped/rollout_time_limit"] == 1.0


async def test_group_with_one_valid_sample_is_dropped_under_a_group_estimator(tmp_path):
    cast = Cast()
    cast.judge.failures["0/p2/1"] = BROKEN
    _, counts, reasons = await play(cast, ppo_config(), tmp_path, num_prompts=4)
    assert counts == {"trained": 6, "dropped": 2}
    assert reasons == {"group_too_small": 1, "reward_time_limit": 1}


async def test_single_sample_is_enough_without_a_group_estimator(tmp_path):
    cast = Cast(critic=FakeTrainee(head="value"))
    cast.judge.failures["0/p2/1"] = BROKEN
    _, counts, _ = await play(cast, critic_config(), tmp_path, num_prompts=4)
    assert counts == {"trained": 7, "dropped": 1}


async def test_aborted_completion_is_dropped(tmp_path):
    cast = Cast(critic=FakeTrainee(head="value"))
    cast.sampler.failures["0/p0/0"] = FinishReason.ABORTED
    _, _, reasons = await play(cast, critic_config(), tmp_path, num_prompts=4)
    assert reasons == {"rollout_aborted": 1}


async def test_reward_that_is_not_finite_is_a_drop(tmp_path):
    cast = Cast(critic=FakeTrainee(head="value"))
    cast.judge.failures["0/p0/0"] = Reward(reward=float("nan"), score=0.0)
    _, _, reasons = await play(cast, critic_config(), tmp_path, num_prompts=4)
    assert reasons == {"reward_not_finite": 1}


async def test_prompt_that_the_engine_refuses_costs_its_group_only(tmp_path):
    cast = Cast()
    generate = cast.sampler.generate

    async def refusing(request):
        if request.groups[0].group_id == "0/p3":
            raise DataError("too long", reason="PROMPT_TOO_LONG")
        return await generate(request)

    cast.sampler.generate = refusing
    _, counts, reasons = await play(cast, ppo_config(), tmp_path, num_prompts=4)
    assert counts == {"trained": 6, "dropped": 2}
    assert reasons == {"rollout_prompt_too_long": 2}


async def test_a_whole_rollout_lost_ends_the_run_and_says_why(tmp_path):
    cast = Cast()
    for i in range(8):
        for j in range(2):
            cast.judge.failures[f"0/p{i}/{j}"] = BROKEN
    with pytest.raises(BaseExceptionGroup) as caught:
        await play(cast, ppo_config(), tmp_path)
    errors = caught.value
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    assert isinstance(errors, FatalError)
    assert "8 samples in a row were dropped" in str(errors)
    assert "reward_time_limit" in str(errors)
    assert "took too long" in str(errors)
    assert cast.policy.of("train") == []


async def test_an_empty_tail_rollout_is_skipped(tmp_path):
    cast = Cast()
    # 5 prompts: the last rollout has one prompt, and loses it.
    order = [p.prompt_id for p in last_rollout(ppo_config(), 5)]
    for j in range(2):
        cast.judge.failures[f"0/{order[0]}/{j}"] = BROKEN
    _, counts, _ = await play(cast, ppo_config(), tmp_path, num_prompts=5)
    assert counts == {"trained": 8, "dropped": 2}
    assert [e[1] for e in cast.policy.of("push")] == [1, 2]


def last_rollout(config, num_prompts):
    from quartet.trainer.schedule import SeededBatches
    from tests.unit.trainer.players import prompts

    batches = SeededBatches(
        prompts(num_prompts), batch_size=config.rollout.batch_size, seed=config.train.seed
    )
    return list(batches.run(1))[-1].rows


async def test_generation_is_bounded(tmp_path):
    cast = Cast()
    rollout = {
        "batch_size": 8,
        "n_samples_per_prompt": 2,
        "max_new_tokens": 1024,
        "max_groups_in_flight": 3,
    }
    await play(cast, ppo_config(rollout=rollout), tmp_path)
    assert cast.sampler.most_in_flight == 3


async def test_prompts_with_short_answers_share_calls_within_the_bound(tmp_path):
    cast = Cast()
    rollout = {
        "batch_size": 8,
        "n_samples_per_prompt": 2,
        "max_new_tokens": 256,  # 4 prompts make 2048 tokens
        "max_groups_in_flight": 8,
    }
    _, counts, _ = await play(cast, ppo_config(rollout=rollout), tmp_path)
    assert [len(request.groups) for request in cast.sampler.log] == [4, 4]
    assert cast.sampler.most_in_flight == 2
    assert counts == {"trained": 16}
    assert len({request.request_id for request in cast.sampler.log}) == 2
    narrow = Cast()
    config = ppo_config(rollout=rollout | {"max_groups_in_flight": 3})
    await play(narrow, config, tmp_path / "narrow")
    assert [len(request.groups) for request in narrow.sampler.log] == [3, 3, 2]
    assert narrow.sampler.most_in_flight == 1


async def test_groups_go_on_while_others_still_generate(tmp_path):
    cast = Cast()
    gate = cast.sampler.gates["0/p0"] = asyncio.Event()
    playing = asyncio.create_task(play(cast, ppo_config(), tmp_path, num_prompts=4))
    async with asyncio.timeout(5):
        while sum(len(r.items) for r in cast.judge.log) < 6:  # noqa: ASYNC110 - fakes have no event
            await asyncio.sleep(0.001)
    assert all(item.prompt != "prompt 0" for r in cast.judge.log for item in r.items)
    gate.set()
    await playing
    assert sum(len(r.items) for r in cast.judge.log) == 8


async def test_policy_rests_for_exactly_n_rollouts(tmp_path):
    cast = Cast(critic=FakeTrainee(head="value"))
    config = critic_config(critic={"freezing_steps": 1})
    _, counts, _ = await play(cast, config, tmp_path, num_prompts=12)
    assert counts == {"trained": 24}
    assert len(cast.critic.of("train")) == 6
    assert len(cast.policy.of("train")) == 4
    # No push after the frozen rollout: the weights are the same.
    assert [e[1] for e in cast.policy.of("push")] == [1, 2, 3]
    assert "policy_loss" not in cast.metrics[0]
    assert cast.policy.of("start")[0][1].schedule.total_steps == 4


async def test_no_reference_no_kl(tmp_path):
    cast = Cast(reference=None)
    config = ppo_config(algo={"advantage": {"estimator": "group_norm"}, "kl": {"init_coef": 0.0}})
    await play(cast, config, tmp_path)
    assert "kl" not in cast.metrics[0]


async def test_adaptive_kl_rises_above_the_target_and_is_saved(tmp_path):
    cast = Cast()
    cast.reference.shift = 0.5
    kl = {"init_coef": 0.1, "target": 0.1, "horizon": 100}
    config = ppo_config(algo={"advantage": {"estimator": "group_norm"}, "kl": kl})
    run = cast.run(config, tmp_path)
    await PpoLoop(config, run, inputs(8), cast.players).run()
    assert cast.metrics[0]["kl"] == pytest.approx(0.5)
    coefs = [m["kl_coef"] for m in cast.metrics]
    assert coefs == [pytest.approx(0.1), pytest.approx(0.1 * (1 + 0.2 * 8 / 100))]
    state = await run.ledger.load_state()
    assert state["kl"]["coef"] == pytest.approx(coefs[1] * (1 + 0.2 * 8 / 100))
    assert state["cursor"] == 2
    await run.ledger.close()
    run.progress.close()


async def test_kl_as_loss_sends_the_reference_and_leaves_the_reward_alone(tmp_path):
    cast = Cast()
    cast.reference.shift = 0.5
    algo = {"advantage": {"estimator": "group_norm"}, "kl": {"init_coef": 0.1, "use_loss": True}}
    await play(cast, ppo_config(algo=algo), tmp_path, num_prompts=4)
    (_, step, (samples,)) = cast.policy.of("train")[0]
    assert step.loss.kl_loss.coef == 0.1
    np.testing.assert_allclose(samples.old_logprobs - samples.ref_logprobs, 0.5, atol=1e-6)


async def test_kl_in_the_reward_lowers_the_return(tmp_path):
    returns = []
    for number, shift in enumerate((0.0, 0.5)):
        cast = Cast(critic=FakeTrainee(head="value"))
        cast.reference.shift = shift
        algo = {"advantage": {"estimator": "gae"}, "kl": {"init_coef": 0.1}}
        await play(cast, ppo_config(algo=algo), tmp_path / str(number), num_prompts=4)
        returns.append(cast.metrics[0]["return"])
        lengths = cast.metrics[0]["response_length"]
    assert returns[0] - returns[1] == pytest.approx(0.1 * 0.5 * lengths)


async def test_same_seed_same_numbers_and_same_calls(tmp_path):
    config = ppo_config(train={"batch_size": 4, "seed": 7, "full_determinism_enable": True})
    casts = [Cast(), Cast()]
    for number, cast in enumerate(casts):
        await play(cast, config, tmp_path / str(number))
    first, second = ([without_clock(m) for m in cast.metrics] for cast in casts)
    assert first == second
    assert [r.groups for r in casts[0].sampler.log] == [r.groups for r in casts[1].sampler.log]
    assert all(r.isolated for r in casts[0].sampler.log)
    other = Cast()
    changed = ppo_config(train={"batch_size": 4, "seed": 8, "full_determinism_enable": True})
    await play(other, changed, tmp_path / "other")
    assert [without_clock(m) for m in other.metrics] != first


async def test_deterministic_phases_are_barriers_with_one_call_each(tmp_path):
    config = ppo_config(train={"batch_size": 4, "seed": 7, "full_determinism_enable": True})
    cast = Cast()
    await play(cast, config, tmp_path, num_prompts=4)
    assert [len(r.groups) for r in cast.sampler.log] == [4]
    assert [len(r.items) for r in cast.judge.log] == [8]
    assert [len(entry[1]) for entry in cast.policy.of("forward")] == [4]
    assert [len(chunks) for chunks in cast.reference.log] == [4]


def without_clock(metrics):
    return {k: v for k, v in metrics.items() if not k.startswith("timing/")}


async def test_streaming_gives_the_same_numbers_as_barriers(tmp_path):
    rows = []
    for number, deterministic in enumerate((True, False)):
        cast = Cast()
        train = {"batch_size": 4, "seed": 7, "full_determinism_enable": deterministic}
        await play(cast, ppo_config(train=train), tmp_path / str(number))
        rows.append([without_clock(m) for m in cast.metrics])
    assert rows[0] == rows[1]


async def test_skipped_optimizer_step_is_counted_and_the_next_one_goes_on(tmp_path):
    cast = Cast()
    cast.policy.not_finite = {1}
    await play(cast, ppo_config(), tmp_path)
    assert [m["actor_skipped_steps"] for m in cast.metrics] == [1.0, 0.0]
    ids = [e[1].request_id for e in cast.policy.of("train")]
    assert len(set(ids)) == len(ids) == 4


async def test_a_refused_step_is_in_no_mean_and_does_not_stop_the_kl_control(tmp_path):
    """Its numbers are NaN: the KL that steers the weight is that of the steps that were taken."""
    cast = Cast()
    cast.policy.not_finite = {0, 3}
    kl = {"init_coef": 0.1, "target": 0.1, "horizon": 100, "use_loss": True}
    algo = {"advantage": {"estimator": "group_norm"}, "kl": kl}
    await play(cast, ppo_config(algo=algo), tmp_path)
    assert [m["kl"] for m in cast.metrics] == [0.25, 0.25]
    assert [m["actor_skipped_steps"] for m in cast.metrics] == [1.0, 1.0]
    assert [m["ppo_ratio_first"] for m in cast.metrics] == [1.0, 1.0]
    assert cast.metrics[1]["kl_coef"] == pytest.approx(0.1 * (1 + 0.2 * 8 / 100))
    assert np.isfinite([m["policy_loss"] for m in cast.metrics]).all()


async def test_gradients_that_stay_not_finite_end_the_run(tmp_path):
    cast = Cast()
    cast.policy.not_finite = {0, 1, 2}
    with pytest.raises(BaseExceptionGroup) as caught:
        await play(cast, ppo_config(), tmp_path)
    assert "3 optimizer steps in a row" in str(caught.value.exceptions[0])


async def test_push_that_nobody_takes_ends_the_run(tmp_path):
    cast = Cast()
    cast.policy.refuse_push = True
    with pytest.raises(FatalError, match="version 1 of the policy in 3 pushes"):
        await play(cast, ppo_config(), tmp_path)
    assert [e[1] for e in cast.policy.of("push")] == [1, 1, 1]


async def test_a_lost_push_is_tried_again(tmp_path):
    cast = Cast()
    config = ppo_config()
    run = cast.run(config, tmp_path)
    said = []
    run.progress.say = said.append
    push = cast.policy.push_weights

    async def first_fails(*, request_id, policy_version, addresses):
        cast.policy.push_weights = push
        raise InfraError("prepare: tcp handshaker shutdown")

    cast.policy.push_weights = first_fails
    await PpoLoop(config, run, inputs(4), cast.players).run()
    await run.ledger.close()
    run.progress.close()
    assert [e[1] for e in cast.policy.of("push")] == [1, 2]
    again = [line for line in said if "trying again" in line]
    assert [line.split(": ", 1)[1] for line in again] == [
        "trying again, 1 of at most 2: prepare: tcp handshaker shutdown"
    ]


async def test_evaluation_that_is_not_finite_names_the_sample(tmp_path):
    cast = Cast()
    forward = cast.policy.forward

    async def broken(chunks, *, output, temperature=1.0):
        results = await forward(chunks, output=ForwardOutput.LOGPROBS)
        results[0].output[2] = np.nan
        return results

    cast.policy.forward = broken
    with pytest.raises(BaseExceptionGroup) as caught:
        await play(cast, ppo_config(), tmp_path)
    error = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert "policy's log-probability of token 2 is nan [sample 0/p" in str(error)


async def test_texts_are_logged(tmp_path):
    cast = Cast()
    await play(cast, ppo_config(), tmp_path, num_prompts=4)
    ((step, texts),) = cast.sink.samples
    assert step == 1
    assert len(texts) == 8
    assert texts[0].prompt.startswith("prompt ")
    assert len(texts[0].completion.split()) == texts[0].num_tokens


async def test_max_steps_cuts_the_run_and_its_schedule(tmp_path):
    cast = Cast()
    config = ppo_config(train={"batch_size": 4, "seed": 7, "max_steps": 1})
    await play(cast, config, tmp_path)
    assert len(cast.metrics) == 1
    assert schedule_of(config, 8).policy_steps == 2


async def test_each_episode_has_its_own_order_and_samples(tmp_path):
    cast = Cast()
    config = ppo_config(train={"batch_size": 4, "seed": 7, "num_episodes": 2})
    _, counts, _ = await play(cast, config, tmp_path)
    assert counts == {"trained": 32}
    orders = [[r.groups[0].group_id for r in cast.sampler.log[i : i + 8]] for i in (0, 8)]
    assert {g.split("/")[0] for g in orders[0]} == {"0"}
    assert {g.split("/")[0] for g in orders[1]} == {"1"}
    assert [g[2:] for g in orders[0]] != [g[2:] for g in orders[1]]


async def test_restarted_rollout_gets_the_weights_that_generation_asks_for(tmp_path):
    cast = Cast()
    config = ppo_config()
    run = cast.run(config, tmp_path)
    loop = PpoLoop(config, run, inputs(8), cast.players)
    generate = cast.sampler.generate

    async def once_restarted(request):
        if request.min_policy_version == 2 and cast.sampler.version == 2:
            cast.sampler.generate = generate
            cast.sampler.version = 0
            await cast.sampler.catch_up("r:1")
        return await generate(request)

    cast.sampler.generate = once_restarted
    await loop.run()
    await run.ledger.close()
    run.progress.close()
    assert [e[1] for e in cast.policy.of("push")] == [1, 2, 2, 3]
    assert [m["policy_version"] for m in cast.metrics] == [1.0, 2.0]


async def test_push_is_repeated_when_the_rollout_service_is_back(tmp_path):
    cast = Cast()
    config = ppo_config()
    run = cast.run(config, tmp_path)
    cast.policy.refuse_push = True

    async def settle():
        cast.policy.refuse_push = False
        return True

    run.launcher.settle = settle
    await PpoLoop(config, run, inputs(4), cast.players).run()
    await run.ledger.close()
    run.progress.close()
    assert [e[1] for e in cast.policy.of("push")] == [1, 1, 2]


async def test_a_run_of_one_step_is_told_that_warm_up_takes_it(tmp_path):
    cast = Cast()
    config = ppo_config(train={"batch_size": 128, "max_steps": 1})
    run = cast.run(config, tmp_path)
    said = []
    run.progress.say = said.append
    await PpoLoop(config, run, inputs(8), cast.players).run()
    await run.ledger.close()
    assert sum("1 of 1 optimizer steps trains nothing" in line for line in said) == 1
