"""Checks of weight pushes, made by pushing: what serves afterwards, and what never does.

The protocol is in docs/weights.md. None of them is made of a server that others use.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from dataclasses import replace

from quartet.errors import FatalError, QuartetError, RequestError
from quartet.testing.conformance import Skipped, Violation, require
from quartet.testing.conformance import rollout_calls as calls
from quartet.testing.conformance.rollout_calls import RolloutSubject
from quartet.testing.conformance.rollout_model import Weights
from quartet.testing.conformance.rollout_push import GivenUp, Tampered, Writer, writing
from quartet.types import (
    AbortWeightsRequest,
    CommitWeightsRequest,
    GenerateResult,
    PauseMode,
    PrepareWeightsRequest,
    PromptGroup,
    Rendezvous,
    ReplicaState,
    SamplingParams,
    TensorSpec,
    WeightManifest,
)
from quartet.weights import plan_buckets

_LONG_PROMPT = 300
"""Tokens: several blocks of a cache, whatever their size."""
_HEAD_STARTS = (0.02, 0.1, 0.3, 0.0)
"""Seconds that a completion runs before a push: some of its tokens must be there, and not all."""


async def serves_what_was_pushed(subject: RolloutSubject) -> None:
    """After each push, greedy tokens and log-probabilities are those of the pushed weights.

    Failing: the engine generates with other weights than the learner believes.
    """
    async with writing(subject) as writer:
        for seed in (1, 2):
            weights = writer.model.changed(seed)
            version = await writer.push(weights)
            await writer.require_serves(weights, version)
            require(writer.differs(await writer.ask()), "its numbers did not change")


async def takes_embeddings_and_head(subject: RolloutSubject) -> None:
    """New embeddings reach the input, and the head too where they are tied; a new head its place.

    Failing: the head computes with a copy of the old embeddings, without any error.
    """
    async with writing(subject) as writer:
        for name in dict.fromkeys(writer.model.embeddings()):
            weights = writer.model.changed(3, share=0.5, names=[name])
            version = await writer.push(weights)
            try:
                await writer.require_serves(weights, version)
            except Violation as error:
                raise Violation(f"with another {name}: {error}") from error


async def forgets_caches_at_a_push(subject: RolloutSubject) -> None:
    """A prompt asked before and after a push gets the answer of the new weights.

    Failing: keys and values of the old weights are kept, and every cached prompt is answered by
    a mixture of two policies.
    """
    async with writing(subject) as writer:
        most = (await writer.client.get_info()).info.max_sequence_length or 2 * _LONG_PROMPT
        length = min(_LONG_PROMPT, most // 2)
        prompt = tuple(itertools.islice(itertools.cycle(subject.prompts[-1]), length))
        groups = [PromptGroup(group_id="long", prompt_token_ids=prompt, seeds=(1,))]
        sampling = SamplingParams(max_new_tokens=8, min_new_tokens=0)
        for _ in range(2):  # the second finds what the first left in the cache
            before = await calls.generate(subject, groups, sampling)
            writer.require_made_by(before, groups, {writer.version: writer.model.weights})
        weights = writer.model.changed(4)
        version = await writer.push(weights)
        after = await calls.generate(subject, groups, sampling)
        writer.require_made_by(after, groups, {version: weights})


async def names_the_version_of_each_token(subject: RolloutSubject) -> None:
    """A completion that meets a push goes on, and says which weights made which of its tokens.

    Failing: a learner corrects for the wrong policy, or tokens are computed on old keys and values.
    """
    async with writing(subject) as writer:
        for seed, head_start in enumerate(_HEAD_STARTS):
            old, new = writer.model.changed(seed), writer.model.changed(seed + 10)
            before = await writer.push(old)
            request = await calls.lengthy(subject, samples=2)
            call = asyncio.ensure_future(calls.call(subject, request))
            try:
                await calls.until_in_flight(writer.client, call)
                await asyncio.wait({call}, timeout=head_start)
                await writer.client.pause(PauseMode.KEEP)
                version = await writer.push(new)
                await writer.client.resume()
                result = await asyncio.wait_for(call, calls.PATIENCE_SECONDS)
            finally:
                await writer.client.resume()
                await calls.given_up(call)
            writer.require_made_by(result, request.groups, {before: old, version: new})
            completions = calls.completions_of(result)
            if any(len(c.versions) > 1 for c in completions):
                whole = {len(c.token_ids) for c in completions}
                require(whole == {request.sampling.max_new_tokens}, f"it has {whole} tokens")
                return
    raise Skipped("no push met a completion in its middle")


async def never_mixes_versions(subject: RolloutSubject) -> None:
    """While pushes come, every answer is of versions that were committed, and they only rise.

    Failing: samples belong to no policy at all, or a later call gets older weights than an earlier.
    """
    async with writing(subject) as writer:
        weights_of: dict[int, Weights] = {writer.version: writer.model.weights}
        stop = asyncio.Event()
        callers = [asyncio.ensure_future(_ask_on(writer, stop, first)) for first in (100, 200)]
        try:
            for seed in (5, 6, 7):
                weights = writer.model.changed(seed)
                weights_of[await writer.push(weights)] = weights
            stop.set()
            answers = await asyncio.gather(*callers)
        finally:
            stop.set()
            await asyncio.gather(*callers, return_exceptions=True)
        for oldest, groups, result in itertools.chain.from_iterable(answers):
            writer.require_made_by(result, groups, weights_of)
            for completion in calls.completions_of(result):
                first = completion.versions[0].policy_version
                require(first >= oldest, f"version {first} answered a call made after {oldest}")


_Asked = tuple[int, tuple[PromptGroup, ...], GenerateResult]


async def _ask_on(writer: Writer, stop: asyncio.Event, seed: int) -> list[_Asked]:
    """Ask until told to stop; with each answer the version that had been committed before."""
    answers: list[_Asked] = []
    while not stop.is_set():
        groups, oldest = writer.subject.groups(first_seed=seed), writer.version
        sampling = SamplingParams(max_new_tokens=16, min_new_tokens=0)
        answers.append((oldest, groups, await calls.generate(writer.subject, groups, sampling)))
        seed += 1
    return answers


async def refuses_pushes_out_of_order(subject: RolloutSubject) -> None:
    """A commit without a prepare is refused, an abort of nothing is not; the old weights serve.

    Failing: a message that comes late takes the weights from under the engine.
    """
    async with calls.client_of(subject) as client:
        version = (await client.get_info()).policy_version
        request = CommitWeightsRequest(epoch=1, policy_version=version + 1, digest="00" * 16)
        try:
            await client.commit_weights(request)
        except FatalError as error:
            require(False, f"a commit without a prepare broke it: {error}")
        except QuartetError:
            pass
        else:
            require(False, "weights that never came were committed")
        answer = await client.abort_weights(AbortWeightsRequest(epoch=1))
        require(answer.policy_version == version, f"version is {answer.policy_version}")
        require(answer.state is ReplicaState.SERVING, f"state is {answer.state}")


async def forgets_a_push_that_was_only_prepared(subject: RolloutSubject) -> None:
    """A push aborted after its prepare changes nothing, and the next is taken.

    Failing: a sender that fails early leaves a server that hangs, or takes no push any more.
    """
    async with writing(subject) as writer:
        target = Tampered(client=writer.client, leaves_before_receive=True)
        result = await writer.attempt(writer.model.changed(8), target)
        require(not result.committed, "a push was committed that nobody received")
        _require_aborted(target, writer.version)
        await writer.require_unchanged("an abort after the prepare")
        await _require_takes_the_next(writer)


async def forgets_half_a_push(subject: RolloutSubject) -> None:
    """A push aborted after some of its buckets changes nothing, and the next is taken.

    Failing: new tensors are put in place as they come, and the engine serves a mixture.
    """
    async with writing(subject) as writer:
        half = len(plan_buckets(writer.model.manifest)) // 2
        target = Tampered(client=writer.client)
        try:
            await writer.attempt(writer.model.changed(9), target, buckets=half)
        except GivenUp:
            pass
        else:
            require(False, "a push was committed of which half was sent")
        _require_aborted(target, writer.version)
        await writer.require_unchanged("an abort in the middle of the transfer")
        await _require_takes_the_next(writer)


async def refuses_bytes_that_differ(subject: RolloutSubject) -> None:
    """A commit with another digest than that of the bytes is refused, and changes nothing.

    Failing: weights that were damaged on their way are served.
    """
    async with writing(subject) as writer:
        target = Tampered(client=writer.client, spoils_digest=True)
        result = await writer.attempt(writer.model.changed(10), target)
        require(not result.committed, "weights were committed under a digest that is not theirs")
        require(result.failed_phase == "commit", f"it failed in {result.failed_phase} already")
        await writer.require_unchanged("a commit with a wrong digest")
        await _require_takes_the_next(writer)


def _require_aborted(target: Tampered, version: int) -> None:
    require(target.aborts, "it did not answer AbortWeights")
    for answer in target.aborts:
        said = f"AbortWeights says {answer.state} at version {answer.policy_version}"
        require(answer.state is ReplicaState.SERVING and answer.policy_version == version, said)


async def _require_takes_the_next(writer: Writer) -> None:
    weights = writer.model.changed(11)
    await writer.require_serves(weights, await writer.push(weights))


async def refuses_old_epochs(subject: RolloutSubject) -> None:
    """An epoch that is not newer than the last is refused in every call, and changes nothing.

    Failing: a sender that was taken for dead comes back and overwrites newer weights.
    """
    async with writing(subject) as writer:
        await writer.push(writer.model.changed(12))
        await writer.push(writer.model.weights)
        for epoch in (1, time.time_ns() - 3600 * 10**9):
            await _require_refused(writer, f"epoch {epoch}", writer.model.manifest, epoch=epoch)
            request = CommitWeightsRequest(
                epoch=epoch, policy_version=writer.version + 1, digest="00" * 16
            )
            try:
                await writer.client.commit_weights(request)
            except QuartetError:
                pass
            else:
                require(False, f"epoch {epoch} was committed after a newer one")
        await writer.require_unchanged("calls of an old epoch")


async def refuses_other_models(subject: RolloutSubject) -> None:
    """A push with other names, shapes, data types or ties is refused at its prepare.

    Failing: a wrong model is found out in the middle of the swap, when the old weights are gone.
    """
    async with writing(subject) as writer:
        manifest = writer.model.manifest
        for what, wrong in _other_manifests(manifest).items():
            await _require_refused(writer, what, wrong, epoch=time.time_ns())
        await writer.require_unchanged("pushes of other models")


def _other_manifests(manifest: WeightManifest) -> Mapping[str, WeightManifest]:
    *rest, last = manifest.tensors
    other = "float16" if last.dtype != "float16" else "float32"

    def with_last(*specs: TensorSpec) -> WeightManifest:
        return replace(manifest, tensors=(*rest, *specs))

    made = {
        "a tensor under another name": with_last(replace(last, name="conformance.no_such")),
        "a tensor too many": with_last(last, replace(last, name="conformance.one_more")),
        "another shape": with_last(replace(last, shape=(*last.shape, 2))),
        "another data type": with_last(replace(last, dtype=other)),
    }
    if rest:
        made["a tensor too few"] = with_last()
    for alias, owner in manifest.aliases.items():
        [spec] = [s for s in manifest.tensors if s.name == owner]
        apart = with_last(last, replace(spec, name=alias))
        made["tied tensors apart"] = replace(apart, aliases={})
    return made


async def _require_refused(
    writer: Writer, what: str, manifest: WeightManifest, *, epoch: int
) -> None:
    """Fail unless PrepareWeights refuses this; nobody waits for it in any group."""
    request = PrepareWeightsRequest(
        request_id=calls.new_id(),
        epoch=epoch,
        policy_version=writer.version + 1,
        manifest=manifest,
        backend=writer.backend,
        # A server that does not refuse fails here, and not by waiting for a sender.
        rendezvous=Rendezvous(store_address="127.0.0.1:9", folder="/nowhere", group_name="none"),
        rank=1,
        world_size=2,
        group_timeout=1.0,
    )
    try:
        await writer.client.prepare_weights(request)
    except RequestError:
        return
    except QuartetError as error:
        raise Violation(f"{what} was not refused for what it is, but ended as: {error}") from error
    await writer.client.abort_weights(AbortWeightsRequest(epoch=epoch))
    raise Violation(f"{what} was prepared for")


CHECKS = (
    refuses_pushes_out_of_order,
    serves_what_was_pushed,
    takes_embeddings_and_head,
    forgets_caches_at_a_push,
    names_the_version_of_each_token,
    never_mixes_versions,
    forgets_a_push_that_was_only_prepared,
    forgets_half_a_push,
    refuses_bytes_that_differ,
    refuses_old_epochs,
    refuses_other_models,
)
