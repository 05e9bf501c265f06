"""SFT and reward modelling on a fake learner and real data files."""

import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from quartet.config import (
    CkptConfig,
    EvalConfig,
    PpoConfig,
    PreferenceDataConfig,
    RmConfig,
    RmModelConfig,
    SftConfig,
    SftDataConfig,
    SftModelConfig,
    TrainConfig,
)
from quartet.data import PreferencePair, TokenSample
from quartet.errors import ConfigError, RequestError
from quartet.obs.progress import Progress
from quartet.trainer import rm, sft
from quartet.trainer.offline import Lessons, OfflineLoop, in_calls
from quartet.trainer.settings import run_spec, value_loss
from quartet.trainer.training import Training, TrainingSettings
from quartet.types import ForwardOutput, ForwardResult, Head, PairwiseLoss, SftLoss
from tests.unit.trainer.players import Cast, FakeTrainee, logprobs_of


def token_sample(number, length=6):
    tokens = (np.arange(length) + number + 5).astype(np.int32)
    mask = np.arange(length) >= 2
    return TokenSample(sample_id=f"s{number}", token_ids=tokens, loss_mask=mask)


def pair(number):
    return PreferencePair(
        pair_id=f"p{number}",
        chosen=replace(token_sample(number), sample_id=f"p{number}/c"),
        rejected=replace(token_sample(number, 5), sample_id=f"p{number}/r"),
        margin=number / 10,
    )


def sft_config(folder, **sections):
    config = SftConfig(
        train=TrainConfig(batch_size=4, max_epochs=2, seed=3),
        ckpt=CkptConfig(output_dir="/exported", path=str(folder / "ckpt")),
    )
    return replace(config, **sections)


def sft_lessons(count, *, eval_rows=()):
    return Lessons(
        head=Head.LM,
        rows=[token_sample(i) for i in range(count)],
        to_samples=sft.token_batch,
        loss=SftLoss(),
        tokenizer_fingerprint="f",
        eval_rows=eval_rows,
        evaluate=sft.evaluate,
    )


async def play(config, lessons, folder, trainee=None):
    cast = Cast(policy=trainee or FakeTrainee())
    run = cast.run(config, folder)
    try:
        await OfflineLoop(config, run, lessons, cast.policy).run()
    finally:
        await run.ledger.close()
        run.progress.close()
    return cast


def rows(cast, kind="train"):
    return [(step, metrics) for found, step, metrics in cast.sink.rows if found == kind]


def trained(cast):
    return [s.sequences.sample_ids for _, _, samples in cast.policy.of("train") for s in samples]


async def test_every_row_once_an_epoch_in_an_order_of_its_own(tmp_path):
    cast = await play(sft_config(tmp_path), sft_lessons(10), tmp_path)
    batches = trained(cast)
    assert [len(b) for b in batches] == [4, 4, 2, 4, 4, 2]
    first, second = ([n for b in batches[i : i + 3] for n in b] for i in (0, 3))
    assert sorted(first) == sorted(second) == sorted(f"s{i}" for i in range(10))
    assert first != second
    again = await play(sft_config(tmp_path), sft_lessons(10), tmp_path / "again")
    assert trained(again) == batches
    assert cast.policy.of("start")[0][1].schedule.total_steps == 6
    assert cast.policy.of("export") == [("export", "/exported", {})]


async def test_max_steps_cuts_run_and_schedule(tmp_path):
    config = sft_config(tmp_path, train=TrainConfig(batch_size=4, max_epochs=2, max_steps=4))
    cast = await play(config, sft_lessons(10), tmp_path)
    assert len(trained(cast)) == 4
    assert cast.policy.of("start")[0][1].schedule.total_steps == 4


async def test_logged_numbers(tmp_path):
    cast = await play(sft_config(tmp_path), sft_lessons(8), tmp_path)
    (step, metrics), *_ = rows(cast)
    assert step == 1
    assert metrics["lr"] == 1e-3
    assert metrics["grad_norm"] == 0.5
    assert metrics["num_samples_trained"] == 4
    assert metrics["num_tokens"] == 24


async def test_a_refused_step_is_in_no_running_mean(tmp_path):
    """Its loss is NaN: the mean of the epoch goes on without it."""

    class Learner(FakeTrainee):
        async def train(self, step, samples):
            result = await super().train(step, samples)
            return replace(result, metrics={"gpt_loss": result.metrics["policy_loss"]})

    trainee = Learner(not_finite={1})
    cast = await play(sft_config(tmp_path), sft_lessons(12), tmp_path, trainee)
    first_epoch = cast.metrics[:3]
    assert [m["skipped_steps"] for m in first_epoch] == [0.0, 1.0, 0.0]
    assert math.isnan(first_epoch[1]["gpt_loss"])
    assert np.isfinite([m["loss_mean"] for m in first_epoch]).all()


