"""Faults of the optimizer step: its numbers, its borders, and what a drifted policy gets."""

import numpy as np
import pytest
import torch
from quartet_learner.losses import StepCounts, TokenBatch, policy_loss
from quartet_learner.losses.kl import kl_estimate
from quartet_learner.microbatch import step_counts
from quartet_learner.parallel import RankLayout
from quartet_learner.step import take_step

from quartet.types import KlLoss, PolicyLoss, SequenceBatch, TrainSamples

VOCABULARY = 11
LOSS = PolicyLoss(entropy_coef=0.01, kl_loss=KlLoss(coef=0.1, estimator="k2"))


class Bigrams(torch.nn.Module):
    """The smallest language model: a row of logits for each token."""

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Embedding(VOCABULARY, VOCABULARY)
        torch.nn.init.normal_(self.logits.weight, generator=torch.Generator().manual_seed(0))

    def forward(self, inputs, rows, targets, temperature, with_entropy, owners):
        assert owners is None
        table = self.logits(inputs.input_ids.flatten()[rows]) / temperature
        logprobs = table.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        picked = logprobs.gather(-1, targets[:, None])[:, 0]
        return picked, entropy if with_entropy else None, None


class PlainEngine:
    """DeepSpeed's part of a step at stage 0, with plain gradient descent."""

    def __init__(self):
        self.module = Bigrams()
        self.boundaries = []

    def __call__(self, *args, **options):
        return self.module(*args, **options)

    def train(self):
        self.module.train()

    def fp16_enabled(self):
        return False

    def zero_optimization(self):
        return False

    def set_gradient_accumulation_boundary(self, last):
        self.boundaries.append(last)

    def backward(self, loss, scale_wrt_gas):
        loss.backward()

    def step(self):
        weight = self.module.logits.weight
        with torch.no_grad():
            weight -= weight.grad
        self.zero_grad()

    def zero_grad(self):
        self.module.zero_grad()


class OneRank:
    """A learner of one rank that counts how often it would have to wait for others."""

    rank = data_rank = 0
    world_size = 1
    leads = True
    layout = RankLayout(world_size=1)
    device = torch.device("cpu")

    def __init__(self):
        self.sums = 0

    def sum(self, values):
        self.sums += 1
        return dict(values)


