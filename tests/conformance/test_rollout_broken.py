"""For each check of the rollout suite a server that is broken in the way it looks for."""

import asyncio
import dataclasses
import itertools

import numpy as np
import pytest
import torch
from quartet_rollout.engines.transformers.engine import TransformersEngine
from quartet_rollout.engines.transformers.model import CausalLm

from quartet.errors import InfraError
from quartet.nn import lm_head_of
from quartet.testing.conformance import run_checks
from quartet.testing.conformance.rollout import CHECKS, RolloutSubject
from quartet.testing.fakes import rollout as fake_rollout
from quartet.testing.fakes.rollout import FakeRollout
from quartet.testing.loopback import loopback
from quartet.types import (
    FinishReason,
    PauseMode,
    ServerInfo,
    TensorSpec,
    VersionSpan,
    WeightManifest,
)
from tests.conformance.test_rollout import map_completions, service_of

NAMES = ("w", "v")
INFO = ServerInfo(
    service="rollout",
    replica="rollout-fake",
    capabilities=("sleep", "isolated"),
    max_sequence_length=64,
    max_concurrent_calls=4,
)


def new_fake(seconds_per_token=0.0):
    specs = tuple(TensorSpec(name=name, dtype="float32", shape=(64,)) for name in NAMES)
    manifest = WeightManifest(tensors=specs)
    return FakeRollout(INFO, manifest, seconds_per_token=seconds_per_token)


def weights():
    return {name: torch.zeros(64) for name in NAMES}


async def outcome(service, name, **subject):
    """What one check says of a server."""
    async with loopback(service) as address:
        checks = [check for check in CHECKS if check.__name__ == name]
        given = RolloutSubject(address=address, is_exclusive=True, **subject)
        [result] = await run_checks(checks, given)
    return result


# ------------------------------------------------------------------ broken fakes


def changes_answers(change):
    """A way to break a fake: all its answers are changed."""

    def break_it(fake, monkeypatch):
        encode = fake_rollout.codec.encode_generate_result
        monkeypatch.setattr(
            fake_rollout.codec, "encode_generate_result", lambda result: encode(change(result))
        )

    return break_it


def without_manifest(fake, monkeypatch):
    fake.manifest = WeightManifest(tensors=())


def takes_any_token(fake, monkeypatch):
    monkeypatch.setattr(fake_rollout, "VOCABULARY_LIMIT", 1 << 40)


def takes_any_prompt(fake, monkeypatch):
    fake._check_prompt = lambda group: None


def takes_any_version(fake, monkeypatch):
    fake._check_state = lambda asked: None


async def _no_cache(self, request_id, digest, work):
    return await work()


def works_on_every_repeat(fake, monkeypatch):
    monkeypatch.setattr("quartet.rpc.idempotency.IdempotencyCache.run", _no_cache)


def takes_used_ids(fake, monkeypatch):
    monkeypatch.setattr("quartet.rpc.idempotency._check_repeat", lambda *_: None)


def breaks_under_load(fake, monkeypatch):
    """Refuses without saying when to come again."""
    numbers, generate = itertools.count(), fake.Generate

    async def refuses(request, context):
        if next(numbers) % 5 == 4:
            raise InfraError("no room", reason="FULL")
        return await generate(request, context)

    fake.Generate = refuses


def never_lets_go(fake, monkeypatch):
    """What nobody waits for is made to its end."""
    complete = fake._complete

    async def goes_on(*args):
        fake._count(1)
        asyncio.get_running_loop().call_later(20, fake._count, -1)
        return await complete(*args)

    fake._complete = goes_on


def cuts_what_it_should_keep(fake, monkeypatch):
    close = fake._gate.close
    fake._gate.close = lambda mode: close(PauseMode.ABORT if mode is PauseMode.KEEP else mode)


def keeps_what_it_should_cut(fake, monkeypatch):
    close = fake._gate.close
    fake._gate.close = lambda mode: close(PauseMode.KEEP if mode is PauseMode.ABORT else mode)


def pauses_without_a_drain(fake, monkeypatch):
    close = fake._gate.close
    fake._gate.close = lambda mode: close(PauseMode.KEEP)


def never_pauses(fake, monkeypatch):
    async def nothing(mode):
        pass

    fake._gate.close = nothing


def never_sleeps(fake, monkeypatch):
    fake._settle = lambda: None


def sleeps_at_once(fake, monkeypatch):
    async def nothing():
        pass

    fake._gate.emptied = nothing


def wakes_whole(fake, monkeypatch):
    """Whatever tags are asked for."""
    decode = fake_rollout.codec.decode_wake_request

    monkeypatch.setattr(
        fake_rollout.codec,
        "decode_wake_request",
        lambda request: dataclasses.replace(decode(request), tags=()),
    )


def forgets_that_it_forgot(fake, monkeypatch):
    decode = fake_rollout.codec.decode_sleep_request
    monkeypatch.setattr(
        fake_rollout.codec,
        "decode_sleep_request",
        lambda request: dataclasses.replace(decode(request), level=1),
    )