async def test_evaluation_weighs_by_tokens(tmp_path):
    eval_rows = [token_sample(0, 4), token_sample(1, 12)]
    cast = await play(sft_config(tmp_path), sft_lessons(8, eval_rows=eval_rows), tmp_path)
    # Once an epoch, and the end of the last epoch is the end.
    assert [step for step, _ in rows(cast, "eval")] == [2, 4]
    learnt = np.concatenate([logprobs_of(r.token_ids)[2:] for r in eval_rows])
    assert rows(cast, "eval")[0][1]["gpt_loss"] == pytest.approx(-learnt.mean())
    assert rows(cast, "eval")[0][1]["num_tokens"] == 12


async def test_evaluation_each_n_steps(tmp_path):
    config = sft_config(tmp_path, eval=EvalConfig(steps=3))
    cast = await play(config, sft_lessons(8, eval_rows=[token_sample(0)]), tmp_path)
    assert [step for step, _ in rows(cast, "eval")] == [3, 4]


async def test_going_on_gives_the_same_rows(tmp_path):
    class Metered(FakeTrainee):
        async def train(self, step, samples):
            result = await super().train(step, samples)
            return replace(result, metrics={"gpt_loss": 1 / self.steps})

    def timeless(cast):
        return [
            (s, {k: v for k, v in m.items() if "timing" not in k and "second" not in k})
            for s, m in rows(cast)
        ]

    ckpt = CkptConfig(output_dir="/exported", path=str(tmp_path / "ckpt"), save_steps=2)
    config = sft_config(tmp_path, ckpt=ckpt)
    whole = await play(config, sft_lessons(10), tmp_path, Metered())
    # As if the trainer had been killed in step 3, in the middle of the first epoch.
    for tag in ("global_step4", "global_step6"):
        for file in (tmp_path / "ckpt" / tag).iterdir():
            file.unlink()
        (tmp_path / "ckpt" / tag).rmdir()
    (tmp_path / "ckpt" / "latest").write_text("global_step2")
    onward = replace(config, ckpt=replace(ckpt, load_enable=True))
    resumed = await play(onward, sft_lessons(10), tmp_path, Metered())
    assert timeless(resumed) == timeless(whole)[2:]
    assert trained(resumed) == trained(whole)[2:]


class Judge(FakeTrainee):
    """A reward head that gives each sequence the number of its tokens."""

    async def forward(self, chunks, *, output, temperature=1.0):
        assert output is ForwardOutput.REWARDS
        return [ForwardResult(chunk_id="0", output=c.lengths.astype(np.float32)) for c in chunks]


async def test_reward_model_statistics_go_into_the_export(tmp_path):
    config = RmConfig(
        train=TrainConfig(batch_size=3, micro_batch_size=1),
        ckpt=CkptConfig(output_dir="/exported", path=str(tmp_path / "ckpt")),
    )
    pairs = [pair(i) for i in range(7)]
    lessons = Lessons(
        head=Head.REWARD,
        rows=pairs,
        to_samples=rm.batch_maker(config),
        loss=PairwiseLoss(),
        tokenizer_fingerprint="f",
        eval_rows=pairs,
        evaluate=lambda trainee, some: rm.evaluate(config, trainee, some),
        export_values=rm.statistics,
    )
    cast = await play(config, lessons, tmp_path, Judge(head="reward"))
    assert [len(b) for b in trained(cast)] == [6, 6, 2]
    ((_, metrics),) = rows(cast, "eval")
    assert metrics["acc_mean"] == 1.0
    assert metrics["eval_loss"] == pytest.approx(np.log1p(np.exp(-1.0)))
    lengths = [6, 5] * 7
    assert metrics["reward_mean"] == pytest.approx(np.mean(lengths))
    ((_, _, values),) = cast.policy.of("export")
    assert values == {
        "mean": pytest.approx(np.mean(lengths)),
        "std": pytest.approx(np.std(lengths, ddof=1)),
    }


