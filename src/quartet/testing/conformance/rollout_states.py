"""Checks of a rollout server's states: paused in three ways, and asleep at two levels.

None of them is made of a server that others use.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from quartet.clients.rollout import RolloutClient
from quartet.errors import QuartetError, StateError
from quartet.testing.conformance import Skipped, Violation, require
from quartet.testing.conformance import rollout_calls as calls
from quartet.testing.conformance.rollout_calls import DEADLINE_SECONDS, RolloutSubject
from quartet.testing.conformance.rollout_push import Writer, writing
from quartet.types import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    ReplicaState,
    SamplingParams,
)

NUM_QUEUED_CALLS = 24
_SOME_TOKENS_SECONDS = 0.05
"""Time for a completion to begin."""
_HEAD_STARTS = (0.0, 0.05, 0.2, 0.5)
"""Seconds that a completion runs before it is aborted: it must have begun, and not be done."""
_SHORT = SamplingParams(max_new_tokens=2)
_PROBE = SamplingParams(temperature=0.0, max_new_tokens=6)


@asynccontextmanager
async def _client_that_resumes(subject: RolloutSubject) -> AsyncIterator[RolloutClient]:
    """A client of a server that nobody else uses, which is not paused afterwards."""
    calls.require_exclusive(subject)
    async with calls.client_of(subject) as client:
        try:
            yield client
        finally:
            await client.resume()


async def pauses_and_resumes(subject: RolloutSubject) -> None:
    """A call that comes in a pause waits, and goes on after Resume.

    Failing: samples are made in the middle of a push, or calls fail whenever there is one.
    """
    async with _client_that_resumes(subject) as client:
        await client.pause(PauseMode.KEEP)
        call = asyncio.ensure_future(calls.generate(subject, subject.groups(), _SHORT))
        try:
            await asyncio.wait({call}, timeout=DEADLINE_SECONDS)
            require(not call.done(), "it generated during a pause")
            await client.resume()
            await asyncio.wait_for(call, calls.PATIENCE_SECONDS)
        finally:
            await calls.given_up(call)


async def keeps_what_runs_in_a_pause(subject: RolloutSubject) -> None:
    """Pause(KEEP) holds a completion in its middle; after Resume it is what it would have been.

    Failing: a push in the middle of long answers throws them away, or changes them.
    """
    async with _client_that_resumes(subject) as client:
        request = await calls.lengthy(subject)
        quiet = await calls.generate(subject, request.groups, request.sampling)
        call = asyncio.ensure_future(calls.call(subject, request))
        try:
            await calls.until_in_flight(client, call)
            await asyncio.wait({call}, timeout=_SOME_TOKENS_SECONDS)
            held = await client.pause(PauseMode.KEEP)
            await asyncio.wait({call}, timeout=DEADLINE_SECONDS)
            if call.done() and not held and _is_whole(call.result(), request):
                raise Skipped("it completes a call before it can be paused")
            require(not call.done(), "a completion ended during a pause that keeps it")
            await client.resume()
            result = await asyncio.wait_for(call, calls.PATIENCE_SECONDS)
        finally:
            await calls.given_up(call)
    [kept] = calls.completions_of(result)
    calls.require_whole(kept, most=request.sampling.max_new_tokens or 0)
    require(kept.finish_reason is FinishReason.LENGTH, f"it ended as {kept.finish_reason}")
    if subject.is_repeatable:
        same = calls.tokens_of(quiet) == calls.tokens_of(result)
        require(same, "its tokens are others than without the pause")


def _is_whole(result: GenerateResult, request: GenerateRequest) -> bool:
    lengths = {len(tokens) for tokens in calls.tokens_of(result)}
    return lengths == {request.sampling.max_new_tokens}


async def ends_what_runs_where_a_pause_aborts(subject: RolloutSubject) -> None:
    """Pause(ABORT) ends a completion with its tokens so far, or its call with an error.

    Failing: whoever asked waits for ever, or takes a cut answer for a finished one.
    """
    async with _client_that_resumes(subject) as client:
        for head_start in _HEAD_STARTS:
            request = await calls.endless(subject)
            call = asyncio.ensure_future(calls.call(subject, request))
            try:
                await calls.until_in_flight(client, call)
                await asyncio.wait({call}, timeout=head_start)
                if call.done():
                    raise Skipped("it fills a context before it can be aborted")
                await client.pause(PauseMode.ABORT)
                await asyncio.wait({call}, timeout=DEADLINE_SECONDS * 3)
                if call.done():
                    _require_cut(call)
                    return
                # What had not begun is no completion that runs: it waits, like a new call.
                await client.resume()
            finally:
                await calls.given_up(call)
    raise Violation("a completion under way did not end at Pause(ABORT)")


def _require_cut(call: asyncio.Future[GenerateResult]) -> None:
    try:
        result = call.result()
    except QuartetError:
        return
    for completion in calls.completions_of(result):
        calls.require_spans(completion)
        require(
            completion.finish_reason is FinishReason.ABORTED,
            f"a completion of {len(completion.token_ids)} tokens that a pause cut says that it "
            f"ended as {completion.finish_reason}",
        )


async def drains_before_it_pauses(subject: RolloutSubject) -> None:
    """Pause(DRAIN) returns when what runs is done, whole; calls that come then wait.

    Failing: a push after a drain meets completions, and mixes versions within them.
    """
    async with _client_that_resumes(subject) as client:
        request = await calls.lengthy(subject)
        running = asyncio.ensure_future(calls.call(subject, request))
        late = None
        try:
            await calls.until_in_flight(client, running)
            await client.pause(PauseMode.DRAIN, timeout=calls.PATIENCE_SECONDS)
            left = (await client.get_info()).completions_in_flight
            require(not left, "Pause(DRAIN) returned while a completion was running")
            late = asyncio.ensure_future(calls.generate(subject, subject.groups(), _SHORT))
            await asyncio.wait({late}, timeout=DEADLINE_SECONDS)
            require(not late.done(), "it generated after a drain")
            await client.resume()
            await asyncio.wait_for(late, calls.PATIENCE_SECONDS)
            result = await asyncio.wait_for(running, calls.PATIENCE_SECONDS)
        finally:
            await calls.given_up(running)
            if late is not None:
                await calls.given_up(late)
    require(_is_whole(result, request), "a drained completion was cut")


@asynccontextmanager
async def _client_that_wakes(subject: RolloutSubject) -> AsyncIterator[RolloutClient]:
    """A client of a server that can sleep and that nobody else uses; awake afterwards."""
    async with calls.client_of(subject) as client:
        if "sleep" not in (await client.get_info()).info.capabilities:
            raise Skipped("it does not offer sleep")
        calls.require_exclusive(subject)
        try:
            yield client
        finally:
            await client.wake()


async def _require_refusal(subject: RolloutSubject, when: str) -> None:
    try:
        await calls.generate(subject, subject.groups(), _SHORT)
    except StateError:
        return
    raise Violation(f"it generated {when}")


async def sleeps_and_wakes(subject: RolloutSubject) -> None:
    """After Sleep, Generate is FAILED_PRECONDITION; after Wake it answers as before.

    Failing: a trainer that shares devices gets samples of memory that is not there.
    """
    async with _client_that_wakes(subject) as client:
        before = await calls.generate(subject, subject.groups(), _PROBE)
        require(await client.sleep(level=1) is ReplicaState.ASLEEP, "Sleep does not end in ASLEEP")
        require((await client.get_info()).state is ReplicaState.ASLEEP, "GetInfo says otherwise")
        await _require_refusal(subject, "while asleep")
        state = await client.wake()
        require(state is ReplicaState.SERVING, f"Wake ends in {state}")
        after = await calls.generate(subject, subject.groups(), _PROBE)
    require(calls.tokens_of(before) == calls.tokens_of(after), "it answers otherwise after waking")


async def finishes_calls_before_it_sleeps(subject: RolloutSubject) -> None:
    """Sleep waits for the completions that run; their answers are whole.

    Failing: the end of a phase costs the answers that were nearly done.
    """
    async with _client_that_wakes(subject) as client:
        request = await calls.lengthy(subject)
        running = asyncio.ensure_future(calls.call(subject, request))
        try:
            await calls.until_in_flight(client, running)
            await client.sleep(level=1, timeout=calls.PATIENCE_SECONDS)
            left = (await client.get_info()).completions_in_flight
            require(not left, "it sleeps while a completion is running")
            result = await asyncio.wait_for(running, calls.PATIENCE_SECONDS)
        finally:
            await calls.given_up(running)
    require(_is_whole(result, request), "sleep cut a completion that was running")


async def wakes_by_tags(subject: RolloutSubject) -> None:
    """Wake of "weights" alone leaves it ASLEEP and refusing; "kv_cache" then lets it serve.

    Failing: weights and caches take their memory together, and with a learner awake there is none.
    """
    async with _client_that_wakes(subject) as client:
        before = await calls.generate(subject, subject.groups(), _PROBE)
        await client.sleep(level=1)
        state = await client.wake(tags=["weights"])
        require(state is ReplicaState.ASLEEP, f"with its weights alone it is {state}")
        await _require_refusal(subject, "without its caches")
        state = await client.wake(tags=["kv_cache"])
        require(state is ReplicaState.SERVING, f"with weights and caches it is {state}")
        after = await calls.generate(subject, subject.groups(), _PROBE)
    require(calls.tokens_of(before) == calls.tokens_of(after), "it answers otherwise after waking")


@asynccontextmanager
async def _sleeping_writer(subject: RolloutSubject) -> AsyncIterator[Writer]:
    async with _client_that_wakes(subject), writing(subject) as writer:
        yield writer


async def forgets_its_weights_at_level_2(subject: RolloutSubject) -> None:
    """After Sleep(2) and Wake it is STALE and refuses, until a push; then its numbers are right.

    Failing: samples are made by memory that holds no weights.
    """
    async with _sleeping_writer(subject) as writer:
        await writer.client.sleep(level=2)
        state = await writer.client.wake()
        require(state is ReplicaState.STALE, f"after Sleep(2) and Wake it is {state}, not STALE")
        await _require_refusal(subject, "without weights")
        weights = writer.model.changed(1)
        await writer.require_serves(weights, await writer.push(weights))


async def takes_a_push_before_its_caches(subject: RolloutSubject) -> None:
    """Sleep(2), Wake("weights"), a push, Wake("kv_cache"): the order for a shared device.

    Failing: a learner and this engine cannot share a device, or the push does not outlive waking.
    """
    async with _sleeping_writer(subject) as writer:
        await writer.client.sleep(level=2)
        await writer.client.wake(tags=["weights"])
        weights = writer.model.changed(2)
        version = await writer.push(weights)
        state = (await writer.client.get_info()).state
        require(state is ReplicaState.ASLEEP, f"pushed to without its caches it is {state}")
        await _require_refusal(subject, "without its caches")
        state = await writer.client.wake(tags=["kv_cache"])
        require(state is ReplicaState.SERVING, f"with weights and caches it is {state}")
        await writer.require_serves(weights, version)


async def computes_nothing_without_weights(subject: RolloutSubject) -> None:
    """Calls that wait for their turn at a Sleep(2) get tokens of whole weights, or are refused.

    Failing: what was queued is computed after waking, before the push, with undefined weights.
    """
    async with _sleeping_writer(subject) as writer:
        old, new = writer.model.weights, writer.model.changed(3)
        requests = [await calls.lengthy(subject, seed=n) for n in range(NUM_QUEUED_CALLS)]
        waiting = [asyncio.ensure_future(calls.call(subject, r)) for r in requests]
        try:
            await calls.until_in_flight(writer.client, waiting[-1])
            before = writer.version
            await writer.client.sleep(level=2, timeout=calls.PATIENCE_SECONDS)
            await writer.client.wake()
            await asyncio.wait(waiting, timeout=DEADLINE_SECONDS)
            version = await writer.push(new)
            results = await asyncio.gather(*waiting, return_exceptions=True)
        finally:
            for call in waiting:
                await calls.given_up(call)
        for request, result in zip(requests, results, strict=True):
            if isinstance(result, StateError):
                continue
            if isinstance(result, BaseException):
                raise Violation(f"a call that waited failed: {result}") from result
            writer.require_made_by(result, request.groups, {before: old, version: new})


CHECKS = (
    pauses_and_resumes,
    keeps_what_runs_in_a_pause,
    ends_what_runs_where_a_pause_aborts,
    drains_before_it_pauses,
    sleeps_and_wakes,
    finishes_calls_before_it_sleeps,
    wakes_by_tags,
    forgets_its_weights_at_level_2,
    takes_a_push_before_its_caches,
    computes_nothing_without_weights,
)
