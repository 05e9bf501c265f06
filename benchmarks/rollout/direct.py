"""vLLM by itself: the other side of `python -m benchmarks.rollout`, in a process of its own.

The first argument is "LLM" (vLLM's class for batches) or "AsyncLLM" (its class for services, the
one that the rollout service holds), the others are the flags of a rollout service. One line of JSON
on stdin is one batch, `{"prompts": [[ids]], "tokens": n}`, one line on stdout its answer. Without
lines it ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from quartet.config import RolloutServeConfig
from quartet.config.load import load
from quartet.config.machine import this_machine

ANSWER = "answer "
"""What a line of ours begins with: vLLM writes to stdout too."""


def main(kind: str, flags: list[str]) -> None:
    """Load the engine, then answer lines until there are none."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    has_gpu = this_machine().num_gpus > 0
    # The other side of the pipe reads this module too, and has no use for torch.
    from quartet_rollout.engines.vllm import environment

    environment.prepare(has_gpu=has_gpu)
    arguments = _arguments(flags, has_gpu=has_gpu)
    if kind == "LLM":
        _serve_batches(arguments)
    else:
        asyncio.run(_serve_requests(arguments))


def _serve_batches(arguments: dict[str, Any]) -> None:
    from vllm import LLM

    llm = LLM(**arguments)
    _say({})
    for line in sys.stdin:
        batch = json.loads(line)
        sampling = [_sampling(i, batch["tokens"]) for i in range(len(batch["prompts"]))]
        prompts = [{"prompt_token_ids": ids} for ids in batch["prompts"]]
        began = time.monotonic()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.monotonic() - began
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        # All are given back when the last is done.
        _say({"tokens": made, "seconds": seconds, "latencies": [seconds] * len(prompts)})


async def _serve_requests(arguments: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import tokens_input
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    made = AsyncEngineArgs(**arguments)
    llm = AsyncLLM.from_engine_args(made, usage_context=UsageContext.LLM_CLASS)

    async def request(index: int, ids: list[int], tokens: int) -> tuple[int, float]:
        began = time.monotonic()
        output: Any = None
        sampling = _sampling(index, tokens)
        async for output in llm.generate(tokens_input(ids), sampling, f"{began}-{index}"):  # noqa: B007
            pass
        return len(output.outputs[0].token_ids), time.monotonic() - began

    _say({})
    while line := await asyncio.to_thread(sys.stdin.readline):
        batch = json.loads(line)
        began = time.monotonic()
        done = await asyncio.gather(
            *(request(i, ids, batch["tokens"]) for i, ids in enumerate(batch["prompts"]))
        )
        seconds = time.monotonic() - began
        latencies = [latency for _, latency in done]
        _say({"tokens": sum(n for n, _ in done), "seconds": seconds, "latencies": latencies})
    llm.shutdown()


def _arguments(flags: list[str], *, has_gpu: bool) -> dict[str, Any]:
    """Arguments of the engine as the service makes them of its flags, less what only it needs."""
    from quartet_rollout.engines.vllm import library
    from quartet_rollout.engines.vllm.arguments import DTYPES, engine_arguments
    from quartet_rollout.engines.vllm.facts import read_facts

    config = load(RolloutServeConfig, flags).config
    assert config.rollout.model_name_or_path
    facts = read_facts(
        config.rollout.model_name_or_path,
        dtype=DTYPES[config.ds.param_dtype],
        trust_remote_code=False,
    )
    known = library.known_arguments()
    arguments = engine_arguments(config, facts, has_gpu=has_gpu, known=known)
    del arguments["worker_extension_cls"]
    return arguments


def _sampling(seed: int, tokens: int) -> Any:
    """What the service asks for, with nothing that it does not need."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        seed=seed,
        max_tokens=tokens,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _say(answer: dict[str, Any]) -> None:
    print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