def wakes_at_a_push(fake, monkeypatch):
    serve = fake._serve

    def wakes(*args):
        fake._asleep.clear()
        serve(*args)

    fake._serve = wakes


def commits_anything(fake, monkeypatch):
    async def commit(request, context):
        asked = fake_rollout.codec.decode_commit_weights_request(request)
        return fake_rollout.codec.encode_commit_weights_result(
            fake_rollout.CommitWeightsResult(policy_version=asked.policy_version)
        )

    fake.CommitWeights = commit


def keeps_old_weights(fake, monkeypatch):
    """A push changes the version and nothing else."""
    serve = fake._serve
    fake._serve = lambda version, _: serve(version, fake.weights)


def serves_what_is_prepared(fake, monkeypatch):
    prepare = fake._inbox.prepare

    async def prepares(request):
        await prepare(request)
        fake.policy_version = request.policy_version

    fake._inbox.prepare = prepares


def serves_what_was_aborted(fake, monkeypatch):
    """Tensors are put in place as they come."""
    abort = fake._inbox.abort

    def aborts(request):
        abort(request)
        fake.weights += 50

    fake._inbox.abort = aborts


def takes_any_bytes(fake, monkeypatch):
    fake._inbox._verify = lambda push, digest: None


def takes_old_epochs(fake, monkeypatch):
    prepare = fake._inbox.prepare

    async def prepares(request):
        fake._inbox._last_epoch = -1
        await prepare(request)

    fake._inbox.prepare = prepares
    fake.PrepareWeights = _prepares_any_epoch(fake)


def _prepares_any_epoch(fake):
    prepare = fake.PrepareWeights

    async def prepares(request, context):
        fake._epoch = -1
        return await prepare(request, context)

    return prepares


def takes_other_models(fake, monkeypatch):
    monkeypatch.setattr("quartet.weights.receive.check_manifest", lambda *_: None)


def crosses_answers(fake, monkeypatch):
    """Under load everybody gets the first caller's samples."""
    first = []
    generate = fake._generate

    async def generates(asked):
        if not first:
            first.append(asked)
        return await generate(first[0])

    fake._generate = generates


def tokens_cut(result):
    def cut(c):
        if c.finish_reason is not FinishReason.LENGTH:
            return c
        return dataclasses.replace(c, finish_reason=FinishReason.STOP)

    return map_completions(result, cut)


def nameless(result):
    return map_completions(result, lambda c: dataclasses.replace(c, sample_id=""))


def another_distribution(result):
    spec = dataclasses.replace(result.logprob_spec, temperature=1.0)
    return dataclasses.replace(result, logprob_spec=spec)


def equal_samples(result):
    groups = tuple(
        dataclasses.replace(g, completions=(g.completions[0],) * len(g.completions))
        for g in result.groups
    )
    return dataclasses.replace(result, groups=groups)


def restless(result):
    """Numbers that are never twice the same."""

    def change(c):
        noise = np.float32(-np.random.default_rng().random() / 1000)
        return dataclasses.replace(c, logprobs=c.logprobs + noise)

    return map_completions(result, change)


def gaps(result):
    def change(c):
        spans = tuple(dataclasses.replace(s, end=s.end - 1) for s in c.versions)
        return dataclasses.replace(c, versions=spans)

    return map_completions(result, change)


SLOW = 0.02
"""Seconds a token, where a check needs the middle of a completion."""

FAKES = [
    (without_manifest, "says_what_it_is", 0),
    (takes_any_prompt, "refuses_prompts_that_do_not_fit", 0),
    (takes_any_token, "refuses_tokens_that_it_does_not_know", 0),
    (takes_any_version, "refuses_older_weights", 0),
    (works_on_every_repeat, "works_once_for_all_repeats", SLOW),
    (takes_used_ids, "refuses_a_used_request_id", 0),
    (crosses_answers, "serves_many_at_once", 0),
    (breaks_under_load, "loses_no_call_beyond_its_capacity", 0),
    (never_lets_go, "keeps_deadlines", SLOW * 2),
    (never_lets_go, "stops_cancelled_calls", SLOW),
    (changes_answers(nameless), "answers_what_is_asked", 0),
    (changes_answers(gaps), "answers_what_is_asked", 0),
    (changes_answers(another_distribution), "names_the_distribution", 0),
    (changes_answers(equal_samples), "draws_different_samples", 0),
    (changes_answers(restless), "repeats_isolated_batches", 0),
    (changes_answers(tokens_cut), "ends_at_its_length", 0),
    (changes_answers(tokens_cut), "ends_where_the_context_ends", 0),
    (never_pauses, "pauses_and_resumes", 0),
    (cuts_what_it_should_keep, "keeps_what_runs_in_a_pause", SLOW),
    (keeps_what_it_should_cut, "ends_what_runs_where_a_pause_aborts", SLOW * 2),
    (pauses_without_a_drain, "drains_before_it_pauses", SLOW),
    (never_sleeps, "sleeps_and_wakes", 0),
    (sleeps_at_once, "finishes_calls_before_it_sleeps", SLOW),
    (wakes_whole, "wakes_by_tags", 0),
    (forgets_that_it_forgot, "forgets_its_weights_at_level_2", 0),
    (wakes_at_a_push, "takes_a_push_before_its_caches", 0),
    (commits_anything, "refuses_pushes_out_of_order", 0),
    (keeps_old_weights, "serves_what_was_pushed", 0),
    (serves_what_is_prepared, "forgets_a_push_that_was_only_prepared", 0),
    (serves_what_was_aborted, "forgets_half_a_push", 0),
    (takes_any_bytes, "refuses_bytes_that_differ", 0),
    (takes_old_epochs, "refuses_old_epochs", 0),
    (takes_other_models, "refuses_other_models", 0),
]


