"""vLLM as this service calls it: the only file of this process that imports vLLM.

Checked against vLLM 0.32; the GPU package 0.33 has the same calls.
"""
# pyright: reportMissingImports=false
# vLLM lives in an environment of its own, beside another transformers than the rest pins.

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from quartet.errors import ConfigError, InfraError
from quartet.types import VersionSpan
from quartet_rollout.engines.vllm.crew import InWorkers
from quartet_rollout.engines.vllm.handover import InSharedMemory, written
from quartet_rollout.engines.vllm.sample import Answer

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_HEALTH_SECONDS = 1.0
"""How often vLLM is asked whether it lives: it tells nobody who has no request with it."""

_STOP_SECONDS = 5.0
"""How long vLLM gets to end by itself: the service's own time to stop is bounded, too."""

_SUBMIT_SECONDS = 0.001
"""How often it is asked whether it has a request: they pass through several of its tasks."""


def known_arguments() -> frozenset[str]:
    """Names of all engine arguments. Slow: imports vLLM."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return frozenset(field.name for field in dataclasses.fields(AsyncEngineArgs))


def cpu_head_sizes() -> list[int]:
    """Sizes of attention heads that vLLM's kernels for CPUs take."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return CPUAttentionBackend.get_supported_head_sizes()


class Vllm:
    """One running AsyncLLM. Its failures are Quartet's errors."""

    def __init__(self, llm: Any, *, shares_all: bool = False) -> None:
        self._llm = llm
        self._shares_all = shares_all

    @classmethod
    def start(cls, arguments: dict[str, Any]) -> Vllm:
        """Load a model in processes of its own. Call it on the loop that the engine serves.

        Raises:
            ConfigError: vLLM refuses its arguments.
        """
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        # vLLM picks its defaults (tokens of a step) by who calls: this one stands for throughput.
        caller = UsageContext.LLM_CLASS
        try:
            made = AsyncEngineArgs(**arguments)
            llm = AsyncLLM.from_engine_args(made, usage_context=caller)
        except (ValueError, TypeError) as error:
            lines = str(error).strip().splitlines()
            raise ConfigError(
                f"vLLM refuses its settings: {' '.join(lines)}",
                reason="ENGINE_REFUSED_SETTINGS",
                field="rollout.engine",
                value="vllm",
                remedy="correct the vllm.* flags, or use rollout.engine transformers",
            ) from error
        return cls(llm, shares_all=bool(arguments.get("enable_prefix_caching")))

    @property
    def is_dead(self) -> bool:
        """True when its processes are gone."""
        return self._llm.errored

    async def died(self) -> InfraError:
        """Wait until its processes are gone."""
        while not self.is_dead:  # noqa: ASYNC110 - vLLM has no event for it
            await asyncio.sleep(_HEALTH_SECONDS)
        return _dead()

    async def has_requests(self, count: int, *, unless: Callable[[], bool]) -> None:
        """Wait until it has so many requests, or something else is true."""
        # vLLM has no event for it.
        while (  # noqa: ASYNC110
            self._llm.get_num_unfinished_requests() < count and not unless()
        ):
            await asyncio.sleep(_SUBMIT_SECONDS)

    async def ask(
        self,
        prompt: list[int],
        parameters: dict[str, Any],
        *,
        shares_with: str,
        on_output: Callable[[float], None],
    ) -> Answer:
        """One request, to its end; a cancelled caller stops it.

        Args:
            prompt: Token ids.
            parameters: Keyword arguments of vLLM's SamplingParams.
            shares_with: Requests with the same name compute what is equal in their prompts once.
            on_output: Gets the monotonic time of each output.

        Raises:
            InfraError: It failed, or vLLM is gone.
        """
        return await _told(self._ask(prompt, parameters, shares_with, on_output))

    async def hold(self, mode: Literal["keep", "abort"]) -> None:
        """Stop between two steps: requests stay as they are, or end with their tokens so far."""
        await _told(self._llm.pause_generation(mode=mode, clear_cache=False))

    async def go_on(self) -> None:
        """Step again."""
        await _told(self._llm.resume_generation())

    async def load(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Put tensors in place of all weights, while held, and drop every cache of the old ones."""
        if isinstance(tensors, InWorkers):
            call = self._llm.collective_rpc("quartet_load_received", args=(tensors.epoch,))
            await _told(call)
        elif isinstance(tensors, InSharedMemory):
            await self._load_from(tensors)
        else:
            with written(tensors) as there:
                await self._load_from(there)
        # Also of what runs: it goes on with keys and values of the new weights.
        if not await _told(self._llm.reset_prefix_cache(reset_running_requests=True)):
            raise InfraError("vLLM did not drop its caches", reason="CACHE_NOT_DROPPED")
        await self.name_version(policy_version)

    async def connect(self, path: str) -> None:
        """Have all workers connect to a socket, to be members of pushes."""
        await _told(self._llm.collective_rpc("quartet_connect", args=(path,)))

    async def _load_from(self, there: InSharedMemory) -> None:
        call = self._llm.collective_rpc("quartet_load", args=(there.path, there.entries))
        await _told(call)

    async def name_version(self, policy_version: int) -> None:
        """Say which version makes the tokens from here on."""
        await _told(self._llm.update_weight_version(str(policy_version)))

    async def sleep(self, level: int) -> None:
        """Free the device's memory."""
        await _told(self._llm.sleep(level))

    async def wake(self, tags: list[str]) -> None:
        """Take some of it back: "weights", "kv_cache". It steps again when it has both."""
        await _told(self._llm.wake_up(tags))

    def stop(self) -> None:
        """End its processes, the hard way those that do not end in time. Blocks."""
        import psutil  # a dependency of vLLM

        processes = psutil.Process().children(recursive=True)
        workers = [p for p in processes if _is_engine(p)]
        ending = threading.Thread(target=self._llm.shutdown, daemon=True)
        ending.start()
        ending.join(_STOP_SECONDS)
        for process in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    async def _ask(
        self,
        prompt: list[int],
        parameters: dict[str, Any],
        shares_with: str,
        on_output: Callable[[float], None],
    ) -> Answer:
        from vllm.inputs import tokens_input
        from vllm.sampling_params import SamplingParams

        # Not a TokensPrompt: vLLM has a thread make one of these of it first.
        ready = tokens_input(prompt, cache_salt=None if self._shares_all else shares_with)
        outputs = self._llm.generate(ready, SamplingParams(**parameters), uuid.uuid4().hex)
        last: Any = None
        async for last in outputs:  # noqa: B007 - the last one has everything
            on_output(time.monotonic())
        return _answer(last.outputs[0], last.num_cached_tokens or 0)


def _is_engine(process: Any) -> bool:
    """A process that vLLM named; Python's own helper must live to clean up behind the others."""
    import psutil

    try:
        return process.name().startswith("VLLM") or "spawn_main" in " ".join(process.cmdline())
    except psutil.Error:  # gone in the meantime
        return False


async def _told(call: Awaitable[T]) -> T:
    """Await vLLM; its errors become Quartet's."""
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        return await call
    except EngineDeadError as error:
        raise _dead() from error
    except EngineGenerateError as error:
        raise InfraError(f"vLLM failed: {error}", reason="ENGINE_FAILED") from error


def _answer(output: Any, cached_tokens: int) -> Answer:
    """What is needed of a CompletionOutput whose log-probabilities are flat."""
    versions = [
        VersionSpan(policy_version=int(span.version), start=span.start, end=span.end)
        for span in output.weight_versions or ()
    ]
    return Answer(
        token_ids=list(output.token_ids),
        # The sampled token is the first entry of its place.
        logprobs=[output.logprobs.logprobs[start] for start in output.logprobs.start_indices]
        if output.logprobs
        else [],
        finish_reason=output.finish_reason,
        versions=versions,
        cached_tokens=cached_tokens,
    )


def _dead() -> InfraError:
    return InfraError(
        "vLLM's processes are gone", reason="ENGINE_DEAD", remedy="see the service's log"
    )
