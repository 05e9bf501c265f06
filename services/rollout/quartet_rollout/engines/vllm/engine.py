"""The engine behind `rollout.engine vllm`, on GPUs and CPUs from the same code."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from quartet.config.machine import this_machine
from quartet.errors import ConfigError, FatalError, InfraError, StateError
from quartet.obs import metrics
from quartet.types import (
    GenerateRequest,
    GroupCompletions,
    LogprobKind,
    PauseMode,
    PrepareWeightsRequest,
    PromptGroup,
    PushBackend,
)
from quartet.weights.landing import OwnLanding
from quartet_rollout.checks import check_kind, check_prompt
from quartet_rollout.engine import EngineSpec, Generated
from quartet_rollout.engines.vllm import environment, library
from quartet_rollout.engines.vllm.arguments import DTYPES, engine_arguments
from quartet_rollout.engines.vllm.crew import Crew, assemble
from quartet_rollout.engines.vllm.facts import ModelFacts, read_facts
from quartet_rollout.engines.vllm.gate import Gate
from quartet_rollout.engines.vllm.handover import SharedStaging
from quartet_rollout.engines.vllm.library import Vllm
from quartet_rollout.engines.vllm.sample import Sample

if TYPE_CHECKING:
    import torch

    from quartet.config import RolloutServeConfig
    from quartet.weights import Landing

log = logging.getLogger(__name__)

_COMPUTED_TOKENS = metrics.PROMPT_TOKENS.labels("computed")
_CACHED_TOKENS = metrics.PROMPT_TOKENS.labels("cache")


@asynccontextmanager
async def open_engine(config: RolloutServeConfig) -> AsyncIterator[VllmEngine]:
    """Start vLLM's processes and run the engine until the block ends."""
    has_gpu = this_machine().num_gpus > 0
    environment.prepare(has_gpu=has_gpu)
    facts, arguments = await asyncio.to_thread(_prepare, config, has_gpu)
    vllm = await asyncio.to_thread(Vllm.start, arguments)
    crew = None
    try:
        await vllm.name_version(0)
        into_workers = _into_workers(config, has_gpu=has_gpu)
        spec = _spec(facts, arguments, into_workers)
        if into_workers:
            size = _num_workers(arguments)
            crew = await assemble(size, vllm.connect, backends=into_workers)
        yield VllmEngine(vllm, facts, spec, config.train.seed, crew)
    finally:
        if crew is not None:
            crew.close()
        await asyncio.to_thread(vllm.stop)


