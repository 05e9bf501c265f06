"""DPO on fake services: what is asked of the reference model, what is trained, what is logged."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest

from quartet.config import CkptConfig, DpoConfig, DpoModelConfig, TrainConfig
from quartet.data import PreferencePair, TokenSample
from quartet.trainer import dpo
from quartet.trainer.offline import OfflineLoop
from quartet.types import DpoLoss
from tests.unit.trainer.players import Cast, FakeReference, logprobs_of


def side(name, first, length):
    return TokenSample(
        sample_id=name,
        token_ids=(np.arange(length) * 3 + first).astype(np.int32),
        loss_mask=np.arange(length) >= 2,
    )


def pair(number):
    return PreferencePair(
        pair_id=f"p{number}",
        chosen=side(f"p{number}/c", number + 5, 7),
        rejected=side(f"p{number}/r", number + 9, 5),
        margin=1.0,
    )


def config_in(folder, **sections):
    config = DpoConfig(
        train=TrainConfig(batch_size=2, max_epochs=2, seed=3),
        ckpt=CkptConfig(output_dir="/exported", path=str(folder / "ckpt")),
    )
    return replace(config, **sections)


async def play(folder, pairs, *, eval_pairs=(), reference=None, config=None):
    config = config or config_in(folder)
    cast = Cast(reference=reference or FakeReference())
    lessons = dpo.dpo_lessons(config, pairs, eval_pairs, cast.reference, fingerprint="f")
    run = cast.run(config, folder)
    try:
        await OfflineLoop(config, run, lessons, cast.policy).run()
    finally:
        await run.ledger.close()
        run.progress.close()
    return cast


def asked(reference):
    return [name for call in reference.log for chunk in call for name in chunk]


async def test_each_pair_is_evaluated_once_for_all_epochs_and_evaluations(tmp_path):
    pairs = [pair(i) for i in range(5)]
    cast = await play(tmp_path, pairs, eval_pairs=[*pairs[:2], pair(9)])
    names = asked(cast.reference)
    assert len(names) == len(set(names)) == 12
    trained = [samples for _, _, (samples,) in cast.policy.of("train")]
    assert [len(s.sequences) for s in trained] == [4, 4, 2, 4, 4, 2]


async def test_what_is_trained_has_the_references_numbers_and_no_margin(tmp_path):
    cast = await play(tmp_path, [pair(i) for i in range(4)], reference=FakeReference(shift=0.5))
    for _, step, (samples,) in cast.policy.of("train"):
        assert isinstance(step.loss, DpoLoss)
        assert samples.margins is None
        expected = np.concatenate([logprobs_of(row) for row in samples.sequences.rows()]) - 0.5
        assert samples.ref_logprobs.tolist() == pytest.approx(expected.tolist())


async def test_the_next_batch_is_evaluated_while_the_learner_trains(tmp_path):
    class Waiting(FakeReference):
        second_asked = asyncio.Event()

        async def compute_logprobs(self, chunks, *, temperature):
            if self.log:
                self.second_asked.set()
            return await super().compute_logprobs(chunks, temperature=temperature)

    reference = Waiting()
    cast = Cast(reference=reference)
    train = cast.policy.train

    async def train_after_the_next_was_asked_for(step, samples):
        await reference.second_asked.wait()
        return await train(step, samples)

    cast.policy.train = train_after_the_next_was_asked_for
    config = config_in(tmp_path)
    lessons = dpo.dpo_lessons(config, [pair(i) for i in range(4)], (), reference, fingerprint="f")
    run = cast.run(config, tmp_path)
    try:
        await OfflineLoop(config, run, lessons, cast.policy).run()
    finally:
        await run.ledger.close()
        run.progress.close()
    assert len(cast.policy.of("train")) == 4


async def test_a_lost_reference_ends_the_run(tmp_path):
    class Lost(FakeReference):
        async def compute_logprobs(self, chunks, *, temperature):
            raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        await play(tmp_path, [pair(i) for i in range(4)], reference=Lost())


async def test_evaluation_is_of_all_pairs_together(tmp_path):
    pairs = [pair(i) for i in range(3)]
    cast = await play(tmp_path, pairs, eval_pairs=pairs, reference=FakeReference(shift=0.25))
    *_, metrics = [m for kind, _, m in cast.sink.rows if kind == "eval"]
    # The policy is 0.25 a token above its reference: 5 tokens against 3.
    assert metrics["chosen_reward"] == pytest.approx(0.1 * 5 * 0.25)
    assert metrics["reject_reward"] == pytest.approx(0.1 * 3 * 0.25)
    assert metrics["eval_loss"] == pytest.approx(math.log1p(math.exp(-0.1 * 0.5)))
    assert metrics["acc_mean"] == 1.0
    assert "nll_loss" not in metrics


async def test_the_chosen_answers_likelihood_is_in_the_loss_when_asked_for(tmp_path):
    config = config_in(tmp_path, model=DpoModelConfig(nll_loss_coef=0.5))
    pairs = [pair(0)]
    cast = await play(tmp_path, pairs, eval_pairs=pairs, config=config)
    *_, metrics = [m for kind, _, m in cast.sink.rows if kind == "eval"]
    nll = -logprobs_of(pairs[0].chosen.token_ids)[2:].mean()
    assert metrics["nll_loss"] == pytest.approx(nll)
    assert metrics["eval_loss"] == pytest.approx(math.log(2) + 0.5 * nll)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (DpoLoss(beta=0.5), math.log1p(math.exp(-0.5 * 3))),
        (
            DpoLoss(beta=0.5, label_smoothing=0.1),
            0.9 * math.log1p(math.exp(-1.5)) + 0.1 * math.log1p(math.exp(1.5)),
        ),
        (DpoLoss(beta=0.5, ipo=True), (2 / 4 + 1 / 2 - 1) ** 2),
        (DpoLoss(beta=0.5, ipo=True, ipo_sum=True), (3 - 1) ** 2),
    ],
)
def test_losses_of_an_evaluation(loss, expected):
    found = dpo.pair_losses(loss, np.array([2.0, -1.0]), np.array([4, 2]))
    assert found.tolist() == pytest.approx([expected])
