"""How the tests open the engine and ask it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from quartet_rollout.engines.openai import open_engine

from quartet.config import RolloutServeConfig
from quartet.config.ds import LoadConfig
from quartet.config.sampling import RolloutEngineConfig
from quartet.types import GenerateRequest, LogprobKind, PromptGroup, SamplingParams

PROMPT = (5, 6, 7)


def config_of(folder, server, **changes):
    rollout = RolloutEngineConfig(
        model_name_or_path=str(folder),
        engine="openai",
        server_url=server.url,
        max_num_sequences=8,
    )
    return RolloutServeConfig(
        rollout=replace(rollout, **changes), ds=LoadConfig(param_dtype="fp32")
    )


def opened(folder, server, **changes):
    return open_engine(config_of(folder, server, **changes))


def request(
    samples=1, prompts=(PROMPT,), *, kind=LogprobKind.PROCESSED, isolated=False, **sampling
):
    groups = tuple(
        PromptGroup(
            group_id=f"g{i}",
            prompt_token_ids=prompt,
            num_samples=samples,
            seeds=tuple(range(10 * i, 10 * i + samples)),
            sample_ids=tuple(f"g{i}-{s}" for s in range(samples)),
        )
        for i, prompt in enumerate(prompts)
    )
    settings = {"min_new_tokens": 0, "max_new_tokens": 8, "ignore_eos": True} | sampling
    return GenerateRequest(
        request_id="r",
        groups=groups,
        sampling=SamplingParams(**settings),
        logprob_kind=kind,
        isolated=isolated,
    )


async def settled(server, running=1):
    """So many requests wait in the server, and what it has sent has arrived."""
    await server.waiting(running)
    # Same process, same loop: what was written is there, and only has to be read.
    for _ in range(100):
        await asyncio.sleep(0)


def completions(made):
    return [c for group in made.groups for c in group.completions]


def tokens(made):
    return [c.token_ids.tolist() for c in completions(made)]
