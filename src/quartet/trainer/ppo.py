"""`quartet train ppo`: reads prompts, starts services, and runs the loop."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from quartet.config import PpoConfig
from quartet.data import Prompt, Source, eval_source, fingerprint_of, load_prompts
from quartet.obs.progress import Progress
from quartet.trainer.best import best_key
from quartet.trainer.inputs import policy_tokenizer, say_report
from quartet.trainer.ppo_loop import PpoLoop
from quartet.trainer.ppo_parts import PpoInputs, evaluated_sources
from quartet.trainer.run import Job, Run, conduct
from quartet.trainer.services import connect_ppo, local_services


def main(config: PpoConfig) -> int:
    """Train, and return the exit code."""
    return conduct(config, lambda progress: prepare(config, progress))


def prepare(config: PpoConfig, progress: Progress) -> Job:
    """Read everything, before anything is started.

    Raises:
        ConfigError: tokenizer or prompts are missing or of no use.
    """
    inputs = read_inputs(config, progress)

    async def body(run: Run) -> None:
        async with AsyncExitStack() as stack:
            players = await connect_ppo(
                config, run, stack, fingerprint=inputs.tokenizer_fingerprint
            )
            await PpoLoop(config, run, inputs, players).run()

    return Job(services=local_services(config), body=body)


def read_inputs(config: PpoConfig, progress: Progress) -> PpoInputs:
    """Tokenizer and prompts.

    Raises:
        ConfigError: one of them is missing, or --ckpt.best_metric_key fits no evaluation of them.
    """
    tokenizer = policy_tokenizer(config)
    max_new_tokens = config.rollout.max_new_tokens or 1

    def load(source: Source | None) -> list[Prompt]:
        """The prompts of a data set; None is the one to train on."""
        built = load_prompts(
            config.data,
            tokenizer,
            max_prompt_tokens=config.data.max_len - max_new_tokens,
            seed=config.train.seed,
            source=source,
        )
        return say_report(built, progress)

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))

    evaluated = None
    if config.eval.steps > 0:
        evaluated = eval_source(config.eval, max_samples=config.data.max_samples)
    inputs = PpoInputs(
        prompts=load(None),
        decode=decode,
        tokenizer_fingerprint=fingerprint_of(tokenizer),
        eval_prompts=load(evaluated) if evaluated else (),
    )
    best_key(config, evaluated_sources(config, inputs))  # refuses an unknown one now
    return inputs
