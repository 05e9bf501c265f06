"""Every case of `tests/vectors`: those of peers whose convention is another are ours after a step.

The step is written out in each test: it is the difference between their convention and ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quartet_learner.losses import StepCounts, TokenBatch, token_weights

from quartet.algorithms import overlong_penalty, whiten

FOLDER = Path(__file__).parents[1] / "vectors"

OPENRLHF = ("openrlhf_",)
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "advantages_group": OPENRLHF,
    "dpo": OPENRLHF,
    "gae": OPENRLHF,
    "is_correction": OPENRLHF,
    "kl_estimators": OPENRLHF,
    "loss_aggregation": (
        "openrlhf_",
        "verl_token-mean",
        "verl_seq-mean-token-mean",
        "verl_new_",
        "skyrl_token_mean",
        "skyrl_seq",
    ),
    "policy_loss": OPENRLHF,
    "returns_reinforce": OPENRLHF,
    "reward_model_loss": OPENRLHF,
    "reward_shaping": ("adaptive_kl", "overlong_openrlhf", "stop_properly_", "compute_reward"),
    "sft_and_logprobs": ("openrlhf_logprobs_", "openrlhf_sft_token"),
    "value_loss": OPENRLHF,
    "whitening": ("openrlhf",),
}
"""Beginnings of the cases that tests/unit compares with our numbers as they are."""

HERE = {
    "loss_aggregation": {
        "verl_seq-mean-token-sum",
        "verl_seq-mean-token-sum-norm",
        "shard_invariance",
        "skyrl_prompt_mean",
    },
    "reward_shaping": {"overlong_areal"},
    "sft_and_logprobs": {"openrlhf_sft_sample"},
    "whitening": {"verl", "skyrl", "areal"},
}


def case(name: str, case_id: str) -> dict[str, Any]:
    content = json.loads((FOLDER / f"{name}.json").read_text())
    (found,) = [c for c in content["cases"] if c["id"] == case_id]
    return {**found, "inputs": {**content["inputs"], **found.get("inputs", {})}}


def test_every_case_is_compared_somewhere():
    left_over = []
    for path in sorted(FOLDER.glob("*.json")):
        content = json.loads(path.read_text())
        for entry in content.get("cases", []):
            begins = entry["id"].startswith(ELSEWHERE.get(path.stem, ()))
            if path.stem in ELSEWHERE and not begins and entry["id"] not in HERE[path.stem]:
                left_over.append(f"{path.stem}: {entry['id']}")
    assert left_over == []


def whitened(case_id: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Our numbers, theirs, the mask, and the inputs under it."""
    found = case("whitening", case_id)
    x, mask = (np.array(found["inputs"][name]) for name in ("x", "mask"))
    mask = mask.astype(bool).ravel()
    mine = whiten(x.ravel(), mask)[mask]
    return mine, np.array(found["expected"]["y"]).ravel()[mask], mask, x.ravel()[mask]


@pytest.mark.parametrize("case_id", ["verl", "skyrl"])
def test_whitening_with_bessels_correction(case_id):
    """Theirs divides by n - 1: ours times sqrt((n - 1) / n), but for their eps of 1e-8."""
    mine, theirs, mask, _ = whitened(case_id)
    n = mask.sum()
    np.testing.assert_allclose(mine * np.sqrt((n - 1) / n), theirs, rtol=2e-6, atol=1e-7)


def test_whitening_with_an_eps_on_the_deviation():
    """Theirs divides by std + 1e-5: ours times std / (std + 1e-5)."""
    mine, theirs, _, x = whitened("areal")
    std = x.std()
    np.testing.assert_allclose(mine * std / (std + 1e-5), theirs, rtol=2e-6, atol=1e-7)


