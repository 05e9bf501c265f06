"""What a rollout server must do. The contract is in protos/quartet/api/rollout/v1.

    results = await run_checks(CHECKS, RolloutSubject(address="127.0.0.1:7001"))

With `reference`, a folder that transformers opens, tokens and log-probabilities are compared with a
forward pass of that model (torch is imported then); without, only with one another.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace

import numpy as np

from quartet.errors import DeadlineError, FatalError, QuartetError, RequestError, StateError
from quartet.testing.conformance import Skipped, require
from quartet.testing.conformance import rollout_calls as calls
from quartet.testing.conformance.rollout_calls import RolloutSubject
from quartet.types import (
    AbortWeightsRequest,
    CommitWeightsRequest,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    LogprobKind,
    PauseMode,
    PromptGroup,
    ReplicaState,
    SamplingParams,
)

DEADLINE_SECONDS = 0.3
NUM_CONCURRENT_CALLS = 24


async def says_what_it_is(subject: RolloutSubject) -> None:
    """GetInfo names service, engine, replica and state, and the manifest when asked."""
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
    """grpc.health.v1 answers SERVING for the service's full name."""
    async with calls.client_of(subject) as client:
        await client.wait_ready(calls.PATIENCE_SECONDS)


async def answers_what_is_asked(subject: RolloutSubject) -> None:
    """Groups and samples come in the order asked for, whole, named, within their length."""
    groups = subject.groups(samples=3)
    result = await calls.generate(subject, groups, SamplingParams(max_new_tokens=6))
    async with calls.client_of(subject) as client:
        info = await client.get_info()
    require(result.replica == info.info.replica, f"replica is {result.replica!r}")
    require(
        [g.group_id for g in result.groups] == [g.group_id for g in groups],
        "the groups are not those of the request, in order",
    )
    for group, asked in zip(result.groups, groups, strict=True):
        names = tuple(c.sample_id for c in group.completions)
        require(names == asked.sample_ids, f"samples are {names}, not {asked.sample_ids}")
        for completion in group.completions:
            calls.require_whole(completion, most=6)
            versions = {span.policy_version for span in completion.versions}
            require(versions == {info.policy_version}, f"versions are {versions}")


async def names_the_distribution(subject: RolloutSubject) -> None:
    """The answer repeats kind, temperature, top-p and top-k of its log-probabilities."""
    sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, max_new_tokens=4)
    for kind in await calls.kinds_of(subject):
        result = await calls.generate(subject, subject.groups(), sampling, kind=kind)
        spec = result.logprob_spec
        require(spec.kind is kind, f"asked for {kind}, got {spec.kind}")
        got = (spec.temperature, spec.top_p, spec.top_k)
        require(got == (0.7, 0.9, 40), f"the distribution is said to be {got}")


async def repeats_seeds(subject: RolloutSubject) -> None:
    """A seed gives the same tokens in another call, beside other samples, in any place."""
    if not subject.is_repeatable:
        raise Skipped("it is not said to repeat itself")
    sampling = SamplingParams(max_new_tokens=8)
    many = await calls.generate(subject, subject.groups(samples=3), sampling)
    for group, asked in zip(many.groups, subject.groups(samples=3), strict=True):
        last = replace(asked, num_samples=1, seeds=asked.seeds[-1:], sample_ids=())
        alone = await calls.generate(subject, [last], sampling)
        require(
            calls.tokens_of(alone)[0] == group.completions[-1].token_ids.tolist(),
            f"seed {asked.seeds[-1]} gives other tokens alone than beside others",
        )


async def draws_different_samples(subject: RolloutSubject) -> None:
    """Different seeds, and no seeds, give different samples."""
    seeded = await calls.generate(subject, subject.groups(samples=4)[:1], SamplingParams())
    plain = replace(subject.groups()[0], num_samples=4, seeds=(), sample_ids=())
    for what, result in (("seeds", seeded), ("no seeds", await calls.generate(subject, [plain]))):
        require(len({tuple(t) for t in calls.tokens_of(result)}) > 1, f"{what} give equal samples")


async def repeats_isolated_batches(subject: RolloutSubject) -> None:
    """An isolated call repeats its log-probabilities bit for bit while others are served."""
    async with calls.client_of(subject) as client:
        if "isolated" not in (await client.get_info()).info.capabilities:
            raise Skipped("it does not offer isolated batches")
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    groups = subject.groups(samples=2)
    quiet = await calls.generate(subject, groups, sampling, isolated=True)
    crowd = [calls.generate(subject, subject.groups(first_seed=50 + i), sampling) for i in range(4)]
    busy, *_ = await asyncio.gather(
        calls.generate(subject, groups, sampling, isolated=True), *crowd
    )
    for before, after in zip(calls.completions_of(quiet), calls.completions_of(busy), strict=True):
        same = np.array_equal(before.logprobs, after.logprobs)
        require(same, "log-probabilities changed in their last bits")


