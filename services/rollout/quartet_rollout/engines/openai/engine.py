"""The engine behind `rollout.engine openai`: completions of a server that is there already."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.utils import cached_file

from quartet.errors import FatalError, InfraError, QuartetError, RequestError, StateError
from quartet.obs import metrics
from quartet.types import (
    GenerateRequest,
    GroupCompletions,
    LogprobKind,
    PauseMode,
    PromptGroup,
    PushBackend,
)
from quartet_rollout.checks import check_kind, check_prompt
from quartet_rollout.engine import EngineSpec, Generated
from quartet_rollout.engines.openai.doors import find_door
from quartet_rollout.engines.openai.flights import Flights
from quartet_rollout.engines.openai.http import Server
from quartet_rollout.engines.openai.probe import ServerTraits, probe
from quartet_rollout.engines.openai.sample import ServedSample
from quartet_rollout.engines.openai.watch import gone, wait_for
from quartet_rollout.engines.openai.weights import NamedTensors, WeightDoor
from quartet_rollout.engines.vllm.arguments import DTYPES
from quartet_rollout.engines.vllm.facts import ModelFacts, read_facts
from quartet_rollout.engines.vllm.gate import Gate

if TYPE_CHECKING:
    from quartet.config import RolloutServeConfig

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_engine(config: RolloutServeConfig) -> AsyncIterator[OpenAiEngine]:
    """Reach the server, find out what it can, and use it until the block ends.

    Raises:
        ConfigError: Nobody answers, or the server lacks what an engine needs.
    """
    rollout = config.rollout
    facts, model_folder = await asyncio.to_thread(_read_model, config)
    async with Server.reached(
        rollout.server_url or "", key=rollout.server_key, max_streams=rollout.max_num_sequences
    ) as server:
        await wait_for(server)
        door = await find_door(server, config, facts, model_folder)
        await door.begin()
        traits = await probe(
            server,
            model=rollout.server_model,
            kind=LogprobKind(rollout.server_logprobs),
            vocabulary=facts.vocabulary,
        )
        yield OpenAiEngine(server, door, facts, traits, config)


class OpenAiEngine:
    """One server's completions. Made by `open_engine`."""

    def __init__(
        self,
        server: Server,
        door: WeightDoor,
        facts: ModelFacts,
        traits: ServerTraits,
        config: RolloutServeConfig,
    ) -> None:
        self._server = server
        self._door = door
        self._facts = facts
        self._traits = traits
        self._spec = _spec(facts, traits, door, config)
        self._seeds = random.Random(config.train.seed)
        self._flights = Flights(server, traits.model)
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
        """Wait until the server is gone, or has other weights; see the Protocol."""
        return await gone(self._server, self._door)

    async def generate(self, request: GenerateRequest) -> Generated:
        """Complete all groups; see the Protocol."""
        arrived = time.monotonic()
        self._check(request)
        groups = [self._samples(group, request) for group in request.groups]
        samples = [sample for group in groups for sample in group]
        self._count(len(samples))
        try:
            async with self._gate.enter(alone=False):
                await self._flights.complete(samples, self._done)
            await self._check_server()
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

    async def load_weights(self, tensors: NamedTensors, policy_version: int) -> int:
        """Swap all weights between two tokens; see the Protocol."""
        self._flights.hold()
        try:
            await self._door.hold()
        except QuartetError:  # nothing was touched: the old weights serve on
            self._go_on_unless_held()
            raise
        await self._flights.interrupt()
        try:
            await self._door.load(tensors, policy_version)
        except Exception as error:
            await self._tear()
            raise FatalError(
                f"the weights are half old and half new: {error}", reason="WEIGHTS_TORN"
            ) from error
        self._flights.policy_version = policy_version
        self._is_torn = False
        self._flights.tear(is_torn=False)
        if not self._is_held:
            await self._door.go_on()
        self._go_on_unless_held()
        return self._in_flight

    async def pause(self, mode: PauseMode) -> int:
        """Hold generation; see the Protocol."""
        if mode is PauseMode.DRAIN:
            self._gate.close()
            await self._gate.empty()
            if self._gate.is_open:  # a resume came first
                return self._in_flight
        self._is_held = True
        if mode is PauseMode.KEEP:
            # A server that cannot stand still works on, and its answers wait: a request that was
            # closed and asked for again would draw other tokens.
            self._flights.hold(keep_answers=True)
            await self._door.hold()
            return self._in_flight
        self._flights.hold()
        await self._flights.interrupt()
        if mode is PauseMode.ABORT:
            self._flights.give_up()
        return self._in_flight

    async def resume(self) -> int:
        """Go on; see the Protocol."""
        self._is_held = False
        if not self._is_torn:
            await self._door.go_on()
            self._flights.go_on()
        self._gate.open()
        return self._in_flight

    async def sleep(self, level: int) -> None:
        """A server that others started keeps its memory; see the Protocol."""
        raise StateError(
            "the server that this engine asks keeps its memory",
            reason="SLEEP_DISABLED",
            field="vllm.enable_sleep",
            remedy="leave --vllm.enable_sleep away, or take another --rollout.engine",
        )

    async def wake(self, tags: Collection[str] = ("weights", "kv_cache")) -> None:
        """It never sleeps."""

    async def _tear(self) -> None:
        """After a failed swap: nothing may be computed, and what ran ends with its tokens."""
        self._is_torn = True
        self._flights.give_up()
        self._flights.tear(is_torn=True)
        # Others may use the server: it stands still until the weights are whole.
        with suppress(QuartetError):
            await self._door.hold()

    def _go_on_unless_held(self) -> None:
        if not self._is_held and not self._is_torn:
            self._flights.go_on()

    async def _check_server(self) -> None:
        """The samples came from the weights that this engine gave the server."""
        if await self._door.has_changed(was_away=False):
            raise InfraError(
                f"the server at {self._server.url} no longer has the weights that it was given",
                reason="SERVER_REPLACED",
            )

    def _done(self, sample: ServedSample) -> None:
        sample.is_counted_off = True
        self._count(-1)
        metrics.GENERATED_TOKENS.inc(len(sample.tokens))

    def _count(self, change: int) -> None:
        self._in_flight += change
        metrics.COMPLETIONS_IN_FLIGHT.set(self._in_flight)

    def _samples(self, group: PromptGroup, request: GenerateRequest) -> list[ServedSample]:
        sampling = request.sampling
        room = self._spec.max_sequence_length - len(group.prompt_token_ids)
        own = frozenset[int]() if sampling.ignore_eos else self._facts.eos_token_ids
        seeds = group.seeds or [self._seeds.getrandbits(64) for _ in range(group.num_samples)]
        names = group.sample_ids or [""] * group.num_samples
        return [
            ServedSample(
                sample_id=name,
                prompt=group.prompt_token_ids,
                seed=seed,
                sampling=sampling,
                kind=request.logprob_kind,
                stop_ids=own | frozenset(sampling.stop_token_ids),
                max_tokens=min(sampling.max_new_tokens or room, room),
            )
            for name, seed in zip(names, seeds, strict=True)
        ]

    def _check(self, request: GenerateRequest) -> None:
        check_kind(
            request.logprob_kind,
            self._spec.logprob_kinds,
            other=f"start vLLM's server with --logprobs-mode {request.logprob_kind}_logprobs",
        )
        if request.isolated:
            raise RequestError(
                "the server decides which requests it computes together",
                reason="ISOLATED_UNSUPPORTED",
                field="isolated",
                value="true",
                remedy="leave --train.full_determinism_enable away, or take another engine",
            )
        if request.sampling.top_k > 0 and not self._traits.has_top_k:
            raise RequestError(
                f"the server at {self._server.url} does not heed top_k",
                reason="TOP_K_UNSUPPORTED",
                field="sampling.top_k",
                value=str(request.sampling.top_k),
                remedy="leave --rollout.top_k at -1",
            )
        for group in request.groups:
            check_prompt(
                group,
                max_length=self._spec.max_sequence_length,
                vocabulary=self._facts.vocabulary,
            )


def _read_model(config: RolloutServeConfig) -> tuple[ModelFacts, Path]:
    """The model's facts, and the folder that its configuration lies in."""
    name = config.rollout.model_name_or_path
    assert name, "the service asks for it first"
    facts = read_facts(
        name,
        dtype=DTYPES[config.ds.param_dtype],
        trust_remote_code=config.ds.trust_remote_code,
    )
    path = cached_file(name, "config.json")
    assert path, "it was just read"
    return facts, Path(path).absolute().parent


def _spec(
    facts: ModelFacts, traits: ServerTraits, door: WeightDoor, config: RolloutServeConfig
) -> EngineSpec:
    lengths = (config.data.max_len, facts.max_positions, traits.max_length)
    return EngineSpec(
        name="openai",
        max_sequence_length=min(length for length in lengths if length),
        max_num_sequences=config.rollout.max_num_sequences,
        manifest=facts.manifest,
        logprob_kinds=(LogprobKind(config.rollout.server_logprobs),),
        push_backends=(PushBackend.FILE,) if door.takes_weights else (),
        capabilities=("continuous-batching",),
        # This process receives them, and holds none of its own.
        device="cpu",
        digest=facts.digest,
    )
