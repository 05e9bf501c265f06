"""The learner as the servicer sees it: async, one thread of torch behind it."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import quartet
from quartet.config import RpcConfig
from quartet.errors import InfraError, StateError, UnavailableError
from quartet.obs import metrics, queues
from quartet.types import (
    ForwardResult,
    Head,
    LearnerInfo,
    PushBackend,
    PushResult,
    ServerInfo,
    TrainResult,
    TrainSamples,
    TrainStep,
)
from quartet.types.requests import (
    ExportModelRequest,
    ForwardRequest,
    LoadCheckpointRequest,
    LoadCheckpointResult,
    PushWeightsRequest,
    SaveCheckpointRequest,
    SavedFolder,
    StartRunRequest,
    StartRunResult,
)
from quartet_learner.ranks import (
    CommandChannel,
    Launch,
    OtherRanks,
    end_process,
    launch_of,
    open_store,
)
from quartet_learner.settings import LearnerSettings

log = logging.getLogger(__name__)

Result = TypeVar("Result")

STOP_SECONDS = 4.0
"""How long work under way, and then the other ranks, may take to end; the server waits 10 s."""
FORWARD_BATCH_TOKENS = 8192
"""Tokens a rank gets before a Forward's chunks are worked on; more come in the next batch."""


class LearnerRoom:
    """One model under training. Every method that touches it queues on one thread."""

    def __init__(
        self, settings: LearnerSettings, *, replica: str = "", rpc: RpcConfig | None = None
    ) -> None:
        """Describe a learner that `start` will load.

        Args:
            settings: model and engine.
            replica: name of this server; made up when empty.
            rpc: how this server is reached, and how it reaches rollouts.
        """
        self.settings = settings
        self.replica = replica or f"learner-{uuid.uuid4().hex[:8]}"
        self._rpc = rpc or RpcConfig()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")
        self._conductor: Any = None
        self._others: OtherRanks | None = None
        self._info: LearnerInfo | None = None
        self._policy_version = 0

    async def start(self) -> None:
        """Start the other ranks, load the model on all of them."""
        await self._on_thread(self._load)

    async def stop(self) -> None:
        """End the other ranks; work under way is finished first, for a moment."""
        if self._others is not None:
            self._others.expect_end()
        if self._conductor is not None:
            try:
                await asyncio.wait_for(self._on_thread(self._conductor.stop), STOP_SECONDS)
            except TimeoutError:
                log.warning("still at work after %s s: ending the ranks", STOP_SECONDS)
        if self._others is not None:
            await asyncio.to_thread(self._others.stop, STOP_SECONDS)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def info(self) -> LearnerInfo:
        """What this learner is and where its run stands; never waits for work under way."""
        if self._info is None:
            raise UnavailableError("the learner is loading", reason="LOADING")
        run = self._conductor.engine.run
        return replace(
            self._info,
            run_id=run.spec.run_id if run else "",
            optimizer_steps=run.optimizer_steps if run else 0,
            policy_version=self._policy_version,
        )

    async def start_run(self, request: StartRunRequest) -> StartRunResult:
        """Begin a run, or go on with the one of that name."""
        return await self._conduct(lambda c: c.start_run(request))

    async def train(self, step: TrainStep, parts: Sequence[TrainSamples]) -> TrainResult:
        """One optimizer step over all parts."""
        began = time.monotonic()
        result = await self._conduct(lambda c: c.train(step, parts))
        metrics.STEP_DURATION.observe(time.monotonic() - began)
        metrics.OPTIMIZER_STEPS.labels(str(result.applied).lower()).inc()
        if result.applied:
            metrics.TRAINED_TOKENS.inc(result.num_action_tokens)
        else:
            log.warning("step %d was refused: its gradient is not finite", result.optimizer_steps)
        return result

    async def forward(
        self, requests: AsyncIterator[ForwardRequest]
    ) -> AsyncIterator[ForwardResult]:
        """Evaluate chunks; several that belong together share forward passes.

        How chunks are joined depends on the stream's content alone, never on timing, so the same
        call gives the same bits.
        """
        waiting: list[ForwardRequest] = []
        tokens = 0
        async for request in requests:
            if waiting and not _alike(waiting[0], request):
                for result in await self._forward(waiting):
                    yield result
                waiting, tokens = [], 0
            waiting.append(request)
            tokens += request.sequences.num_tokens
            if tokens >= FORWARD_BATCH_TOKENS * self.info().world_size:
                for result in await self._forward(waiting):
                    yield result
                waiting, tokens = [], 0
        if waiting:
            for result in await self._forward(waiting):
                yield result

    async def save_checkpoint(self, request: SaveCheckpointRequest) -> SavedFolder:
        """Write a checkpoint."""
        return await self._conduct(lambda c: c.save_checkpoint(request))

    async def load_checkpoint(self, request: LoadCheckpointRequest) -> LoadCheckpointResult:
        """Go on from a checkpoint."""
        return await self._conduct(lambda c: c.load_checkpoint(request))

    async def export_model(self, request: ExportModelRequest) -> SavedFolder:
        """Write a folder that from_pretrained opens."""
        return await self._conduct(lambda c: c.export_model(request))

    async def push_weights(self, request: PushWeightsRequest) -> PushResult:
        """Bring the weights to rollout replicas, which then serve them as policy_version.

        Raises:
            InfraError: no replica serves them; the message names each with its cause.
        """
        from quartet.clients import RolloutClient
        from quartet.weights import PushClock, push_weights

        clock = PushClock()
        info = self.info()
        if info.head is not Head.LM or info.manifest is None:
            raise StateError(
                f"a learner with head {info.head} has nothing that a rollout can use",
                reason="NOTHING_TO_PUSH",
                remedy="push from the learner with head lm",
            )
        manifest = replace(info.manifest, bucket_bytes=request.bucket_bytes)
        conductor = self._conductor
        conductor.engine.started()
        on_gpu = conductor.engine.group.device.type == "cuda"
        backend = request.backend or (PushBackend.NCCL if on_gpu else PushBackend.GLOO)
        clients = [RolloutClient(address, self._rpc) for address in request.addresses]
        try:
            result = await push_weights(
                manifest=manifest,
                tensors=lambda: conductor.buckets(manifest, clock),
                replicas=clients,
                epoch=time.time_ns(),
                policy_version=request.policy_version,
                backend=backend,
                group_timeout=request.group_timeout,
                # One that stands still at its commit is given up like any other.
                commit_timeout=request.group_timeout,
                folder=request.folder,
                executor=self._executor,
                device=str(conductor.engine.group.device),
                clock=clock,
            )
        finally:
            await asyncio.gather(*(client.close() for client in clients))
        self._note_push(request, result)
        return result

    async def sleep(self) -> None:
        """Free the device."""
        await self._conduct(lambda c: c.sleep())

    async def wake(self) -> None:
        """Take it back."""
        await self._conduct(lambda c: c.wake())

    def _note_push(self, request: PushWeightsRequest, result: PushResult) -> None:
        if not any(replica.committed for replica in result.replicas):
            causes = "; ".join(f"{r.address}: {r.failed_phase}: {r.error}" for r in result.replicas)
            raise InfraError(
                f"no replica took version {request.policy_version}: {causes}",
                reason="PUSH_FAILED",
            )
        self._policy_version = request.policy_version
        metrics.POLICY_VERSION.set(request.policy_version)
        metrics.PUSHED_BYTES.inc(result.total_bytes)
        for phase in ("prepare", "transfer", "commit", "gather", "pack", "digest", "broadcast"):
            metrics.PUSH_DURATION.labels(phase).observe(getattr(result, f"{phase}_seconds"))

    async def _forward(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        together = list(requests)
        return await self._conduct(lambda c: c.forward(together))

    async def _conduct(self, work: Callable[[Any], Result]) -> Result:
        """Run `work(conductor)` on the thread."""
        if self._conductor is None:
            raise UnavailableError("the learner is loading", reason="LOADING")
        conductor = self._conductor
        return await self._on_thread(lambda: work(conductor))

    async def _on_thread(self, work: Callable[[], Result]) -> Result:
        return await queues.submit(self._executor, work, queue="learner")

    def _load(self) -> None:
        """Blocking half of `start`."""
        from quartet_learner.conductor import Conductor
        from quartet_learner.engine import LearnerEngine
        from quartet_learner.group import join_group

        launch = launch_of(self.settings)
        store = open_store(launch)
        if launch.world_size > 1 and not launch.launched:
            self._others = OtherRanks(self.settings, launch, store.port, end_process)
        group = join_group(
            store,
            launch.rank,
            launch.world_size,
            tensor_size=self.settings.tensor_parallel_size,
            ring_size=self.settings.ring_size,
        )
        engine = LearnerEngine(self.settings, group)
        self._info = self._describe(engine, launch)
        self._conductor = Conductor(engine, CommandChannel(store, group))

    def _describe(self, engine: Any, launch: Launch) -> LearnerInfo:
        from quartet_learner.optim import effective_zero_stage
        from quartet_learner.served import loaded_digest, served_manifest
        from quartet_learner.sleep import can_sleep

        stage = effective_zero_stage(self.settings)
        manifest = served_manifest(engine.model.hf)
        server = ServerInfo(
            service="learner",
            server_version=quartet.__version__,
            replica=self.replica,
            digest=loaded_digest(engine.model.hf),
            tokenizer_fingerprint=_tokenizer_fingerprint(self.settings.model_name_or_path),
            capabilities=("sleep",) if can_sleep(stage) else (),
            max_sequence_length=engine.max_length,
            max_concurrent_calls=self._rpc.max_concurrent_calls,
            model_name_or_path=self.settings.model_name_or_path,
        )
        return LearnerInfo(
            info=server,
            head=self.settings.head,
            world_size=launch.world_size,
            num_parameters=engine.num_parameters,
            manifest=manifest,
        )


def _alike(one: ForwardRequest, other: ForwardRequest) -> bool:
    """Whether two chunks may share a forward pass."""
    return (
        one.temperature == other.temperature
        and one.output == other.output
        and one.max_tokens_per_micro_batch == other.max_tokens_per_micro_batch
        and one.with_entropy == other.with_entropy
    )


def _tokenizer_fingerprint(source: str) -> str:
    """Fingerprint of the model's tokenizer, or "" when it has none."""
    from quartet.data.tokenizer import fingerprint

    try:
        return fingerprint(source)
    except (OSError, ValueError):
        log.warning("%s has no tokenizer", source)
        return ""
