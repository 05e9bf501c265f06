"""Checks of a rollout server's tokens and numbers: what it samples, and what it says of that."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import numpy as np

from quartet.testing.conformance import Skipped, require
from quartet.testing.conformance import rollout_calls as calls
from quartet.testing.conformance import rollout_model as model
from quartet.testing.conformance.rollout_calls import RolloutSubject
from quartet.types import FinishReason, LogprobKind, PromptGroup, SamplingParams

_DRAWS, _DRAWS_AT_ONCE, _DRAWN_TOKENS = 64, 8, 32
"""Samples among which an end token is looked for, and the tokens of each."""


async def answers_what_is_asked(subject: RolloutSubject) -> None:
    """Groups and samples come in the order asked for, whole, named, within their length.

    Failing: the caller would give a sample the reward, or the version, of another.
    """
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
    """The answer repeats kind, temperature, top-p and top-k of its log-probabilities.

    Failing: a learner cannot know whether the numbers fit the loss that it computes.
    """
    sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, max_new_tokens=4)
    for kind in await calls.kinds_of(subject):
        result = await calls.generate(subject, subject.groups(), sampling, kind=kind)
        spec = result.logprob_spec
        require(spec.kind is kind, f"asked for {kind}, got {spec.kind}")
        got = (spec.temperature, spec.top_p, spec.top_k)
        require(got == (0.7, 0.9, 40), f"the distribution is said to be {got}")


async def repeats_seeds(subject: RolloutSubject) -> None:
    """A seed gives the same tokens in another call, beside other samples, in any place.

    Failing: a run cannot be repeated, and a sample made again after a failure is another sample.
    """
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
    """Different seeds, and no seeds, give different samples.

    Failing: all samples of a prompt are one, and their advantages are 0.
    """
    seeded = await calls.generate(subject, subject.groups(samples=4)[:1])
    plain = replace(subject.groups()[0], num_samples=4, seeds=(), sample_ids=())
    for what, result in (("seeds", seeded), ("no seeds", await calls.generate(subject, [plain]))):
        require(len({tuple(t) for t in calls.tokens_of(result)}) > 1, f"{what} give equal samples")


async def repeats_isolated_batches(subject: RolloutSubject) -> None:
    """An isolated call repeats its log-probabilities bit for bit while others are served.

    Failing: full determinism does not hold: rounding depends on who else asks at the time.
    """
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
    """Temperature 0 takes the reference's most likely token, at every place.

    Failing: it computes with other weights, or otherwise, than the model that is named.
    """
    reference = model.reference_of(subject)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    result = await calls.generate(subject, subject.groups(), sampling)
    for prompt, completion in zip(subject.prompts, calls.completions_of(result), strict=True):
        tokens = completion.token_ids.tolist()
        logits = reference(prompt, tokens)
        model.require_greedy(logits, tokens, tolerance=subject.logprob_tolerance)


async def matches_the_reference_in_logprobs(subject: RolloutSubject) -> None:
    """Log-probabilities are the reference's, of the kind that is named, to the tolerance.

    Failing: ratios between learner and engine are wrong, and every gradient with them.
    """
    reference = model.reference_of(subject)
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
                        [model.cut(row / temperature, top_p, top_k) for row in logits]
                    )
                wanted = model.log_softmax(logits)[np.arange(len(tokens)), tokens]
                worst = float(np.abs(completion.logprobs - wanted).max())
                require(
                    worst <= subject.logprob_tolerance,
                    f"{kind} log-probabilities at temperature {temperature}, top_p {top_p}, "
                    f"top_k {top_k} are off by {worst:.2g}",
                )


async def stops_at_stop_tokens(subject: RolloutSubject) -> None:
    """A stop token ends a completion, is its last token, and not before min_new_tokens.

    Failing: answers run on, or end early, or lose the token that the reward looks for.
    """
    if not subject.is_repeatable:
        raise Skipped("it is not said to repeat itself")
    free = SamplingParams(max_new_tokens=16, ignore_eos=True, min_new_tokens=0)
    group = subject.groups()[0]
    tokens = calls.tokens_of(await calls.generate(subject, [group], free))[0]
    require(len(tokens) == 16, f"{len(tokens)} tokens where 16 were asked for with ignore_eos")
    place = next(i for i in range(3, 16) if tokens[i] not in tokens[:i] or i == 15)
    await _require_stop(subject, group, tokens, tokens.index(tokens[place]))


async def stops_at_its_own_end_token(subject: RolloutSubject) -> None:
    """The model's own end token ends a completion like a stop token, unless ignore_eos.

    Failing: every answer has the greatest length, or none can be made longer than it likes.
    """
    model.reference_of(subject)
    if not subject.is_repeatable:
        raise Skipped("it is not said to repeat itself")
    ends = frozenset(model.end_tokens_of(subject))
    free = SamplingParams(max_new_tokens=_DRAWN_TOKENS, ignore_eos=True, min_new_tokens=0)
    for first in range(0, _DRAWS, _DRAWS_AT_ONCE):
        [asked, *_] = subject.groups(samples=_DRAWS_AT_ONCE, first_seed=first)
        drawn = await calls.generate(subject, [asked], free)
        for seed, tokens in zip(asked.seeds, calls.tokens_of(drawn), strict=True):
            count = len(tokens)
            require(count == _DRAWN_TOKENS, f"{count} of {_DRAWN_TOKENS} tokens with ignore_eos")
            place = next((i for i, token in enumerate(tokens) if token in ends), 0)
            if place:
                one = replace(asked, num_samples=1, seeds=(seed,), sample_ids=())
                await _require_stop(subject, one, tokens, place, own=ends)
                return
    raise Skipped("it drew no end token that could have ended anything")


async def _require_stop(
    subject: RolloutSubject,
    group: PromptGroup,
    tokens: list[int],
    place: int,
    *,
    own: frozenset[int] = frozenset(),
) -> None:
    """Fail unless tokens[place] ends this completion, and does not where it comes too early.

    Args:
        subject: The server.
        group: One sample whose tokens are these when nothing stops it.
        tokens: Those.
        place: First place of a stop token.
        own: The model's own end tokens, which are at work then; else only tokens[place] is.
    """
    stopping = SamplingParams(
        max_new_tokens=len(tokens),
        ignore_eos=not own,
        min_new_tokens=0,
        stop_token_ids=() if own else (tokens[place],),
    )
    [stopped] = calls.completions_of(await calls.generate(subject, [group], stopping))
    require(stopped.token_ids.tolist() == tokens[: place + 1], "the stop token did not end it")
    require(stopped.finish_reason is FinishReason.STOP, f"it ended as {stopped.finish_reason}")
    later = replace(stopping, min_new_tokens=place + 1)
    [longer] = calls.completions_of(await calls.generate(subject, [group], later))
    head = longer.token_ids.tolist()[: place + 1]
    require(len(head) == place + 1, "it ended before min_new_tokens")
    require(not (own or {tokens[place]}) & set(head), "a stop token came before min_new_tokens")


async def ends_at_its_length(subject: RolloutSubject) -> None:
    """max_new_tokens ends a completion as LENGTH.

    Failing: a cut answer looks like a finished one.
    """
    sampling = SamplingParams(max_new_tokens=5, ignore_eos=True)
    for completion in calls.completions_of(
        await calls.generate(subject, subject.groups(), sampling)
    ):
        require(len(completion.token_ids) == 5, f"{len(completion.token_ids)} tokens, not 5")
        require(
            completion.finish_reason is FinishReason.LENGTH,
            f"{completion.finish_reason}, not LENGTH",
        )


async def ends_where_the_context_ends(subject: RolloutSubject) -> None:
    """Without max_new_tokens a completion ends as LENGTH where the context is full.

    Failing: a learner gets sequences longer than it can take, or the last places stay unused.
    """
    async with calls.client_of(subject) as client:
        most = (await client.get_info()).info.max_sequence_length
    if not most:
        raise Skipped("it names no limit")
    prompt = tuple(itertools.islice(itertools.cycle(subject.prompts[-1]), most - 3))
    group = PromptGroup(group_id="full", prompt_token_ids=prompt)
    for most_new in (None, 9):
        sampling = SamplingParams(ignore_eos=True, max_new_tokens=most_new)
        [completion] = calls.completions_of(await calls.generate(subject, [group], sampling))
        count = len(completion.token_ids)
        require(count == 3, f"{count} tokens where the context has room for 3")
        require(
            completion.finish_reason is FinishReason.LENGTH,
            f"{completion.finish_reason}, not LENGTH",
        )


CHECKS = (
    answers_what_is_asked,
    names_the_distribution,
    repeats_seeds,
    draws_different_samples,
    repeats_isolated_batches,
    matches_the_reference_greedily,
    matches_the_reference_in_logprobs,
    stops_at_stop_tokens,
    stops_at_its_own_end_token,
    ends_at_its_length,
    ends_where_the_context_ends,
)