class VllmEngine:
    """One vLLM engine: this process's end of it. Made by `open_engine`."""

    def __init__(
        self,
        vllm: Vllm,
        facts: ModelFacts,
        spec: EngineSpec,
        seed: int,
        crew: Crew | None = None,
    ) -> None:
        self._vllm = vllm
        self._facts = facts
        self._spec = spec
        self._seeds = random.Random(seed)
        self._crew = crew
        self._gate = Gate()
        self._in_flight = 0
        self._is_held = False
        self._is_torn = False

    @property
    def spec(self) -> EngineSpec:
        """What it is."""
        return self._spec

    @property
    def num_in_flight(self) -> int:
        """Completions running or waiting."""
        return self._in_flight

    async def failed(self) -> InfraError:
        """Wait until vLLM's processes are gone; see the Protocol."""
        ends = [asyncio.ensure_future(self._vllm.died())]
        if self._crew is not None:
            ends.append(asyncio.ensure_future(self._crew.broken()))
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for end in ends:
                end.cancel()

    async def generate(self, request: GenerateRequest) -> Generated:
        """Complete all groups; see the Protocol."""
        arrived = time.monotonic()
        check_kind(
            request.logprob_kind,
            self._spec.logprob_kinds,
            other="start the service with "
            f"--vllm.extra logprobs_mode={request.logprob_kind}_logprobs",
        )
        groups = [self._samples(group, request) for group in request.groups]
        samples = [sample for group in groups for sample in group]
        self._count(len(samples))
        try:
            async with self._gate.enter(alone=request.isolated):
                if request.isolated:
                    await self._complete_in_step(samples)
                else:
                    await self._complete(samples)
        finally:
            self._count(-sum(not sample.is_counted_off for sample in samples))
        began = min((s.began for s in samples if s.began is not None), default=time.monotonic())
        return Generated(
            groups=tuple(
                GroupCompletions(
                    group_id=group.group_id, completions=tuple(s.completion() for s in made)
                )
                for group, made in zip(request.groups, groups, strict=True)
            ),
            queue_seconds=began - arrived,
        )

    def landing(self, request: PrepareWeightsRequest) -> Landing:
        """The workers, or memory that they map; see `TakesPushes`."""
        if self._crew is not None and request.backend in self._crew.backends:
            return self._crew.landing(request)
        return OwnLanding(request, "cpu", SharedStaging())

    async def load_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> int:
        """Swap all weights between two tokens; see the Protocol."""
        # A step in the middle of a swap would end vLLM's processes.
        await self._vllm.hold("keep")
        try:
            await self._vllm.load(tensors, policy_version)
        except Exception as error:
            await self._tear()
            raise FatalError(
                f"the weights are half old and half new: {error}", reason="WEIGHTS_TORN"
            ) from error
        self._is_torn = False
        if not self._is_held:
            await self._vllm.go_on()
        return self._in_flight

    async def pause(self, mode: PauseMode) -> int:
        """Hold generation; see the Protocol."""
        if mode is PauseMode.DRAIN:
            self._gate.close()
            await self._gate.empty()
            if self._gate.is_open:  # a resume came first
                return self._in_flight
        self._is_held = True
        await self._vllm.hold("abort" if mode is PauseMode.ABORT else "keep")
        return self._in_flight

    async def resume(self) -> int:
        """Go on; see the Protocol."""
        self._is_held = False
        if not self._is_torn:
            await self._vllm.go_on()
        self._gate.open()
        return self._in_flight

    async def sleep(self, level: int) -> None:
        """Free the device; see the Protocol."""
        if "sleep" not in self._spec.capabilities:
            raise StateError(
                "vLLM was started without the means to sleep",
                reason="SLEEP_DISABLED",
                field="vllm.enable_sleep",
                remedy="start the service with --vllm.enable_sleep",
            )
        if self._spec.device == "cpu":
            log.info("falls asleep; on a CPU vLLM keeps its memory")
        await self._vllm.sleep(level)

    async def wake(self, tags: Collection[str] = ("weights", "kv_cache")) -> None:
        """Take the memory back; see the Protocol."""
        await self._vllm.wake(sorted(tags))
        # vLLM begins to step as soon as nothing of it sleeps.
        if self._is_held or self._is_torn:
            await self._vllm.hold("keep")

    async def _tear(self) -> None:
        """After a failed swap: nothing may be computed, and what ran ends with its tokens."""
        self._is_torn = True
        if not self._vllm.is_dead:
            await self._vllm.hold("abort")
            await self._vllm.hold("keep")

    async def _complete(self, samples: Sequence[Sample]) -> None:
        """Run all samples; the first failure, or the caller's going away, stops the others."""
        tasks = [asyncio.ensure_future(self._run(sample)) for sample in samples]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _complete_in_step(self, samples: Sequence[Sample]) -> None:
        """Let all samples begin in the same step, so that they always meet the same others."""
        await self._vllm.hold("keep")
        work = asyncio.ensure_future(self._complete(samples))
        try:
            await self._vllm.has_requests(len(samples), unless=work.done)
            # What is sent to the engine stays in order: this comes after the requests.
            if not self._is_held and not self._is_torn:
                await self._vllm.go_on()
            await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _run(self, sample: Sample) -> None:
        while not sample.is_done:
            if self._is_torn:
                raise InfraError("the weights are not whole", reason="WEIGHTS_TORN")
            tokens = sample.all_tokens()
            answer = await self._vllm.ask(
                tokens,
                sample.parameters(),
                shares_with=sample.shares_with,
                on_output=sample.saw_output,
            )
            if answer.token_ids:  # else it may have ended before it began
                _CACHED_TOKENS.inc(answer.cached_tokens)
                _COMPUTED_TOKENS.inc(len(tokens) - answer.cached_tokens)
            sample.take(answer)
        sample.is_counted_off = True
        self._count(-1)
        metrics.GENERATED_TOKENS.inc(len(sample.tokens))

    def _count(self, change: int) -> None:
        self._in_flight += change
        metrics.COMPLETIONS_IN_FLIGHT.set(self._in_flight)

    def _samples(self, group: PromptGroup, request: GenerateRequest) -> list[Sample]:
        check_prompt(
            group,
            max_length=self._spec.max_sequence_length,
            vocabulary=self._facts.vocabulary,
        )
        sampling = request.sampling
        room = self._spec.max_sequence_length - len(group.prompt_token_ids)
        own = frozenset[int]() if sampling.ignore_eos else self._facts.eos_token_ids
        seeds = group.seeds or [self._seeds.getrandbits(64) for _ in range(group.num_samples)]
        names = group.sample_ids or [""] * group.num_samples
        # They share what is computed of the prompt, and nobody else does unless the flags say so.
        shares_with = uuid.uuid4().hex
        return [
            Sample(
                sample_id=name,
                prompt=group.prompt_token_ids,
                seed=seed,
                sampling=sampling,
                kind=request.logprob_kind,
                stop_ids=own | frozenset(sampling.stop_token_ids),
                max_tokens=min(sampling.max_new_tokens or room, room),
                shares_with=shares_with,
                isolated=request.isolated,
            )
            for name, seed in zip(names, seeds, strict=True)
        ]


