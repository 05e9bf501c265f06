"""Faults of rewards and of what is made of them."""

import io

import numpy as np
import pytest

from quartet.config import RmConfig
from quartet.config.load import build
from quartet.data.samples import TokenSample
from quartet.obs.progress import Progress
from quartet.testing.tiny import train_tokenizer
from quartet.trainer import rm, sft
from quartet.trainer.offline import EVAL_TOKENS
from quartet.trainer.settings import policy_loss
from quartet.trainer.shaping import ShapingSettings, shape
from quartet.trainer.training import WeightedMeans
from quartet.types import ForwardResult, Reward, ScoreBatch, ScoreResult
from tests.faults.loops import advantages_of, experience, play_offline, play_ppo
from tests.unit.trainer.players import (
    Cast,
    FakeJudge,
    FakeSampler,
    FakeTrainee,
    logprobs_of,
    ppo_config,
)


def dr_grpo(**reward):
    """Settings by the flags of a run with the plainest group baseline."""
    config = ppo_config(algo={"advantage": {"estimator": "dr_grpo"}}, reward=reward)
    return ShapingSettings.of(config)


def test_fault_12_the_clip_range_clips_rewards():
    """A reward of 1000 does not move the baseline of its group beyond the range."""
    lesson = shape(experience([1000.0, 0.0, 0.0, 0.0]), dr_grpo(clip_range=(-10, 10)), kl_coef=0.0)
    assert advantages_of(lesson) == [7.5, -2.5, -2.5, -2.5]
    legacy = dr_grpo(clip_range=(-10, 10), clip_after_baseline=True)
    lesson = shape(experience([1000.0, 0.0, 0.0, 0.0]), legacy, kl_coef=0.0)
    assert advantages_of(lesson) == [10.0, -10.0, -10.0, -10.0]


class ScoringTrainee(FakeTrainee):
    """A reward model whose rewards say after how many steps they were given."""

    async def forward(self, chunks, *, output, temperature=1.0):
        self.log.append(("forward", self.steps))
        (chunk,) = chunks
        rewards = self.steps + np.arange(len(chunk), dtype=np.float32) % 2
        return [ForwardResult(chunk_id="0", output=rewards)]


async def test_fault_09_statistics_are_of_the_weights_they_are_saved_with(tmp_path, rm_lessons):
    """The last evaluation is of the last step's weights, and is what the export carries."""
    trainee = ScoringTrainee(head="reward")
    flags = {"train.batch_size": 2, "eval.steps": 2}
    await play_offline(Cast(), RmConfig, flags, rm_lessons(6), trainee, tmp_path)
    assert trainee.of("forward") == [("forward", 2), ("forward", 3)]
    assert [kind for kind, *_ in trainee.log][-2:] == ["forward", "export"]
    ((_, _, values),) = trainee.of("export")
    assert values["mean"] == 3.5


async def test_fault_13_few_pairs_still_give_mean_and_std(tmp_path, rm_lessons):
    """Three pairs and no evaluation set: config.json gets the numbers that normalising needs."""
    trainee = ScoringTrainee(head="reward")
    await play_offline(Cast(), RmConfig, {}, rm_lessons(3), trainee, tmp_path)
    ((_, _, values),) = trainee.of("export")
    assert values == {"mean": 1.5, "std": pytest.approx(np.std([1, 2] * 3, ddof=1))}


@pytest.fixture
def rm_lessons(tmp_path, monkeypatch):
    """What `quartet train rm` prepares from so many rows of a file."""
    folder = tmp_path / "tokenizer"
    train_tokenizer().save_pretrained(folder)

    def make(count):
        rows = "".join(f'{{"chosen": "yes {i}", "rejected": "no {i}"}}\n' for i in range(count))
        data = tmp_path / "pairs.jsonl"
        data.write_text(rows)
        found = []
        monkeypatch.setattr(rm, "offline_job", lambda config, lessons: found.append(lessons))
        flags = {"model.model_name_or_path": str(folder), "data.dataset": str(data)}
        progress = Progress(stream=io.StringIO())
        rm.prepare(build(RmConfig, flags, {}), progress)
        progress.close()
        return found[0]

    return make


class LaconicSampler(FakeSampler):
    """Gives one sample no token at all."""

    def _completion(self, group, name, seed):
        made = super()._completion(group, name, seed)
        if name != "0/p1/0":
            return made
        empty = np.zeros(0)
        return type(made)(
            sample_id=name,
            token_ids=empty.astype(np.int32),
            logprobs=empty.astype(np.float32),
            finish_reason=made.finish_reason,
        )


