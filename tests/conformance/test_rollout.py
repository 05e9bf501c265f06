"""The engines pass the rollout suite over a real server, and the suite finds broken servers."""

import dataclasses

import numpy as np
import pytest
from quartet_rollout.server import RolloutService

from quartet.config import RolloutServeConfig
from quartet.config.ds import LoadConfig
from quartet.config.sampling import RolloutEngineConfig
from quartet.testing.conformance import run_checks
from quartet.testing.conformance.rollout import CHECKS, RolloutSubject
from quartet.testing.fakes.rollout import FakeRollout
from quartet.testing.loopback import loopback
from quartet.types import FinishReason, SamplingParams, TensorSpec, WeightManifest


def service_of(folder, engine="transformers"):
    return RolloutService(
        RolloutServeConfig(
            rollout=RolloutEngineConfig(
                model_name_or_path=str(folder), engine=engine, max_num_sequences=16
            ),
            ds=LoadConfig(param_dtype="fp32"),
        )
    )


def failed(results):
    return {r.name: r.message for r in results if r.outcome == "failed"}


@pytest.mark.parametrize("engine", ["transformers"])
async def test_engines_pass(engine, tiny_model_dir):
    async with loopback(service_of(tiny_model_dir, engine)) as address:
        subject = RolloutSubject(address=address, reference=str(tiny_model_dir), is_exclusive=True)
        results = await run_checks(CHECKS, subject)
    assert failed(results) == {}
    # A fast machine may fill the tiny context before a deadline or a cancellation.
    skipped = {r.name for r in results if r.outcome == "skipped"}
    assert skipped <= {"keeps_deadlines", "stops_cancelled_calls"}


async def test_the_fake_passes():
    manifest = WeightManifest(tensors=(TensorSpec(name="w", dtype="float32", shape=(2,)),))
    async with loopback(FakeRollout(manifest=manifest)) as address:
        results = await run_checks(CHECKS, RolloutSubject(address=address, is_exclusive=True))
    assert failed(results) == {}


async def test_a_shared_server_is_left_alone(tiny_model_dir):
    async with loopback(service_of(tiny_model_dir)) as address:
        results = await run_checks(CHECKS, RolloutSubject(address=address))
    assert failed(results) == {}
    skipped = {r.name for r in results if r.outcome == "skipped"}
    assert skipped - {"keeps_deadlines"} == {
        "matches_the_reference_greedily",
        "matches_the_reference_in_logprobs",
        "stops_cancelled_calls",
        "pauses_and_resumes",
        "sleeps_and_wakes",
    }


def map_completions(result, change):
    groups = tuple(
        dataclasses.replace(group, completions=tuple(change(c) for c in group.completions))
        for group in result.groups
    )
    return dataclasses.replace(result, groups=groups)


def raw_for_processed(result, request):
    """Log-probabilities of another temperature than is named."""
    return map_completions(
        result, lambda c: dataclasses.replace(c, logprobs=(c.logprobs * 0.9).astype(np.float32))
    )


def without_stop_token(result, request):
    def cut(c):
        if c.finish_reason is not FinishReason.STOP:
            return c
        spans = tuple(dataclasses.replace(s, end=s.end - 1) for s in c.versions)
        return dataclasses.replace(
            c, token_ids=c.token_ids[:-1], logprobs=c.logprobs[:-1], versions=spans
        )

    return map_completions(result, cut)


def unsigned(result, request):
    return dataclasses.replace(result, replica="")


def mixed_up(result, request):
    return dataclasses.replace(result, groups=result.groups[::-1])


def wrong_version(result, request):
    def date_back(c):
        spans = tuple(dataclasses.replace(s, policy_version=9) for s in c.versions)
        return dataclasses.replace(c, versions=spans)

    return map_completions(result, date_back)


@pytest.mark.parametrize(
    ("break_it", "caught_by"),
    [
        (raw_for_processed, {"matches_the_reference_in_logprobs"}),
        (without_stop_token, {"stops_at_stop_tokens"}),
        (unsigned, {"answers_what_is_asked"}),
        (mixed_up, {"answers_what_is_asked"}),
        (wrong_version, {"answers_what_is_asked"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_broken_answers_are_caught(break_it, caught_by, tiny_model_dir):
    service = service_of(tiny_model_dir)
    generate = service.room.generate

    async def broken(request):
        return break_it(await generate(request), request)

    service.room.generate = broken
    assert failed(await graded(service, tiny_model_dir, caught_by)).keys() == caught_by


async def graded(service, folder, names):
    """Outcome of some checks: all of them take seconds, and `test_engines_pass` runs them all."""
    checks = [check for check in CHECKS if check.__name__ in names]
    async with loopback(service) as address:
        return await run_checks(
            checks, RolloutSubject(address=address, reference=str(folder), is_exclusive=True)
        )


@pytest.mark.parametrize(
    ("break_it", "caught_by"),
    [
        ("ignores_seeds", "repeats_seeds"),
        ("forgets_answers", "answers_a_repeat_with_the_first_answer"),
        ("ignores_versions", "refuses_older_weights"),
        ("never_sleeps", "sleeps_and_wakes"),
        ("never_pauses", "pauses_and_resumes"),
        ("always_greedy", "draws_different_samples"),
        ("commits_anything", "refuses_pushes_out_of_order"),
    ],
)
async def test_broken_servers_are_caught(break_it, caught_by, tiny_model_dir, monkeypatch):
    service = service_of(tiny_model_dir)
    room, generate = service.room, service.room.generate

    async def changed(request):
        if break_it == "ignores_seeds":
            groups = tuple(dataclasses.replace(g, seeds=()) for g in request.groups)
            request = dataclasses.replace(request, groups=groups)
        if break_it == "ignores_versions":
            request = dataclasses.replace(request, min_policy_version=None)
        if break_it == "always_greedy":
            sampling = SamplingParams(temperature=0.0, max_new_tokens=4)
            request = dataclasses.replace(request, sampling=sampling)
        return await generate(request)

    async def nothing(*_):
        return room.state if break_it == "never_sleeps" else 0

    async def run(self, request_id, work):
        return await work()

    async def committed(request):
        from quartet.types import CommitWeightsResult

        return CommitWeightsResult(policy_version=request.policy_version)

    room.generate = changed
    if break_it == "forgets_answers":
        monkeypatch.setattr("quartet.rpc.idempotency.IdempotencyCache.run", run)
    elif break_it == "never_sleeps":
        room.sleep = nothing
    elif break_it == "never_pauses":
        room.pause = nothing
    elif break_it == "commits_anything":
        room.commit = committed
    assert caught_by in failed(await graded(service, tiny_model_dir, {caught_by}))


async def test_nobody_there_is_one_failure_a_check(tiny_model_dir):
    async with loopback(service_of(tiny_model_dir)) as address:
        pass
    quick = [c for c in CHECKS if c.__name__ == "says_what_it_is"]
    results = await run_checks(quick, RolloutSubject(address=address))
    assert address in failed(results)["says_what_it_is"]
