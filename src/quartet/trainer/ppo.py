"""`quartet train ppo`: reads prompts, starts services, and runs the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quartet.agents.pool import AgentPool, AgentSettings
from quartet.config import PpoConfig
from quartet.config.derive import longest_prompt
from quartet.data import Prompt, Source, eval_source, fingerprint_of, load_prompts
from quartet.obs.progress import Progress
from quartet.trainer.agent_log import agent_log
from quartet.trainer.best import best_key
from quartet.trainer.inputs import policy_tokenizer, say_report
from quartet.trainer.ppo_loop import PpoLoop
from quartet.trainer.ppo_parts import PpoInputs, evaluated_sources
from quartet.trainer.run import Job, Run, conduct
from quartet.trainer.services import connect_ppo, local_services

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def main(config: PpoConfig) -> int:
    """Train, and return the exit code."""
    return conduct(config, lambda progress: prepare(config, progress))


def prepare(config: PpoConfig, progress: Progress) -> Job:
    """Read everything, before anything is started.

    Raises:
        ConfigError: tokenizer or prompts are missing or of no use.
    """
    inputs = read_inputs(config, progress)
    if inputs.agent is not None:
        asyncio.run(check_agent(inputs.agent, progress))

    async def body(run: Run) -> None:
        async with AsyncExitStack() as stack:
            players = await connect_ppo(
                config, run, stack, fingerprint=inputs.tokenizer_fingerprint
            )
            if inputs.agent is not None:
                stack.enter_context(agent_log(run.folder))
                agents = await stack.enter_async_context(AgentPool(inputs.agent))
                players = replace(players, agents=agents)
            await PpoLoop(config, run, inputs, players).run()

    return Job(services=local_services(config), body=body)


def agent_settings(config: PpoConfig, tokenizer: PreTrainedTokenizerFast) -> AgentSettings | None:
    """How the agent that makes the samples is run; None without one."""
    train, model = config.train, config.actor.model_name_or_path
    if train.agent_func_path is None or model is None:
        return None
    return AgentSettings(
        path=Path(train.agent_func_path).expanduser().resolve(),
        model_name_or_path=model,
        fingerprint=fingerprint_of(tokenizer),
        vocab_size=len(tokenizer),
        use_fast=not config.data.disable_fast_tokenizer,
        trust_remote_code=config.ds.trust_remote_code,
        num_workers=train.agent_num_workers,
        episodes_per_worker=train.agent_episodes_per_worker,
        time_limit=train.agent_timeout,
    )


async def check_agent(settings: AgentSettings, progress: Progress) -> None:
    """Have a worker load the agent's file, before anything is started.

    Raises:
        ConfigError: it is no agent.
    """
    with progress.phase("load agent") as phase:
        phase.waiting_for = str(settings.path)
        async with AgentPool(replace(settings, num_workers=1)):
            phase.waiting_for = ""


def read_inputs(config: PpoConfig, progress: Progress) -> PpoInputs:
    """Tokenizer and prompts.

    Raises:
        ConfigError: one of them is missing, or --ckpt.best_metric_key fits no evaluation of them.
    """
    tokenizer = policy_tokenizer(config)

    def load(source: Source | None) -> list[Prompt]:
        """The prompts of a data set; None is the one to train on."""
        built = load_prompts(
            config.data,
            tokenizer,
            max_prompt_tokens=longest_prompt(config),
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
        agent=agent_settings(config, tokenizer),
        eval_prompts=load(evaluated) if evaluated else (),
    )
    best_key(config, evaluated_sources(config, inputs))  # refuses an unknown one now
    return inputs