async def test_fault_27_a_sample_without_actions_harms_nobody(tmp_path):
    """It is dropped and counted: no NaN in the metrics, no part in its group's baseline."""
    cast = Cast(sampler=LaconicSampler())
    config = ppo_config(rollout={"batch_size": 4, "n_samples_per_prompt": 3, "max_new_tokens": 8})
    counts, reasons = await play_ppo(cast, config, tmp_path, num_prompts=4)
    assert counts == {"trained": 11, "dropped": 1}
    assert reasons == {"rollout_empty": 1}
    (metrics,) = cast.metrics
    assert metrics["dropped/rollout_empty"] == 1.0
    assert all(np.isfinite(value) for value in metrics.values())


class ChattyJudge(FakeJudge):
    """Logs other numbers for each sample."""

    async def score(self, request):
        answer = await super().score(request)
        return ScoreBatch(
            replica=answer.replica,
            results=tuple(
                ScoreResult(sample_id=r.sample_id, outcome=self._other(r)) for r in answer.results
            ),
        )

    def _other(self, result):
        index = int(result.sample_id.rpartition("/")[2])
        logs = [{"format": 1.0, "kl": 99.0}, {"tests": 3.0}][index]
        return Reward(reward=result.outcome.reward, score=result.outcome.score, extra_logs=logs)


async def test_fault_34_samples_may_log_different_numbers(tmp_path):
    """Each is averaged over the samples that have it, and none takes the place of our own."""
    cast = Cast(judge=ChattyJudge())
    await play_ppo(cast, ppo_config(), tmp_path)
    for metrics in cast.metrics:
        assert metrics["format"] == 1.0
        assert metrics["tests"] == 3.0
        assert metrics["kl"] == 0.0


@pytest.mark.parametrize("coef", [0.0, 0.5, 1.0, -0.5])
def test_fault_76_a_wrong_answer_gains_nothing_by_being_cut(coef):
    """Two wrong answers, one of them cut: it is not the better one, but by the old rule."""
    wrong = experience([-1.0, -1.0, 1.0], truncated={1})
    lesson = shape(wrong, dr_grpo(stop_properly_penalty_coef=coef), kl_coef=0.0)
    assert lesson.rewards[1] <= lesson.rewards[0] == -1.0
    assert advantages_of(lesson)[1] <= advantages_of(lesson)[0]
    legacy = dr_grpo(stop_properly_penalty_coef=coef, stop_properly_legacy=True)
    lesson = shape(wrong, legacy, kl_coef=0.0)
    assert lesson.rewards[1] == (coef if coef < 0 else -coef)


def test_fault_78_advantages_of_a_clipped_group_sum_to_zero():
    lesson = shape(experience([30.0, 0.0, 0.0, 0.0]), dr_grpo(), kl_coef=0.0)
    assert advantages_of(lesson) == [7.5, -2.5, -2.5, -2.5]
    assert sum(advantages_of(lesson)) == 0.0


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_fault_18_gspo_weighs_all_its_terms_by_sequence(mode):
    """One aggregation goes to the learner for all terms of a loss: for gspo that of sequences."""
    actor = {"policy_loss_type": "gspo", "loss_agg_mode": mode, "entropy_coef": 0.01}
    config = ppo_config(actor=actor, algo={"kl": {"use_loss": True, "init_coef": 0.1}})
    assert policy_loss(config, kl_coef=0.1).aggregation == "seq-mean-token-mean"
    plain = ppo_config(actor=actor | {"policy_loss_type": "ppo"})
    assert policy_loss(plain, kl_coef=0.1).aggregation == mode


def row(name, tokens, learnt):
    """A text to learn, of which the last `learnt` tokens are targets."""
    ids = np.array(tokens, np.int32)
    return TokenSample(
        sample_id=name, token_ids=ids, loss_mask=np.arange(len(ids)) >= len(ids) - learnt
    )


async def test_fault_28_the_evaluation_loss_is_a_mean_over_tokens():
    """Rows that need two calls: one with one learnt token, one with three quarters of all."""
    short = row("a", [7] * (EVAL_TOKENS - 1), 1)
    long = row("b", [6, 6, 6, 6, 6], 3)
    trainee = FakeTrainee()
    metrics = await sft.evaluate(trainee, [short, long])
    assert len(trainee.of("forward")) == 2
    easy, hard = -float(logprobs_of([7, 7])[1]), -float(logprobs_of([6, 6])[1])
    assert metrics["eval_loss"] == pytest.approx((easy + 3 * hard) / 4)


def test_fault_28_running_means_are_weighed_by_tokens():
    means = WeightedMeans()
    means.add({"gpt_loss": 1.0}, 10)
    means.add({"gpt_loss": 3.0}, 30)
    assert means.means() == {"gpt_loss": 2.5}
