"""The rollout room without its door: states, pushes, sleep and pause. Knows no gRPC and no torch.

STARTING -> SERVING <-> ASLEEP
               |  ^
  a swap fails v  | the next push
             STALE
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from quartet import __version__
from quartet.errors import FatalError, QuartetError, RequestError, StateError, UnavailableError
from quartet.obs import metrics
from quartet.types import (
    AbortWeightsRequest,
    AbortWeightsResult,
    CommitWeightsRequest,
    CommitWeightsResult,
    GenerateRequest,
    GenerateResult,
    LogprobSpec,
    PauseMode,
    PrepareWeightsRequest,
    PrepareWeightsResult,
    PushBackend,
    ReceiveEvent,
    ReceiveWeightsRequest,
    ReplicaState,
    RolloutInfo,
    ServerInfo,
    WakeRequest,
)
from quartet.weights import WeightInbox
from quartet_rollout.engine import Engine, TakesPushes

T = TypeVar("T")

_PARTS = ("weights", "kv_cache")
"""What Sleep takes away and Wake brings back."""


class RolloutRoom:
    """One engine, the version it serves, and the state it is in."""

    def __init__(
        self,
        open_engine: Callable[[], AbstractAsyncContextManager[Engine]],
        *,
        replica: str,
        model_name_or_path: str = "",
        fingerprint: Callable[[], str] = str,
        max_concurrent_calls: int = 0,
    ) -> None:
        """Make a room whose engine is not there yet.

        Args:
            open_engine: Loads the engine.
            replica: Name of this server among its replicas.
            model_name_or_path: For GetInfo.
            fingerprint: Reads the tokenizer's fingerprint; may take a while.
            max_concurrent_calls: For GetInfo.
        """
        self.policy_version = 0
        self._open_engine = open_engine
        self._replica = replica
        self._model_name_or_path = model_name_or_path
        self._read_fingerprint = fingerprint
        self._fingerprint = ""
        self._max_concurrent_calls = max_concurrent_calls
        self._stack = contextlib.AsyncExitStack()
        self._engine: Engine | None = None
        self._inbox: WeightInbox | None = None
        self._asleep: set[str] = set()
        self._forgotten = False
        self._is_stale = False
        self._is_draining = False
        self._is_paused = False
        self._is_held = False
        """The engine waits for something else than a Resume: memory, or weights."""

    @property
    def state(self) -> ReplicaState:
        """State now."""
        if self._is_draining:
            return ReplicaState.DRAINING
        if self._engine is None:
            return ReplicaState.STARTING
        if self._asleep:
            return ReplicaState.ASLEEP
        return ReplicaState.STALE if self._is_stale else ReplicaState.SERVING

    async def start(self) -> None:
        """Load the engine."""
        self._fingerprint = await asyncio.to_thread(self._read_fingerprint)
        engine = await self._stack.enter_async_context(self._open_engine())
        spec = engine.spec
        self._inbox = WeightInbox(
            wanted=lambda: spec.manifest,
            device=spec.device,
            replica=self._replica,
            landing=engine.landing if isinstance(engine, TakesPushes) else None,
        )
        self._engine = engine
        metrics.POLICY_VERSION.set(self.policy_version)

    async def failed(self) -> QuartetError:
        """Wait until the engine is gone for good."""
        return await self._require_engine().failed()

    async def stop(self) -> None:
        """Give up pushes and completions, and let go of the engine."""
        self._is_draining = True
        if self._inbox is not None:
            self._inbox.close()
        await self._stack.aclose()

    def info(self, *, include_manifest: bool) -> RolloutInfo:
        """What this server is. Answers while the engine loads, too."""
        spec = self._engine.spec if self._engine else None
        server = ServerInfo(
            service="rollout",
            server_version=__version__,
            replica=self._replica,
            digest=spec.digest if spec else "",
            tokenizer_fingerprint=self._fingerprint,
            capabilities=spec.capabilities if spec else (),
            max_sequence_length=spec.max_sequence_length if spec else 0,
            max_concurrent_calls=self._max_concurrent_calls,
            model_name_or_path=self._model_name_or_path,
        )
        return RolloutInfo(
            info=server,
            engine=spec.name if spec else "",
            state=self.state,
            policy_version=self.policy_version,
            logprob_kinds=spec.logprob_kinds if spec else (),
            push_backends=spec.push_backends if spec else (),
            manifest=spec.manifest if spec and include_manifest else None,
            completions_in_flight=self._engine.num_in_flight if self._engine else 0,
            push_ranks=spec.push_ranks if spec else (),
        )

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Complete prompts.

        Raises:
            StateError: Not SERVING, or the version is older than asked for.
            RequestError: A prompt does not fit.
        """
        engine = self._serving_engine()
        oldest = request.min_policy_version
        if oldest is not None and self.policy_version < oldest:
            raise StateError(
                f"version {self.policy_version} serves, and at least {oldest} is asked for",
                reason="POLICY_VERSION_TOO_OLD",
                field="min_policy_version",
                value=str(oldest),
                remedy="push the weights, or ask another replica",
                replica=self._replica,
            )
        made = await engine.generate(request)
        sampling = request.sampling
        return GenerateResult(
            groups=made.groups,
            logprob_spec=LogprobSpec(
                kind=request.logprob_kind,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
            ),
            replica=self._replica,
            queue_seconds=made.queue_seconds,
        )

    async def prepare(self, request: PrepareWeightsRequest) -> PrepareWeightsResult:
        """First phase of a push."""
        self._check_has_weights("take weights")
        self._check_backend(self._require_engine(), request.backend)
        num_ranks = await self._require_inbox().prepare(request)
        return PrepareWeightsResult(replica=self._replica, num_ranks=num_ranks)

    async def receive(self, request: ReceiveWeightsRequest) -> AsyncIterator[ReceiveEvent]:
        """Second phase of a push."""
        async for event in self._require_inbox().receive(request):
            yield event

    async def commit(self, request: CommitWeightsRequest) -> CommitWeightsResult:
        """Third phase of a push. Goes on to its end even if the caller goes away."""
        return await _finish(self._commit(request))

    def abort(self, request: AbortWeightsRequest) -> AbortWeightsResult:
        """Give a push up."""
        if self._inbox is not None:
            self._inbox.abort(request)
        return AbortWeightsResult(policy_version=self.policy_version, state=self.state)

    async def sleep(self, level: int) -> ReplicaState:
        """Wait for what runs, then free the device's memory."""
        engine = self._require_engine()
        if self._require_inbox().busy:
            raise StateError(
                "a weight push is under way",
                reason="PUSH_UNDER_WAY",
                remedy="commit or abort it first",
                replica=self._replica,
            )
        if not self._asleep:
            # Before anything is paused for a sleep that does not come.
            self._check_can_sleep(engine)
            self._asleep = set(_PARTS)
            await _finish(self._fall_asleep(engine, level))
        return self.state

    async def wake(self, request: WakeRequest) -> ReplicaState:
        """Take memory back, all or by tag; SERVING, or STALE after level 2, when all is back."""
        engine = self._require_engine()
        tags = set(request.tags or _PARTS) & self._asleep
        if tags:
            await _finish(self._wake_up(engine, tags))
        return self.state

    async def pause(self, mode: PauseMode) -> int:
        """Hold generation between two tokens."""
        self._is_paused = True
        return await self._require_engine().pause(mode)

    async def resume(self) -> int:
        """Go on."""
        self._is_paused = False
        if self._is_held:
            return 0
        return await self._require_engine().resume()

    async def _commit(self, request: CommitWeightsRequest) -> CommitWeightsResult:
        self._check_has_weights("swap weights")
        engine, inbox = self._require_engine(), self._require_inbox()
        try:
            continued = await inbox.commit(request, engine.load_weights)
        except FatalError:
            self._is_stale = self._is_held = True
            # Whatever it has begun must get no token of weights that are half old and half new.
            with contextlib.suppress(QuartetError):
                await engine.pause(PauseMode.ABORT)
            raise
        self._is_stale = False
        self.policy_version = request.policy_version
        metrics.POLICY_VERSION.set(self.policy_version)
        await self._let_go(engine)
        return CommitWeightsResult(
            policy_version=self.policy_version, completions_continued=continued
        )

    async def _fall_asleep(self, engine: Engine, level: int) -> None:
        # A drain under way would wait for ever on what a Pause holds. What a failed swap holds
        # waits for weights, here as well.
        if self._is_paused and not self._is_held:
            await engine.resume()
        self._is_held = True
        await engine.pause(PauseMode.DRAIN)
        await engine.sleep(level)
        self._forgotten = level >= 2

    async def _wake_up(self, engine: Engine, tags: set[str]) -> None:
        await engine.wake(tags)
        if "weights" in tags:
            self._is_stale = self._is_stale or self._forgotten
            self._forgotten = False
        self._asleep -= tags
        await self._let_go(engine)

    async def _let_go(self, engine: Engine) -> None:
        """Go on after a sleep or a failed swap, once the engine has its memory and its weights.

        Calls may have waited for their turn when it fell asleep: without weights they wait on.
        """
        if self._is_held and not self._asleep and not self._is_stale:
            self._is_held = False
            if not self._is_paused:
                await engine.resume()

    def _serving_engine(self) -> Engine:
        if self.state is ReplicaState.SERVING:
            return self._require_engine()
        if self.state is ReplicaState.DRAINING:
            raise UnavailableError(
                "the server is shutting down", reason="DRAINING", replica=self._replica
            )
        remedies = {
            ReplicaState.STARTING: "wait until health says SERVING",
            ReplicaState.STALE: "push the weights first",
            ReplicaState.ASLEEP: "call Wake first",
        }
        raise StateError(
            f"this replica is {self.state}",
            reason=f"REPLICA_{self.state.upper()}",
            remedy=remedies[self.state],
            replica=self._replica,
        )

    def _check_has_weights(self, what: str) -> None:
        if "weights" in self._asleep:
            raise StateError(
                f"a sleeping replica cannot {what}",
                reason="REPLICA_ASLEEP",
                remedy='call Wake with the tag "weights" first',
                replica=self._replica,
            )

    def _check_can_sleep(self, engine: Engine) -> None:
        if "sleep" not in engine.spec.capabilities:
            raise StateError(
                f"the engine {engine.spec.name} cannot sleep as it was started",
                reason="SLEEP_DISABLED",
                field="vllm.enable_sleep",
                remedy="start the service with --vllm.enable_sleep and an engine that can",
                replica=self._replica,
            )

    def _check_backend(self, engine: Engine, backend: PushBackend) -> None:
        offered = engine.spec.push_backends
        if backend not in offered:
            remedy = f"take --push.backend {' or '.join(offered)}"
            raise RequestError(
                f"the engine {engine.spec.name} takes no weights by {backend}",
                reason="WEIGHTS_BACKEND_UNSUPPORTED",
                field="backend",
                value=str(backend),
                remedy=remedy if offered else "its policy never changes; start one that takes some",
                replica=self._replica,
            )

    def _require_engine(self) -> Engine:
        if self._engine is None:
            raise StateError(
                "the engine is still loading",
                reason="REPLICA_STARTING",
                remedy="wait until health says SERVING",
                replica=self._replica,
            )
        return self._engine

    def _require_inbox(self) -> WeightInbox:
        self._require_engine()
        assert self._inbox is not None, "start makes it before the engine"
        return self._inbox


async def _finish(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, which goes on to its end if the caller is cancelled."""
    return await asyncio.shield(asyncio.ensure_future(work))
