"""Ways to break the fake rollout service, each the fault that one check looks for.

A way is a function of (fake, monkeypatch); some are made by `changes_answers`.
"""

import asyncio
import dataclasses
import itertools

import numpy as np

from quartet.errors import InfraError
from quartet.testing.fakes import rollout as fake_rollout
from quartet.types import FinishReason, PauseMode, WeightManifest


def map_completions(result, change):
    groups = tuple(
        dataclasses.replace(group, completions=tuple(change(c) for c in group.completions))
        for group in result.groups
    )
    return dataclasses.replace(result, groups=groups)


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
