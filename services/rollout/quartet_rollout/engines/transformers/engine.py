"""The engine behind `rollout.engine transformers`: HF models, on CPU and GPU from the same code."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Collection, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import torch

from quartet.errors import FatalError, QuartetError
from quartet.nn.digest import model_digest
from quartet.types import (
    GenerateRequest,
    GroupCompletions,
    LogprobKind,
    PauseMode,
    PromptGroup,
    PushBackend,
    SamplingParams,
)
from quartet.weights import manifest_of_model
from quartet_rollout.checks import check_prompt
from quartet_rollout.engine import EngineSpec, Generated
from quartet_rollout.engines.transformers.loop import EngineLoop, Job, Scheduler
from quartet_rollout.engines.transformers.model import CausalLm, load_model
from quartet_rollout.engines.transformers.sequence import Sequence

if TYPE_CHECKING:
    from quartet.config import RolloutServeConfig

log = logging.getLogger(__name__)
T = TypeVar("T")


@asynccontextmanager
async def open_engine(config: RolloutServeConfig) -> AsyncIterator[TransformersEngine]:
    """Load the model and run the engine until the block ends."""
    loop = EngineLoop()
    try:
        scheduler = await loop.start(lambda: _load(config))
        yield TransformersEngine(loop, scheduler, config)
    finally:
        await loop.close()


def _load(config: RolloutServeConfig) -> Scheduler:
    if config.train.full_determinism_enable and torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
    return Scheduler(load_model(config), max_rows=config.rollout.max_num_sequences)


class TransformersEngine:
    """Continuous batching over one HF causal language model. Made by `open_engine`."""

    def __init__(self, loop: EngineLoop, scheduler: Scheduler, config: RolloutServeConfig) -> None:
        self._loop = loop
        self._scheduler = scheduler
        self._model = scheduler.model
        self._seeds = random.Random(config.train.seed)
        self._spec = _spec(self._model, config)

    @property
    def spec(self) -> EngineSpec:
        """What it is."""
        return self._spec

    @property
    def num_in_flight(self) -> int:
        """Completions running or waiting. Read from another thread: a moment old at most."""
        return self._scheduler.num_in_flight

    async def failed(self) -> QuartetError:
        """Lives as long as its process: a step that fails ends the calls in flight alone."""
        return await asyncio.get_running_loop().create_future()

    async def generate(self, request: GenerateRequest) -> Generated:
        """Complete all groups; see the Protocol."""
        arrived = time.monotonic()
        groups = [self._sequences(group, request) for group in request.groups]
        job = Job(samples=[s for group in groups for s in group], isolated=request.isolated)
        first_token: list[float] = []
        job.started.add_done_callback(lambda _: first_token.append(time.monotonic()))
        self._loop.submit(lambda: self._scheduler.add(job))
        try:
            await asyncio.wrap_future(job.done)
        except asyncio.CancelledError:
            self._loop.submit(lambda: self._scheduler.cancel(job))
            raise
        return Generated(
            groups=tuple(
                GroupCompletions(
                    group_id=group.group_id, completions=tuple(s.completion() for s in samples)
                )
                for group, samples in zip(request.groups, groups, strict=True)
            ),
            queue_seconds=(first_token[0] if first_token else time.monotonic()) - arrived,
        )

    async def load_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> int:
        """Copy all tensors over the old ones between two tokens; see the Protocol."""

        def swap() -> int:
            try:
                _copy_into(self._model, tensors)
            except Exception as error:
                # Here, not by whoever hears of it: by then there were tokens of these weights.
                self._scheduler.pause(PauseMode.ABORT)
                raise FatalError(
                    f"the weights are half old and half new: {error}", reason="WEIGHTS_TORN"
                ) from error
            self._scheduler.policy_version = policy_version
            return self._scheduler.forget_cache()

        return await self._do(self._loop.submit(swap))

    async def pause(self, mode: PauseMode) -> int:
        """Hold generation; see the Protocol."""
        held = await self._do(self._loop.submit(lambda: self._scheduler.pause(mode)))
        return await self._do(held)

    async def resume(self) -> int:
        """Go on; see the Protocol."""
        return await self._do(self._loop.submit(self._scheduler.resume))

    async def sleep(self, level: int) -> None:
        """Free the device; see the Protocol."""

        def free() -> None:
            self._scheduler.forget_cache()
            self._model.release(keep=level == 1)

        await self._do(self._loop.submit(free))

    async def wake(self, tags: Collection[str] = ("weights", "kv_cache")) -> None:
        """Take the memory back; see the Protocol. Caches have none before there are tokens."""
        if "weights" in tags:
            await self._do(self._loop.submit(lambda: self._model.restore()))

    async def _do(self, future: Future[T]) -> T:
        # Shielded: what the thread has begun is not undone because a caller went away.
        return await asyncio.shield(asyncio.wrap_future(future))

    def _sequences(self, group: PromptGroup, request: GenerateRequest) -> list[Sequence]:
        check_prompt(group, max_length=self._model.max_length, vocabulary=self._model.vocabulary)
        sampling = request.sampling
        room = self._model.max_length - len(group.prompt_token_ids)
        seeds = group.seeds or [self._seeds.getrandbits(64) for _ in range(group.num_samples)]
        names = group.sample_ids or [""] * group.num_samples
        stop_ids = self._stop_ids(sampling)
        return [
            Sequence(
                sample_id=name,
                prompt=group.prompt_token_ids,
                seed=seed,
                sampling=sampling,
                logprob_kind=request.logprob_kind,
                stop_ids=stop_ids,
                max_tokens=min(sampling.max_new_tokens or room, room),
            )
            for name, seed in zip(names, seeds, strict=True)
        ]

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        own = frozenset[int]() if sampling.ignore_eos else self._model.eos_token_ids
        return own | frozenset(sampling.stop_token_ids)


def _spec(model: CausalLm, config: RolloutServeConfig) -> EngineSpec:
    on_gpu = model.device.type == "cuda"
    backends = (PushBackend.GLOO, PushBackend.IPC, PushBackend.FILE)
    return EngineSpec(
        name="transformers",
        max_sequence_length=model.max_length,
        max_num_sequences=config.rollout.max_num_sequences,
        manifest=manifest_of_model(model.model),
        logprob_kinds=(LogprobKind.RAW, LogprobKind.PROCESSED),
        push_backends=(PushBackend.NCCL, *backends) if on_gpu else backends,
        capabilities=("sleep", "isolated", "continuous-batching"),
        device=str(model.device),
        digest=model_digest(model.model),
    )


def _copy_into(model: CausalLm, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    parameters = dict(model.model.named_parameters())
    for name, tensor in tensors:
        parameters.pop(name).copy_(tensor)
    if parameters:
        raise ValueError(f"{len(parameters)} tensors are missing, {next(iter(parameters))} first")