def make_samples(count, seed=0):
    """Samples of very different lengths, which make uneven micro-batches."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, VOCABULARY, 2 + 5 * i % 13).tolist() for i in range(count)]
    sequences = SequenceBatch.of(rows, [f"s{i}" for i in range(count)])
    mask = np.ones(sequences.num_tokens, bool)
    mask[sequences.offsets[:-1]] = False
    numbers = rng.normal(size=(3, sequences.num_tokens)).astype(np.float32)
    return TrainSamples(
        sequences=sequences,
        action_mask=mask,
        advantages=numbers[0],
        old_logprobs=numbers[1] / 10 - 2.4,
        ref_logprobs=numbers[2] / 10 - 2.4,
    )


def step(engine, group, samples, share):
    counts = step_counts(samples, LOSS)
    return take_step(engine, group, samples, LOSS, share, counts, packed=True)


def in_parts(count, size):
    return [tuple(range(i, min(i + size, count))) for i in range(0, count, size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_fault_01_logged_numbers_are_those_of_the_whole_step(size):
    """Loss, entropy and KL of a step are its own, not divided by its micro-batches."""
    samples = make_samples(8)
    whole, _, _ = step(PlainEngine(), OneRank(), samples, [tuple(range(8))])
    cut, _, _ = step(PlainEngine(), OneRank(), samples, in_parts(8, size))
    assert cut == pytest.approx(whole, rel=1e-5, abs=1e-7)
    model, ids = Bigrams(), torch.from_numpy(samples.sequences.token_ids.astype(np.int64))
    trained = torch.from_numpy(np.flatnonzero(samples.action_mask))
    logprobs = model.logits(ids[trained - 1]).log_softmax(-1)
    own = logprobs.gather(-1, ids[trained, None])[:, 0]
    reference = torch.from_numpy(samples.ref_logprobs)[trained]
    assert cut["kl"] == pytest.approx(((own - reference) ** 2 / 2).mean().item(), rel=1e-5)
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean().item()
    assert cut["entropy_loss"] == pytest.approx(entropy, rel=1e-5)


def test_fault_02_no_gradient_goes_over_the_border_of_a_step():
    """Steps of 4, 4 and 1 samples, in micro-batches that do not divide them: each ends clean."""
    cut, whole, group = PlainEngine(), PlainEngine(), OneRank()
    for number, count in enumerate((4, 4, 1)):
        samples = make_samples(count, seed=number)
        cut.boundaries.clear()
        _, _, applied = step(cut, group, samples, in_parts(count, 3))
        step(whole, group, samples, [tuple(range(count))])
        assert applied
        assert cut.boundaries == [False] * (len(cut.boundaries) - 1) + [True]
        assert cut.module.logits.weight.grad is None
        torch.testing.assert_close(cut.module.logits.weight, whole.module.logits.weight)


@pytest.mark.parametrize("parts", [1, 8])
def test_fault_62_ranks_wait_for_each_other_once_a_step_for_all_metrics(parts):
    group = OneRank()
    metrics, _, _ = step(PlainEngine(), group, make_samples(8), in_parts(8, 8 // parts))
    assert len(metrics) > 5
    assert group.sums == 1


def test_fault_18_kl_and_entropy_are_weighed_as_the_policy_is():
    """A sequence of 1 token and one of 3: by sequence each counts half, in every term."""
    logprobs = torch.tensor([-1.0, -2.0, -2.0, -2.0], requires_grad=True)
    entropy = torch.tensor([1.0, 2.0, 2.0, 2.0], requires_grad=True)
    batch = TokenBatch(
        segments=torch.tensor([0, 1, 1, 1]),
        num_sequences=2,
        advantages=torch.zeros(4),
        old_logprobs=logprobs.detach(),
        ref_logprobs=torch.tensor([-2.0, -4.0, -4.0, -4.0]),
    )
    spec = PolicyLoss(
        aggregation="seq-mean-token-mean",
        kl_loss=KlLoss(coef=0.5, estimator="k2"),
        entropy_coef=0.1,
    )
    out = policy_loss(spec, batch, logprobs, entropy, StepCounts(tokens=4, sequences=2))
    assert out.loss.item() == pytest.approx(0.5 * (0.5 + 2.0) / 2 - 0.1 * (1.0 + 2.0) / 2)
    grads = torch.autograd.grad(out.loss, (logprobs, entropy))
    assert grads[0].tolist() == pytest.approx([0.25, 1 / 6, 1 / 6, 1 / 6])
    assert grads[1].tolist() == pytest.approx([-0.05, -0.1 / 6, -0.1 / 6, -0.1 / 6])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("drift", [-60.0, -12.0, 12.0, 60.0])
def test_fault_79_a_policy_that_drifted_far_is_pulled_back(estimator, drift):
    """k3 is bounded and keeps the gradient of its border; k1 and k2 need no bound."""
    logprobs = torch.tensor([drift], requires_grad=True)
    kl = kl_estimate(logprobs, torch.zeros(1), estimator)
    assert kl.item() == pytest.approx({"k1": drift, "k2": drift**2 / 2, "k3": 10.0}[estimator])
    (pull,) = torch.autograd.grad(kl.sum(), logprobs)
    if estimator == "k3":
        assert pull.item() == pytest.approx(1.0 if drift > 0 else -12.610867, rel=1e-4)
    else:
        assert pull.item() == {"k1": 1.0, "k2": drift}[estimator]
    # The flag for OpenRLHF's numbers has the fault: --algo.kl.bound_all.
    kl = kl_estimate(logprobs, torch.zeros(1), estimator, bounds="all")
    assert abs(kl.item()) == 10.0
    assert torch.autograd.grad(kl.sum(), logprobs)[0].item() == 0.0
