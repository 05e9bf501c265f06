"""Checks of a rollout server's calls: what it refuses, repeats, holds, and lets go of."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from quartet.clients.rollout import RolloutClient
from quartet.errors import DeadlineError, InfraError, RequestError, StateError
from quartet.testing.conformance import Skipped, require
from quartet.testing.conformance import rollout_calls as calls
from quartet.testing.conformance.rollout_calls import DEADLINE_SECONDS, RolloutSubject
from quartet.types import (
    GenerateRequest,
    GenerateResult,
    LogprobKind,
    PromptGroup,
    ReplicaState,
    SamplingParams,
)

NUM_CONCURRENT_CALLS = 24
MOST_CONCURRENT_CALLS = 512
"""A server with more slots is not filled."""
_NO_TOKEN = 2**31 - 1
"""In no vocabulary."""


async def says_what_it_is(subject: RolloutSubject) -> None:
    """GetInfo names service, engine, replica and state, and the manifest when asked.

    Failing: a trainer cannot tell at its start whether this server fits its run.
    """
    async with calls.client_of(subject) as client:
        info = await client.get_info()
        full = await client.get_info(include_manifest=True)
    require(info.info.service == "rollout", f"info.service is {info.info.service!r}")
    require(info.info.api_version == "v1", f"info.api_version is {info.info.api_version!r}")
    require(info.info.replica, "info.replica is empty")
    require(info.engine, "engine is empty")
    require(info.state is ReplicaState.SERVING, f"state is {info.state}")
    require(info.logprob_kinds, "logprob_kinds is empty")
    require(info.manifest is None, "the manifest comes without being asked for")
    require(full.manifest and full.manifest.tensors, "the manifest is empty when asked for")


async def says_that_it_serves(subject: RolloutSubject) -> None:
    """grpc.health.v1 answers SERVING for the service's full name.

    Failing: launchers, balancers and probes take it for dead.
    """
    async with calls.client_of(subject) as client:
        await client.wait_ready(calls.PATIENCE_SECONDS)


async def refuses_prompts_that_do_not_fit(subject: RolloutSubject) -> None:
    """A prompt as long as the context is refused as a wrong request that says both lengths.

    Failing: a long prompt is cut in silence, or ends as an error that looks like an outage.
    """
    async with calls.client_of(subject) as client:
        most = (await client.get_info()).info.max_sequence_length
    if not most:
        raise Skipped("it names no limit")
    group = PromptGroup(group_id="long", prompt_token_ids=(subject.prompts[0][0],) * most)
    try:
        await calls.generate(subject, [group])
    except RequestError as error:
        require(error.info.reason == "PROMPT_TOO_LONG", f"the reason is {error.info.reason!r}")
        require(str(most) in str(error), "the message does not say the prompt's length")
    else:
        require(False, f"a prompt of {most} tokens was accepted")


async def refuses_tokens_that_it_does_not_know(subject: RolloutSubject) -> None:
    """A token outside of the vocabulary is refused as a wrong request that names it.

    Failing: a wrong tokenizer reads memory that is no embedding, or ends the engine.
    """
    group = PromptGroup(group_id="unknown", prompt_token_ids=(*subject.prompts[0], _NO_TOKEN))
    try:
        await calls.generate(subject, [group])
    except RequestError as error:
        require(error.info.reason == "TOKEN_UNKNOWN", f"the reason is {error.info.reason!r}")
        require(str(_NO_TOKEN) in str(error), "the message does not name the token")
    else:
        require(False, f"token {_NO_TOKEN} was accepted")


async def refuses_what_is_no_request(subject: RolloutSubject) -> None:
    """No groups, no request_id, an empty prompt, ...: INVALID_ARGUMENT with the field.

    Failing: a caller's mistake looks like the server's, and is tried again for ever.
    """
    group = subject.groups()[0]
    good = GenerateRequest(request_id=calls.new_id(), groups=(group,))
    wrong = {
        "groups": replace(good, request_id=calls.new_id(), groups=()),
        "request_id": replace(good, request_id=""),
        "prompt_token_ids": replace(
            good, request_id=calls.new_id(), groups=(replace(group, prompt_token_ids=()),)
        ),
        "group_id": replace(good, request_id=calls.new_id(), groups=(group, group)),
        "temperature": replace(
            good, request_id=calls.new_id(), sampling=SamplingParams(temperature=-1.0)
        ),
        "seeds": replace(
            good, request_id=calls.new_id(), groups=(replace(group, seeds=(1, 2, 3)),)
        ),
    }
    for field, request in wrong.items():
        try:
            await calls.call(subject, request)
        except RequestError as error:
            require(field in error.info.field, f"a wrong {field} is blamed on {error.info.field!r}")
        else:
            require(False, f"a request with a wrong {field} was accepted")


async def refuses_older_weights(subject: RolloutSubject) -> None:
    """min_policy_version above the version that serves is FAILED_PRECONDITION.

    Failing: a server that restarted with old weights makes samples for a newer policy.
    """
    async with calls.client_of(subject) as client:
        version = (await client.get_info()).policy_version
    groups, sampling = subject.groups(), SamplingParams(max_new_tokens=1)
    await calls.generate(subject, groups, sampling, min_policy_version=version)
    try:
        await calls.generate(subject, groups, sampling, min_policy_version=version + 1)
    except StateError:
        return
    require(False, f"version {version} answered a call for {version + 1}")


async def answers_a_repeat_with_the_first_answer(subject: RolloutSubject) -> None:
    """A request_id that was answered, or is being answered, gets that one answer.

    Failing: a call repeated after a lost connection gives other samples than the first gave.
    """
    plain = tuple(replace(g, seeds=()) for g in subject.groups(samples=2))
    request = await calls.request_for(subject, plain, SamplingParams(max_new_tokens=16))
    together = await asyncio.gather(*(calls.call(subject, request) for _ in range(4)))
    later = await calls.call(subject, request)
    answers = [calls.tokens_of(result) for result in (*together, later)]
    require(all(a == answers[0] for a in answers), "repeats without seeds got different samples")


async def works_once_for_all_repeats(subject: RolloutSubject) -> None:
    """Repeats of a call that is being answered add no work, and outlive the first caller.

    Failing: each repeat of a slow call makes the server slower, or one that hangs up ends them all.
    """
    calls.require_exclusive(subject)
    request = await calls.lengthy(subject)
    first = asyncio.ensure_future(calls.call(subject, request))
    repeats = [asyncio.ensure_future(calls.call(subject, request)) for _ in range(3)]
    try:
        async with calls.client_of(subject) as client:
            most = 0
            while not repeats[0].done():
                most = max(most, (await client.get_info()).completions_in_flight)
                if most and not first.done():
                    first.cancel()
                await asyncio.wait(repeats, timeout=calls.POLL_SECONDS)
        if not most:
            raise Skipped("it completes a call before its work can be counted")
        answers = [calls.tokens_of(await repeat) for repeat in repeats]
    finally:
        for call in (first, *repeats):
            await calls.given_up(call)
    require(most == 1, f"one sample under one request_id was {most} completions in flight")
    require(all(a == answers[0] for a in answers), "the repeats got different samples")


async def refuses_a_used_request_id(subject: RolloutSubject) -> None:
    """A request_id under which something else was asked is refused as a wrong request.

    Failing: a caller whose ids are not unique trains on the answers of other prompts.
    """
    sampling = SamplingParams(max_new_tokens=2)
    request = await calls.request_for(subject, subject.groups()[:1], sampling)
    await calls.call(subject, request)
    try:
        await calls.call(subject, replace(request, groups=subject.groups()[1:2]))
    except RequestError as error:
        require("request_id" in error.info.field, f"it is blamed on {error.info.field!r}")
    else:
        require(False, "the request_id of one prompt was taken for another")


async def serves_many_at_once(subject: RolloutSubject) -> None:
    """Calls that come together are all answered, each with its own samples.

    Failing: under load answers are lost or given to the wrong caller.
    """

    async def call(seed: int) -> GenerateResult:
        sampling = SamplingParams(max_new_tokens=1 + seed % 8, ignore_eos=True)
        return await calls.generate(subject, subject.groups(first_seed=seed), sampling)

    results = await asyncio.gather(*(call(seed) for seed in range(NUM_CONCURRENT_CALLS)))
    for seed, result in enumerate(results):
        lengths = {len(tokens) for tokens in calls.tokens_of(result)}
        require(lengths == {1 + seed % 8}, f"{lengths} tokens where {1 + seed % 8} were asked for")


async def loses_no_call_beyond_its_capacity(subject: RolloutSubject) -> None:
    """More calls than it holds wait, or are refused as INFRA with retry_after; none is lost.

    Failing: a burst of calls ends in errors that nobody repeats, or in calls without an answer.
    """
    calls.require_exclusive(subject)
    async with calls.client_of(subject) as client:
        slots = (await client.get_info()).info.max_concurrent_calls
        if slots > MOST_CONCURRENT_CALLS:
            raise Skipped(f"it holds {slots} calls at once, more than the suite sends")
        number = slots + NUM_CONCURRENT_CALLS
        prefix, kind = calls.new_id(), (await calls.kinds_of(subject))[0]
        async with asyncio.timeout(calls.PATIENCE_SECONDS):
            answers = await asyncio.gather(
                *(
                    _until_taken(client, subject, prefix=prefix, kind=kind, seed=seed)
                    for seed in range(number)
                )
            )
    for seed, result in enumerate(answers):
        lengths = {len(tokens) for tokens in calls.tokens_of(result)}
        require(lengths == {1 + seed % 4}, f"{lengths} tokens where {1 + seed % 4} were asked for")


async def _until_taken(
    client: RolloutClient,
    subject: RolloutSubject,
    *,
    prefix: str,
    kind: LogprobKind,
    seed: int,
) -> GenerateResult:
    """Ask again for as long as the server says that it is full."""
    while True:
        try:
            return await client.generate(
                request_id=f"{prefix}-{seed}",
                groups=subject.groups(first_seed=seed)[:1],
                sampling=SamplingParams(max_new_tokens=1 + seed % 4, ignore_eos=True),
                logprob_kind=kind,
                timeout=calls.PATIENCE_SECONDS,
            )
        except DeadlineError:
            raise
        except InfraError as error:
            wait = error.info.retry_after
            require(wait is not None, f"refused without retry_after: {error}")
            await asyncio.sleep(wait or 0.0)


async def keeps_deadlines(subject: RolloutSubject) -> None:
    """A call whose deadline passes ends with it, its completions stop, the server serves on.

    Failing: callers hang, or the engine works on for callers that have gone.
    """
    endless = await calls.endless(subject)
    began = time.monotonic()
    try:
        await calls.call(subject, endless, timeout=DEADLINE_SECONDS)
    except DeadlineError:
        took = time.monotonic() - began
        require(took < DEADLINE_SECONDS + 2.0, f"it ended {took:.1f} s after its start")
        await calls.require_idle(subject)
    else:
        raise Skipped("it fills a context before the deadline")


async def stops_cancelled_calls(subject: RolloutSubject) -> None:
    """When the caller goes away, the engine stops the call's completions: its slots are free.

    Failing: calls that nobody waits for fill the engine until they have run to their end.
    """
    calls.require_exclusive(subject)
    requests = [await calls.endless(subject) for _ in range(4)]
    running = [asyncio.ensure_future(calls.call(subject, request)) for request in requests]
    async with calls.client_of(subject) as client:
        try:
            await calls.until_in_flight(client, running[0])
            if all(call.done() for call in running):
                raise Skipped("it fills a context before it can be cancelled")
        finally:
            for call in running:
                await calls.given_up(call)
    await calls.require_idle(subject)


CHECKS = (
    says_that_it_serves,  # first: it waits for a server that loads
    says_what_it_is,
    refuses_prompts_that_do_not_fit,
    refuses_tokens_that_it_does_not_know,
    refuses_what_is_no_request,
    refuses_older_weights,
    answers_a_repeat_with_the_first_answer,
    works_once_for_all_repeats,
    refuses_a_used_request_id,
    serves_many_at_once,
    loses_no_call_beyond_its_capacity,
    keeps_deadlines,
    stops_cancelled_calls,
)