async def test_margin_counts_only_when_asked(tmp_path):
    pairs = [pair(i) for i in range(4)]
    with_margin = RmConfig(model=RmModelConfig(margin_loss_enable=True))
    plain = await rm.evaluate(RmConfig(), Judge(), pairs)
    margin = await rm.evaluate(with_margin, Judge(), pairs)
    assert margin["eval_loss"] == pytest.approx(
        np.mean([np.log1p(np.exp(i / 10 - 1.0)) for i in range(4)])
    )
    assert margin["eval_loss"] > plain["eval_loss"]
    assert rm.batch_maker(RmConfig())(pairs).margins is None
    assert rm.batch_maker(with_margin)(pairs).margins.tolist() == pytest.approx([0, 0.1, 0.2, 0.3])


def test_unknown_loss_is_refused():
    with pytest.raises(ConfigError, match="hinge is no loss"):
        rm.pairwise_loss(RmConfig(model=RmModelConfig(loss_type="hinge")))


def test_in_calls_cuts_by_tokens_and_loses_nothing():
    assert list(in_calls([3, 3, 3, 9, 1], max_tokens=6)) == [
        slice(0, 2),
        slice(2, 3),
        slice(3, 4),
        slice(4, 5),
    ]
    assert list(in_calls([], max_tokens=6)) == []


def write(path, table):
    path.write_text("".join(json.dumps(row) + "\n" for row in table))
    return str(path)


@pytest.fixture
def progress():
    made = Progress(stream=io.StringIO())
    yield made
    made.close()


def said(progress):
    return progress._stream.getvalue()


def test_sft_reads_data_before_anything_starts(tmp_path, tiny_model_dir, progress):
    data = write(
        tmp_path / "d.jsonl", [{"input": "a", "output": "b"}, {"input": "c", "output": ""}]
    )
    config = SftConfig(
        model=SftModelConfig(model_name_or_path=str(tiny_model_dir)),
        data=SftDataConfig(dataset=data, output_key="output"),
    )
    job = sft.prepare(config, progress)
    assert [s.role for s in job.services] == ["learner"]
    assert "dropped 1 of 2 rows, empty_answer" in said(progress)


def test_sft_without_model_or_column_is_a_config_error(tmp_path, tiny_model_dir, progress):
    with pytest.raises(ConfigError, match="no model to train"):
        sft.prepare(SftConfig(), progress)
    data = write(tmp_path / "d.jsonl", [{"question": "a", "output": "b"}])
    config = SftConfig(
        model=SftModelConfig(model_name_or_path=str(tiny_model_dir)),
        data=SftDataConfig(dataset=data, output_key="output"),
    )
    with pytest.raises(ConfigError, match="input"):
        sft.prepare(config, progress)


def test_rm_explains_its_own_evaluation_set(tmp_path, tiny_model_dir, progress):
    table = [{"chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(150)]
    data = write(tmp_path / "d.jsonl", table)
    config = RmConfig(
        model=RmModelConfig(model_name_or_path=str(tiny_model_dir)),
        data=PreferenceDataConfig(dataset=data),
    )
    job = rm.prepare(config, progress)
    assert "head: reward" in job.services[0].settings
    assert "of the first 100 training pairs" in said(progress)


async def test_what_the_learner_refuses_at_the_start_is_an_error_of_the_flags():
    class DenseTrainee(FakeTrainee):
        async def start_run(self, spec):
            assert spec.with_router_loss
            raise RequestError("the model has no router", field="aux_loss_coef", remedy="0")

    spec = run_spec("r", SftConfig(), total_steps=1, seed=0, aux_loss_coef=0.1)
    trainee = DenseTrainee()
    training = Training(
        TrainingSettings(role="learner", request_prefix="r", seed=0, batch_size=1),
        trainee,
        ledger=None,
    )
    with pytest.raises(ConfigError, match="no router") as caught:
        await training.start(spec)
    assert caught.value.info.field == "aux_loss_coef"
    assert not run_spec("r", SftConfig(), total_steps=1, seed=0).with_router_loss


def test_a_critic_from_elsewhere_has_no_router_loss():
    config = PpoConfig()
    actor = replace(config.actor, model_name_or_path="/policy", aux_loss_coef=0.1)
    own = replace(config, actor=actor)
    assert value_loss(own).aux_loss_coef == 0.1
    other = replace(own, critic=replace(config.critic, model_name_or_path="/rm"))
    assert value_loss(other).aux_loss_coef == 0.0


def test_an_average_is_asked_for_by_its_weight():
    spec = run_spec("r", SftConfig(), total_steps=1, seed=0, ema_beta=0.9)
    assert spec.ema_beta == 0.9
    assert run_spec("r", SftConfig(), total_steps=1, seed=0).ema_beta is None