@pytest.mark.parametrize(("break_it", "name", "seconds"), FAKES)
async def test_broken_fakes_are_caught(break_it, name, seconds, monkeypatch):
    fake = new_fake(seconds)
    break_it(fake, monkeypatch)
    result = await outcome(fake, name, weights=weights)
    assert result.outcome == "failed", result.message
    assert result.advice


# ------------------------------------------------- broken engines of a real model


def never_stops_at_its_end(room, monkeypatch):
    generate = room.generate

    async def ignores(request):
        sampling = dataclasses.replace(request.sampling, ignore_eos=True)
        return await generate(dataclasses.replace(request, sampling=sampling))

    room.generate = ignores


def keeps_a_head_of_its_own(room, monkeypatch):
    """As an engine whose head is packed for its kernels, when nobody packs it again."""
    packed = []
    find = lm_head_of

    def finds(model):
        head = find(model)
        if not packed:
            packed.append(head.weight.clone())
        return dataclasses.replace(head, weight=packed[0])

    monkeypatch.setattr("quartet_rollout.engines.transformers.model.lm_head_of", finds)


def answers_from_a_cache(room, monkeypatch):
    """As an engine that keeps what the old weights made of a prompt."""
    generate, kept = room.generate, {}

    async def remembers(request):
        key = (request.groups, request.sampling)
        if key not in kept:
            kept[key] = await generate(request)
        return map_completions(kept[key], dated(room.policy_version))

    room.generate = remembers


def names_the_last_version_only(room, monkeypatch):
    generate = room.generate

    async def names(request):
        result = await generate(request)
        return map_completions(result, dated(room.policy_version))

    room.generate = names


def dated(version):
    def change(c):
        span = VersionSpan(policy_version=version, start=0, end=len(c.token_ids))
        return dataclasses.replace(c, versions=(span,))

    return change


def is_a_push_behind(room, monkeypatch):
    load, held = TransformersEngine.load_weights, []

    async def lags(self, tensors, policy_version):
        held.append({name: tensor.clone() for name, tensor in tensors})
        return await load(self, held[max(0, len(held) - 2)].items(), policy_version)

    monkeypatch.setattr(TransformersEngine, "load_weights", lags)


def goes_on_without_weights(room, monkeypatch):
    restore = CausalLm.restore

    def restores(self):
        restore(self)
        for parameter in self.model.parameters():
            parameter.data.fill_(0.01)  # whatever was in that memory

    async def lets_go(engine):
        if not room._asleep:
            await engine.resume()

    monkeypatch.setattr(CausalLm, "restore", restores)
    room._let_go = lets_go


ENGINES = [
    (never_stops_at_its_end, "stops_at_its_own_end_token"),
    (keeps_a_head_of_its_own, "takes_embeddings_and_head"),
    (answers_from_a_cache, "forgets_caches_at_a_push"),
    (names_the_last_version_only, "names_the_version_of_each_token"),
    (is_a_push_behind, "never_mixes_versions"),
    (goes_on_without_weights, "computes_nothing_without_weights"),
]


@pytest.mark.parametrize(("break_it", "name"), ENGINES)
async def test_broken_engines_are_caught(break_it, name, tiny_model_dir, monkeypatch):
    service = service_of(tiny_model_dir, max_num_sequences=4)
    break_it(service.room, monkeypatch)
    result = await outcome(service, name, reference=str(tiny_model_dir))
    assert result.outcome == "failed", result.message
    assert "put back" not in result.message


def test_every_check_has_a_server_that_it_catches():
    elsewhere = {  # test_rollout.py
        "matches_the_reference_in_logprobs",
        "stops_at_stop_tokens",
        "repeats_seeds",
        "answers_a_repeat_with_the_first_answer",
        "matches_the_reference_greedily",
        "refuses_what_is_no_request",
        "says_that_it_serves",
    }
    here = {name for _, name, *_ in (*FAKES, *ENGINES)}
    assert {check.__name__ for check in CHECKS} == here | elsewhere
