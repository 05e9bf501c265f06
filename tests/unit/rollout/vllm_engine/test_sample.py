"""What vLLM is asked for one sample, and what its answers add up to."""

import math

import pytest
from quartet_rollout.engines.vllm.sample import MAX_DRAWS, Answer, Sample

from quartet.types import FinishReason, LogprobKind, SamplingParams, VersionSpan


def sample(*, kind=LogprobKind.PROCESSED, max_tokens=8, seed=5, **sampling):
    return Sample(
        sample_id="s",
        prompt=(1, 2, 3),
        seed=seed,
        sampling=SamplingParams(**sampling),
        kind=kind,
        stop_ids=frozenset({0, 9}),
        max_tokens=max_tokens,
    )


def answer(*tokens, finish="length", version=0, logprob=-1.0):
    spans = [VersionSpan(policy_version=version, start=0, end=len(tokens))] if tokens else []
    return Answer(
        token_ids=tokens,
        logprobs=[logprob] * len(tokens),
        finish_reason=finish,
        versions=spans,
    )


def test_an_answer_is_a_completion():
    made = sample()
    made.take(answer(4, 5, 9, finish="stop", version=3))
    completion = made.completion()
    assert completion.token_ids.tolist() == [4, 5, 9]
    assert completion.logprobs.tolist() == [-1.0] * 3
    assert completion.finish_reason is FinishReason.STOP
    assert completion.versions == (VersionSpan(policy_version=3, start=0, end=3),)


def test_end_tokens_are_stop_tokens_and_nothing_else_of_vllm():
    asked = sample(temperature=0.7, top_p=0.9, top_k=4).parameters()
    assert asked["stop_token_ids"] == [0, 9]
    assert asked["ignore_eos"] is True
    assert asked["min_tokens"] == 0
    assert (asked["temperature"], asked["top_p"], asked["top_k"]) == (0.7, 0.9, 4)
    assert asked["max_tokens"] == 8


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**64 - 1])
def test_seeds_fit_into_what_vllm_takes(seed):
    assert 0 <= sample(seed=seed).parameters()["seed"] < 2**63


def test_greedy_has_no_seed_and_lets_vllm_ban():
    made = sample(temperature=0.0, min_new_tokens=3)
    assert made.parameters()["seed"] is None
    assert made.parameters()["min_tokens"] == 3
    made.take(answer(4, 5, finish="length", logprob=-0.7))
    assert made.completion().logprobs.tolist() == [0.0, 0.0]


def test_raw_logprobs_know_nothing_of_a_ban_so_vllm_may_make_it():
    made = sample(kind=LogprobKind.RAW, min_new_tokens=3)
    assert made.parameters()["min_tokens"] == 3
    made.take(answer(4, 5, logprob=-0.7))
    assert made.completion().logprobs.tolist() == pytest.approx([-0.7, -0.7])


def test_min_tokens_never_pass_max_tokens():
    assert sample(temperature=0.0, min_new_tokens=99, max_tokens=4).parameters()["min_tokens"] == 4


def test_a_stop_token_that_comes_too_early_is_drawn_again():
    made = sample(min_new_tokens=2)
    first = made.parameters()
    made.take(answer(4, 9, finish="stop", version=1))
    assert not made.is_done
    assert made.all_tokens() == [1, 2, 3, 4]
    again = made.parameters()
    assert again["seed"] != first["seed"]
    assert again["max_tokens"] == 7
    made.take(answer(5, 0, finish="stop", version=2))
    completion = made.completion()
    assert completion.token_ids.tolist() == [4, 5, 0]
    assert completion.finish_reason is FinishReason.STOP
    assert completion.versions == (
        VersionSpan(policy_version=1, start=0, end=1),
        VersionSpan(policy_version=2, start=1, end=3),
    )


def test_a_sample_that_only_wants_to_stop_fails():
    made = sample(min_new_tokens=1)
    for _ in range(MAX_DRAWS):
        assert not made.is_done
        made.take(answer(9, finish="stop"))
    failure = made.completion().failure
    assert failure is not None
    assert (failure.error_class, failure.reason) == ("DATA", "STOP_TOO_EARLY")


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_numbers_that_are_none_fail(logprob):
    made = sample()
    made.take(answer(4, 5, logprob=logprob))
    failure = made.completion().failure
    assert failure is not None
    assert failure.reason == "LOGITS_NOT_FINITE"


def test_what_was_aborted_keeps_its_tokens_and_what_had_none_goes_on():
    begun, waiting = sample(), sample()
    begun.take(answer(4, finish="abort"))
    waiting.take(answer(finish="abort"))
    assert begun.completion().finish_reason is FinishReason.ABORTED
    assert not waiting.is_done


def test_the_first_output_says_when_it_began():
    made = sample()
    made.saw_output(2.0)
    made.saw_output(3.0)
    assert made.began == 2.0
