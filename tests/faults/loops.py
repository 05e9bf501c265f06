"""Runs, rollouts and data sets that the tests of faults share."""

import numpy as np

from quartet.config.load import build
from quartet.data.samples import PreferencePair, Prompt, TokenSample
from quartet.trainer.experience import Experience, Sample
from quartet.trainer.offline import OfflineLoop
from quartet.trainer.ppo_loop import PpoLoop
from quartet.types import FinishReason, LogprobKind, LogprobSpec, Reward
from tests.unit.trainer.players import inputs


async def play_ppo(cast, config, folder, *, num_prompts=8):
    """Run the PPO loop on fake players; returns what became of its samples: counts, reasons."""
    folder.mkdir(parents=True, exist_ok=True)
    run = cast.run(config, folder)
    try:
        await PpoLoop(config, run, inputs(num_prompts), cast.players).run()
        return await run.ledger.counts(), await run.ledger.drop_reasons()
    finally:
        await run.ledger.close()
        run.progress.close()


async def play_offline(cast, cls, flags, lessons, trainee, folder):
    """Run the loop of SFT or reward modelling with a fake learner."""
    config = build(cls, {"ckpt.output_dir": "/exported", **flags}, {})
    run = cast.run(config, folder)
    try:
        await OfflineLoop(config, run, lessons, trainee).run()
    finally:
        await run.ledger.close()
        run.progress.close()


def trained_names(trainee):
    """Sample ids of each optimizer step that a fake learner was given."""
    return [
        [name for part in parts for name in part.sequences.sample_ids]
        for _, _, parts in trainee.of("train")
    ]


def pairs(count):
    """Preference pairs of a few tokens."""

    def side(name, length):
        tokens = np.arange(1, 1 + length, dtype=np.int32)
        return TokenSample(sample_id=name, token_ids=tokens, loss_mask=tokens > 2)

    return [
        PreferencePair(pair_id=f"p{i}", chosen=side(f"c{i}", 3 + i), rejected=side(f"r{i}", 4))
        for i in range(count)
    ]


def experience(rewards, *, truncated=(), group=0):
    """A rollout of one prompt: samples of one prompt token and two action tokens each."""
    prompt = Prompt(prompt_id="p", text="?", token_ids=(1,))
    samples = tuple(
        Sample(
            sample_id=f"s{i}",
            group=group,
            prompt=prompt,
            token_ids=np.array([1, 2, 3], np.int32),
            rollout_logprobs=np.array([0, -1, -1], np.float32),
            finish_reason=FinishReason.LENGTH if i in truncated else FinishReason.STOP,
            first_policy_version=1,
            last_policy_version=1,
            replica="rollout-0",
        )
        for i in range(len(rewards))
    )
    return Experience(
        samples=samples,
        rewards=tuple(Reward(reward=r, score=r) for r in rewards),
        old_logprobs=np.tile(np.array([0, -1, -1], np.float32), len(rewards)),
        ref_logprobs=None,
        values=None,
        logprob_spec=LogprobSpec(kind=LogprobKind.PROCESSED, temperature=1.0, top_p=1.0, top_k=-1),
    )


def advantages_of(lesson):
    """The advantage of each sample's first action token."""
    starts = np.cumsum(lesson.experience.lengths) - lesson.experience.lengths
    return lesson.advantages[starts + 1].tolist()
