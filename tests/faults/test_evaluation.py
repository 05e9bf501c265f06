"""Faults of evaluation and of what follows from it: best checkpoints, filtering."""

from dataclasses import replace

from quartet.trainer.evaluate import evaluation_metrics
from quartet.trainer.experience import Group
from quartet.types import Failure, Reward
from tests.unit.trainer.players import Cast, ppo_config, prompts
from tests.unit.trainer.test_evaluate import config, evals, play


def test_fault_25_pass_at_k_is_no_mean_of_maxima():
    (prompt,) = prompts(1)
    group = Group(index=0, prompt=prompt)
    group.rewards = {str(i): Reward(reward=float(i == 0), score=float(i == 0)) for i in range(4)}
    metrics = evaluation_metrics([group], num_samples=4)
    assert metrics["eval_default_pass_at_2"] == 0.5
    assert metrics["eval_default_pass4"] == 1.0


async def test_fault_25_equal_prompts_of_two_sources_stay_apart(tmp_path):
    base = prompts(1)[0]
    same_text = [
        replace(base, prompt_id="a", datasource="easy", label="1"),
        replace(base, prompt_id="b", datasource="hard", label="2"),
    ]
    cast = Cast()
    score = cast.judge.score

    async def by_label(request):
        batch = await score(request)
        rewards = [Reward(reward=float(i.label), score=float(i.label)) for i in request.items]
        results = (
            replace(r, outcome=reward) for r, reward in zip(batch.results, rewards, strict=True)
        )
        return replace(batch, results=tuple(results))

    cast.judge.score = by_label
    await play(cast, config(), tmp_path, eval_prompts=same_text)
    row = evals(cast)[1]
    assert (row["eval_easy_pass1"], row["eval_hard_pass1"]) == (1.0, 2.0)


async def test_fault_49_a_missing_reward_is_counted(tmp_path):
    cast = Cast()
    cast.judge.failures = {
        "eval/1/p0/0": Failure(error_class="DATA", reason="BAD_ANSWER", message="None")
    }
    settings = ppo_config(eval={"steps": 1, "n_samples_per_prompt": 2})
    await play(cast, settings, tmp_path, eval_prompts=prompts(2))
    assert evals(cast)[1]["eval_failed/reward_bad_answer"] == 1.0
    assert evals(cast)[1]["eval_num_samples"] == 3.0