def aggregated(case_id: str, aggregation: str, rows: slice, whole: StepCounts | None = None):
    """Our aggregate of some rows of a case."""
    inputs = case("loss_aggregation", case_id)["inputs"]
    mask = torch.tensor(inputs["mask"][rows]).bool()
    batch = TokenBatch(segments=mask.nonzero()[:, 0], num_sequences=len(mask))
    counts = whole or StepCounts(tokens=int(mask.sum()), sequences=int(mask.any(1).sum()))
    weights = token_weights(batch, counts, aggregation, 6)  # pyright: ignore[reportArgumentType]
    return (weights * torch.tensor(inputs["loss"][rows])[mask]).sum().item()


def test_the_sum_over_tokens():
    expected = case("loss_aggregation", "verl_seq-mean-token-sum")["expected"]["loss"]
    mine = aggregated("verl_seq-mean-token-sum", "seq-mean-token-sum", slice(None))
    assert mine == pytest.approx(expected, rel=2e-6)


def test_the_normed_sum_that_forgot_the_number_of_sequences():
    """Fixed by verl later: ours times the four sequences that have tokens."""
    name = "verl_seq-mean-token-sum-norm"
    expected = case("loss_aggregation", name)["expected"]["loss"]
    mine = aggregated(name, "seq-mean-token-sum-norm", slice(None))
    assert mine * 4 == pytest.approx(expected, rel=2e-6)


def test_the_mean_over_prompts_of_the_mean_over_their_tokens():
    """Ours of each prompt's own samples, then the mean over the prompts."""
    found = case("loss_aggregation", "skyrl_prompt_mean")
    means = [
        aggregated("skyrl_prompt_mean", "token-mean", slice(*bounds))
        for bounds in found["params"]["boundaries"]
    ]
    assert np.mean(means) == pytest.approx(found["expected"]["loss"], rel=2e-6)


def test_shards():
    """Each rank's part, times the ranks that a backend averages over; local means are wrong."""
    found = case("loss_aggregation", "shard_invariance")
    params, expected = found["params"], found["expected"]
    whole = StepCounts(
        tokens=int(params["batch_num_tokens"]), sequences=params["global_batch_size"]
    )
    shards = [slice(s[0], s[-1] + 1) for s in params["shards"]]
    for key, aggregation in (
        ("rank_losses_token", "token-mean"),
        ("rank_losses_sample", "seq-mean-token-mean"),
    ):
        mine = [aggregated("shard_invariance", aggregation, s, whole) * 2 for s in shards]
        assert mine == pytest.approx(expected[key], rel=2e-6)
    naive = [aggregated("shard_invariance", "token-mean", s) for s in shards]
    assert np.mean(naive) == pytest.approx(expected["naive_local_token_mean_avg"], rel=2e-6)
    assert np.mean(naive) != pytest.approx(np.mean(expected["rank_losses_token"]), rel=1e-3)


def test_the_uncapped_overlong_penalty():
    """Theirs grows beyond the limit: ours with the limit at the longest answer."""
    found = case("reward_shaping", "overlong_areal")
    params, inputs = found["params"], found["inputs"]
    start = params["max_response_length"] - params["overlong_tokens"]
    longest = max(inputs["response_length"])
    mine = overlong_penalty(
        np.array(inputs["rewards"], float),
        np.array(inputs["response_length"]),
        max_new_tokens=longest,
        buffer_length=longest - start,
        factor=params["factor"] * (longest - start) / params["overlong_tokens"],
    )
    np.testing.assert_allclose(mine, found["expected"]["rewards"], rtol=2e-6, atol=1e-7)


def test_sft_by_sample():
    """OpenRLHF's SFT loss has it, but no flag asks for it."""
    found = case("sft_and_logprobs", "openrlhf_sft_sample")
    logprobs = case("sft_and_logprobs", "openrlhf_logprobs_T1.0")["expected"]["log_probs"]
    mask = torch.tensor(found["inputs"]["mask"]).bool()
    batch = TokenBatch(segments=mask.nonzero()[:, 0], num_sequences=2)
    weights = token_weights(batch, StepCounts(tokens=5, sequences=2), "seq-mean-token-mean")
    mine = -(weights * torch.tensor(logprobs)[mask]).sum()
    assert mine.item() == pytest.approx(found["expected"]["loss"], rel=2e-6)