async def matches_the_reference_greedily(subject: RolloutSubject) -> None:
    """Temperature 0 takes the reference's most likely token, at every place."""
    reference = calls.reference_of(subject)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    result = await calls.generate(subject, subject.groups(), sampling, kind=LogprobKind.PROCESSED)
    for prompt, completion in zip(subject.prompts, calls.completions_of(result), strict=True):
        tokens = completion.token_ids.tolist()
        logits = reference(prompt, tokens)
        best = logits.max(-1)
        chosen = logits[np.arange(len(tokens)), tokens]
        short = float((best - chosen).max())
        require(short < subject.logprob_tolerance, f"a token is {short:.4f} below the best")


async def matches_the_reference_in_logprobs(subject: RolloutSubject) -> None:
    """Log-probabilities are the reference's, of the kind that is named, to the tolerance."""
    reference = calls.reference_of(subject)
    settings = [(1.0, 1.0, -1), (0.7, 1.0, -1), (1.0, 0.9, -1), (0.7, 0.9, 30)]
    for kind, (temperature, top_p, top_k) in itertools.product(
        await calls.kinds_of(subject), settings
    ):
        sampling = SamplingParams(
            temperature=temperature, top_p=top_p, top_k=top_k, max_new_tokens=8, min_new_tokens=0
        )
        result = await calls.generate(subject, subject.groups(samples=2), sampling, kind=kind)
        for group, asked in zip(result.groups, subject.groups(), strict=True):
            for completion in group.completions:
                tokens = completion.token_ids.tolist()
                logits = reference(asked.prompt_token_ids, tokens)
                if kind is LogprobKind.PROCESSED:
                    logits = np.stack(
                        [calls.cut(row / temperature, top_p, top_k) for row in logits]
                    )
                wanted = calls.log_softmax(logits)[np.arange(len(tokens)), tokens]
                worst = float(np.abs(completion.logprobs - wanted).max())
                require(
                    worst <= subject.logprob_tolerance,
                    f"{kind} log-probabilities at temperature {temperature}, top_p {top_p}, "
                    f"top_k {top_k} are off by {worst:.2g}",
                )


async def stops_at_stop_tokens(subject: RolloutSubject) -> None:
    """A stop token ends a completion, is its last token, and not before min_new_tokens."""
    if not subject.is_repeatable:
        raise Skipped("it is not said to repeat itself")
    free = SamplingParams(max_new_tokens=16, ignore_eos=True, min_new_tokens=0)
    groups = subject.groups()[:1]
    tokens = calls.tokens_of(await calls.generate(subject, groups, free))[0]
    require(len(tokens) == 16, f"{len(tokens)} tokens where 16 were asked for with ignore_eos")
    place = next(i for i in range(3, 16) if tokens[i] not in tokens[:i] or i == 15)
    place = tokens.index(tokens[place])
    stopping = replace(free, stop_token_ids=(tokens[place],))
    [stopped] = calls.completions_of(await calls.generate(subject, groups, stopping))
    require(stopped.token_ids.tolist() == tokens[: place + 1], "the stop token did not end it")
    require(stopped.finish_reason is FinishReason.STOP, f"it ended as {stopped.finish_reason}")
    later = replace(stopping, min_new_tokens=place + 1)
    [longer] = calls.completions_of(await calls.generate(subject, groups, later))
    head = longer.token_ids.tolist()[: place + 1]
    require(tokens[place] not in head, "a stop token came before min_new_tokens")


async def ends_at_its_length(subject: RolloutSubject) -> None:
    """max_new_tokens ends a completion as LENGTH."""
    sampling = SamplingParams(max_new_tokens=5, ignore_eos=True)
    for completion in calls.completions_of(
        await calls.generate(subject, subject.groups(), sampling)
    ):
        require(len(completion.token_ids) == 5, f"{len(completion.token_ids)} tokens, not 5")
        require(
            completion.finish_reason is FinishReason.LENGTH,
            f"{completion.finish_reason}, not LENGTH",
        )


async def refuses_prompts_that_do_not_fit(subject: RolloutSubject) -> None:
    """A prompt as long as the context is refused as a wrong request that says both lengths."""
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


