"""The engines pass the rollout suite over a real server, and the suite finds broken servers."""

import dataclasses

import numpy as np
import pytest
import torch
from quartet_rollout.server import RolloutService

from quartet.config import RolloutServeConfig
from quartet.config.ds import LoadConfig
from quartet.config.sampling import RolloutEngineConfig
from quartet.testing.conformance import run_checks
from quartet.testing.conformance.rollout import CHECKS, RolloutSubject
from quartet.testing.conformance.rollout_states import CHECKS as STATES
from quartet.testing.conformance.rollout_weights import CHECKS as WEIGHTS
from quartet.testing.fakes.rollout import FakeRollout
from quartet.testing.loopback import loopback
from quartet.testing.tiny import make_tiny_model
from quartet.types import (
    FinishReason,
    PushBackend,
    SamplingParams,
    ServerInfo,
    TensorSpec,
    WeightManifest,
)
from tests.conformance.broken_fakes import map_completions


def service_of(folder, engine="transformers", max_num_sequences=16):
    return RolloutService(
        RolloutServeConfig(
            rollout=RolloutEngineConfig(
                model_name_or_path=str(folder), engine=engine, max_num_sequences=max_num_sequences
            ),
            ds=LoadConfig(param_dtype="fp32"),
        )
    )


def failed(results):
    return {r.name: r.message for r in results if r.outcome == "failed"}


# A fast machine may fill the tiny context, or a slow one not begin, before anything can happen in
# the middle of a completion.
MAY_BE_SKIPPED = {
    "keeps_deadlines",
    "stops_cancelled_calls",
    "works_once_for_all_repeats",
    "keeps_what_runs_in_a_pause",
    "ends_what_runs_where_a_pause_aborts",
    "drains_before_it_pauses",
    "finishes_calls_before_it_sleeps",
    "names_the_version_of_each_token",
    "computes_nothing_without_weights",
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers"])
async def test_engines_pass(engine, tiny_model_dir):
    async with loopback(service_of(tiny_model_dir, engine)) as address:
        subject = RolloutSubject(address=address, reference=str(tiny_model_dir), is_exclusive=True)
        results = await run_checks(CHECKS, subject)
    assert failed(results) == {}
    assert {r.name for r in results if r.outcome == "skipped"} <= MAY_BE_SKIPPED


async def test_pushes_reach_an_untied_head_and_come_by_file(tmp_path):
    model = make_tiny_model(tmp_path / "untied", tied=False)
    names = {"takes_embeddings_and_head", "forgets_half_a_push", "refuses_other_models"}
    checks = [check for check in CHECKS if check.__name__ in names]
    async with loopback(service_of(model)) as address:
        subject = RolloutSubject(
            address=address,
            reference=str(model),
            is_exclusive=True,
            push_backend=PushBackend.FILE,
        )
        results = await run_checks(checks, subject)
    assert {r.name: r.outcome for r in results} == dict.fromkeys(names, "passed")


async def test_a_server_gets_its_weights_back(tiny_model_dir):
    """Also where a check fails in the middle; a model that is not its own is never pushed to it."""
    service = service_of(tiny_model_dir)
    push = [check for check in CHECKS if check.__name__ == "serves_what_was_pushed"]
    async with loopback(service) as address:
        subject = RolloutSubject(address=address, reference=str(tiny_model_dir), is_exclusive=True)
        [result] = await run_checks(push, subject)
        assert result.outcome == "passed"
        assert service.room.policy_version == 3
        strict = dataclasses.replace(subject, logprob_tolerance=1e-12)
        [result] = await run_checks(push, strict)
        assert (result.outcome, "weights back" in result.message) == ("skipped", True)
        assert service.room.policy_version == 3
        checks = [check for check in CHECKS if check.__name__ == "matches_the_reference_greedily"]
        [result] = await run_checks(checks, subject)
        assert result.outcome == "passed"


async def test_the_fake_passes():
    specs = tuple(TensorSpec(name=name, dtype="float32", shape=(64,)) for name in "wv")
    info = ServerInfo(
        service="rollout",
        replica="fake",
        capabilities=("sleep",),
        max_sequence_length=64,
        max_concurrent_calls=4,
    )
    fake = FakeRollout(info, WeightManifest(tensors=specs), seconds_per_token=0.01)
    async with loopback(fake) as address:
        subject = RolloutSubject(
            address=address,
            is_exclusive=True,
            weights=lambda: {name: torch.zeros(64) for name in "wv"},
        )
        results = await run_checks(CHECKS, subject)
    assert failed(results) == {}
    skipped = {r.name for r in results if r.outcome == "skipped"}
    # It is no model, and offers no batches of their own.
    assert skipped - MAY_BE_SKIPPED == {
        "matches_the_reference_greedily",
        "matches_the_reference_in_logprobs",
        "stops_at_its_own_end_token",
        "takes_embeddings_and_head",
        "repeats_isolated_batches",
    }


async def test_a_shared_server_is_left_alone(tiny_model_dir):
    """Not one call that others could feel, also where a model is given."""
    seen = []
    service = service_of(tiny_model_dir)
    for name in ("pause", "sleep", "wake", "resume", "prepare", "receive"):
        setattr(service.room, name, lambda *_, name=name: seen.append(name))
    async with loopback(service) as address:
        subject = RolloutSubject(address=address, reference=str(tiny_model_dir))
        results = await run_checks(CHECKS, subject)
    assert failed(results) == {}
    assert seen == []
    skipped = {r.name for r in results if r.outcome == "skipped"}
    writing = {check.__name__ for check in (*STATES, *WEIGHTS)} - {"refuses_pushes_out_of_order"}
    assert skipped - {"keeps_deadlines"} == writing | {
        "stops_cancelled_calls",
        "works_once_for_all_repeats",
        "loses_no_call_beyond_its_capacity",
    }


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


def unlikely(result, request):
    """Another token than the best."""
    return map_completions(
        result, lambda c: dataclasses.replace(c, token_ids=(c.token_ids + 1) % 384)
    )


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
        (unlikely, {"matches_the_reference_greedily"}),
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

    async def run(self, request_id, digest, work):
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