def _prepare(config: RolloutServeConfig, has_gpu: bool) -> tuple[ModelFacts, dict[str, Any]]:
    """Read the model's facts, and settle vLLM's arguments. Slow: imports vLLM."""
    known = library.known_arguments()
    assert config.rollout.model_name_or_path, "the service asks for it first"
    facts = read_facts(
        config.rollout.model_name_or_path,
        dtype=DTYPES[config.ds.param_dtype],
        trust_remote_code=config.ds.trust_remote_code,
    )
    if not has_gpu and facts.head_dim not in (sizes := library.cpu_head_sizes()):
        raise ConfigError(
            f"vLLM's kernels for CPUs take attention heads of {', '.join(map(str, sizes))}, and "
            f"this model's are of {facts.head_dim}",
            field="rollout.engine",
            value="vllm",
            remedy="use rollout.engine transformers",
        )
    return facts, engine_arguments(config, facts, has_gpu=has_gpu, known=known)


def _into_workers(config: RolloutServeConfig, *, has_gpu: bool) -> frozenset[PushBackend]:
    """Push backends whose groups have the workers as members, and not this process."""
    gloo = {PushBackend.GLOO} if config.vllm.gloo_into == "workers" else set[PushBackend]()
    return frozenset({PushBackend.NCCL, PushBackend.IPC} | gloo if has_gpu else gloo)


def _num_workers(arguments: dict[str, Any]) -> int:
    """Each has a part of the model: of its layers, or of their width."""
    return arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1)


def _spec(
    facts: ModelFacts, arguments: dict[str, Any], into_workers: Collection[PushBackend] = ()
) -> EngineSpec:
    has_gpu = "enable_sleep_mode" in arguments
    mode = arguments["logprobs_mode"]
    kinds = tuple(kind for kind in LogprobKind if mode == f"{kind}_logprobs")
    if not kinds:
        raise ConfigError(
            f"vllm.extra logprobs_mode={mode} gives no log-probabilities",
            field="vllm.extra",
            value=str(mode),
            remedy="use processed_logprobs or raw_logprobs",
        )
    backends = (PushBackend.GLOO, PushBackend.IPC, PushBackend.FILE)
    if has_gpu:
        backends = (PushBackend.NCCL, *backends)
    can_sleep = arguments.get("enable_sleep_mode", True)
    return EngineSpec(
        name="vllm",
        max_sequence_length=arguments["max_model_len"],
        max_num_sequences=arguments["max_num_seqs"],
        manifest=facts.manifest,
        logprob_kinds=kinds,
        push_backends=backends,
        push_ranks=tuple(_num_workers(arguments) if b in into_workers else 1 for b in backends),
        capabilities=(*(("sleep",) if can_sleep else ()), "isolated", "continuous-batching"),
        device="cuda:0" if has_gpu else "cpu",
        digest=facts.digest,
    )
