"""What the trainer believes of an agent's result."""

import numpy as np
import pytest

from quartet.agents.episode import Script, Turn, read_result
from quartet.errors import DataError
from quartet.types import Completion, FinishReason, VersionSpan


def turn(prompt, sampled, version=1):
    return Turn(
        prompt_token_ids=tuple(prompt),
        completion=Completion(
            token_ids=np.array(sampled, np.int32),
            logprobs=np.array([-(i + 1) / 10 for i in range(len(sampled))], np.float32),
            versions=(VersionSpan(policy_version=version, start=0, end=len(sampled)),),
        ),
        replica="rollout-0",
    )


# Prompt 1 2, action 3 4, feedback 5, action 6, feedback 7.
TOKENS = [1, 2, 3, 4, 5, 6, 7]
SCRIPT = [turn([1, 2], [3, 4], 1), turn([1, 2, 3, 4, 5], [6], 2)]


def read(script=SCRIPT, max_length=10, vocab_size=10, **changes):
    result = {
        "observation_tokens": TOKENS,
        "action_ranges": [[2, 4], [5, 6]],
        "rollout_log_probs": None,
        "truncated": False,
        "reward": 1.0,
        "scores": None,
        "extra_logs": None,
    }
    return read_result(
        {**result, **changes},
        Script(turns=list(script)),
        max_length=max_length,
        vocab_size=vocab_size,
    )


def test_actions_have_the_engines_log_probabilities_and_the_rest_none():
    play = read()
    assert play.token_ids.tolist() == TOKENS[:6]  # nothing is learnt behind the last action
    assert play.action_mask.tolist() == [False, False, True, True, False, True]
    np.testing.assert_allclose(play.rollout_logprobs, [0, 0, -0.1, -0.2, 0, -0.1], rtol=1e-6)
    assert play.finish_reason is FinishReason.STOP
    assert play.reward.extra_logs == {"num_turns": 2.0}
    assert Script(turns=list(SCRIPT)).versions == (1, 2)


def test_the_engines_own_numbers_win_over_given_ones():
    given = [9.0] * 7
    np.testing.assert_array_equal(
        read(rollout_log_probs=given).rollout_logprobs, read().rollout_logprobs
    )


def test_given_numbers_count_where_the_context_was_rewritten():
    other = [turn([8, 8], [3, 4]), SCRIPT[1]]
    given = [0, 0, -2.0, -3.0, 0, 0, 0]
    play = read(script=other, rollout_log_probs=given)
    np.testing.assert_allclose(play.rollout_logprobs, [0, 0, -2, -3, 0, -0.1], rtol=1e-6)
    with pytest.raises(DataError, match="token 2 is an action that the policy did not sample"):
        read(script=other)


def test_a_cut_episode_says_so():
    assert read(truncated=True).finish_reason is FinishReason.LENGTH


def test_a_tokenizer_may_know_fewer_ids_than_the_policy_samples():
    assert read(vocab_size=3, observation_tokens=TOKENS[:6]).token_ids[-1] == 6


def test_logs_are_the_finite_numbers():
    logs = {"a": 1, "b": [2.5], "c": float("nan"), "d": "text", "e": None, "f": True, "g": []}
    assert read(extra_logs=logs).reward.extra_logs == {"a": 1, "b": 2.5, "f": 1, "num_turns": 2}


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("BAD_RESULT", {"observation_tokens": None}),
        ("BAD_RESULT", {"observation_tokens": []}),
        ("BAD_RESULT", {"observation_tokens": [1, 2, 3, 4, 5, 6, 99]}),
        ("BAD_RESULT", {"observation_tokens": [1, 2, 3, 4, 5, 6, -1]}),
        ("BAD_RESULT", {"observation_tokens": [1, 2, 3, 4, 5, 6, 7.0]}),
        ("BAD_RESULT", {"observation_tokens": [1, 2, 3, 4, 5, 6, True]}),
        ("BAD_RESULT", {"action_ranges": None}),
        ("BAD_RESULT", {"action_ranges": [2, 4]}),
        ("BAD_RESULT", {"action_ranges": [[5, 6], [2, 4]]}),
        ("BAD_RESULT", {"action_ranges": [[2, 5], [4, 6]]}),
        ("BAD_RESULT", {"action_ranges": [[4, 2]]}),
        ("BAD_RESULT", {"action_ranges": [[2, 8]]}),
        ("BAD_RESULT", {"action_ranges": [[0, 2]]}),
        ("NO_ACTION", {"action_ranges": []}),
        ("NO_ACTION", {"action_ranges": [[3, 3]]}),
        ("NO_ACTION", {"script": []}),
        ("TOO_LONG", {"max_length": 5}),
        ("NO_LOGPROBS", {"action_ranges": [[2, 5]]}),
        ("BAD_RESULT", {"rollout_log_probs": [0.0] * 6}),
        ("BAD_RESULT", {"rollout_log_probs": ["x"] * 7}),
        ("BAD_RESULT", {"rollout_log_probs": [1.0] * 7, "action_ranges": [[2, 5]]}),
        ("BAD_RESULT", {"rollout_log_probs": [float("nan")] * 7, "action_ranges": [[2, 5]]}),
        ("BAD_REWARD", {"reward": None}),
        ("BAD_REWARD", {"reward": float("nan")}),
        ("BAD_REWARD", {"reward": float("inf")}),
        ("BAD_REWARD", {"reward": 1e9}),
        ("BAD_REWARD", {"reward": [1, 2]}),
        ("BAD_REWARD", {"reward": "<object>"}),
        ("BAD_REWARD", {"scores": float("nan")}),
        ("BAD_RESULT", {"extra_logs": [1]}),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_trained_on_is_refused_with_a_reason(reason, changes):
    with pytest.raises(DataError) as caught:
        read(**changes)
    assert caught.value.info.reason == reason