async def refuses_what_is_no_request(subject: RolloutSubject) -> None:
    """No groups, no request_id, an empty prompt, ...: INVALID_ARGUMENT with the field."""
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
    """min_policy_version above the version that serves is FAILED_PRECONDITION."""
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
    """A request_id that was answered, or is being answered, gets that one answer."""
    plain = tuple(replace(g, seeds=()) for g in subject.groups(samples=2))
    request = GenerateRequest(
        request_id=calls.new_id(), groups=plain, sampling=SamplingParams(max_new_tokens=16)
    )
    together = await asyncio.gather(*(calls.call(subject, request) for _ in range(4)))
    later = await calls.call(subject, request)
    answers = [calls.tokens_of(result) for result in (*together, later)]
    require(all(a == answers[0] for a in answers), "repeats without seeds got different samples")


async def serves_many_at_once(subject: RolloutSubject) -> None:
    """More calls than it works on at once are all answered, each with its own samples."""

    async def call(seed: int) -> GenerateResult:
        sampling = SamplingParams(max_new_tokens=1 + seed % 8, ignore_eos=True)
        return await calls.generate(subject, subject.groups(first_seed=seed), sampling)

    results = await asyncio.gather(*(call(seed) for seed in range(NUM_CONCURRENT_CALLS)))
    for seed, result in enumerate(results):
        lengths = {len(tokens) for tokens in calls.tokens_of(result)}
        require(lengths == {1 + seed % 8}, f"{lengths} tokens where {1 + seed % 8} were asked for")


async def keeps_deadlines(subject: RolloutSubject) -> None:
    """A call whose deadline passes ends with it, its completions stop, the server serves on."""
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
    """When the caller goes away, the engine stops the call's completions."""
    if not subject.is_exclusive:
        raise Skipped("others may have completions in flight")
    call = asyncio.ensure_future(calls.call(subject, await calls.endless(subject)))
    async with calls.client_of(subject) as client:
        while not (await client.get_info()).completions_in_flight and not call.done():
            await asyncio.wait({call}, timeout=0.01)
    if call.done():
        raise Skipped("it fills a context before it can be cancelled")
    call.cancel()
    await asyncio.wait({call})
    await calls.require_idle(subject)


async def pauses_and_resumes(subject: RolloutSubject) -> None:
    """A call that comes in a pause waits, and goes on after Resume."""
    if not subject.is_exclusive:
        raise Skipped("others may be using it")
    async with calls.client_of(subject) as client:
        await client.pause(PauseMode.KEEP)
        try:
            sampling = SamplingParams(max_new_tokens=2)
            call = asyncio.ensure_future(calls.generate(subject, subject.groups(), sampling))
            await asyncio.wait({call}, timeout=DEADLINE_SECONDS)
            require(not call.done(), "it generated during a pause")
        finally:
            await client.resume()
        await asyncio.wait_for(call, calls.PATIENCE_SECONDS)


async def sleeps_and_wakes(subject: RolloutSubject) -> None:
    """After Sleep, Generate is FAILED_PRECONDITION; after Wake it answers as before."""
    async with calls.client_of(subject) as client:
        if "sleep" not in (await client.get_info()).info.capabilities:
            raise Skipped("it does not offer sleep")
        if not subject.is_exclusive:
            raise Skipped("others may be using it")
        sampling = SamplingParams(temperature=0.0, max_new_tokens=6)
        before = await calls.generate(subject, subject.groups(), sampling)
        require(await client.sleep(level=1) is ReplicaState.ASLEEP, "Sleep does not end in ASLEEP")
        try:
            await calls.generate(subject, subject.groups(), sampling)
        except StateError:
            pass
        else:
            require(False, "it generated while asleep")
        finally:
            state = await client.wake()
        require(state is ReplicaState.SERVING, f"Wake ends in {state}")
        after = await calls.generate(subject, subject.groups(), sampling)
    require(calls.tokens_of(before) == calls.tokens_of(after), "it answers otherwise after waking")


async def refuses_pushes_out_of_order(subject: RolloutSubject) -> None:
    """A commit without a prepare is refused, an abort of nothing is not; the old weights serve."""
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


CHECKS = (
    says_what_it_is,
    says_that_it_serves,
    answers_what_is_asked,
    names_the_distribution,
    repeats_seeds,
    draws_different_samples,
    repeats_isolated_batches,
    matches_the_reference_greedily,
    matches_the_reference_in_logprobs,
    stops_at_stop_tokens,
    ends_at_its_length,
    refuses_prompts_that_do_not_fit,
    refuses_what_is_no_request,
    refuses_older_weights,
    answers_a_repeat_with_the_first_answer,
    serves_many_at_once,
    keeps_deadlines,
    stops_cancelled_calls,
    pauses_and_resumes,
    sleeps_and_wakes,
    refuses_pushes_out_of_order,
)
