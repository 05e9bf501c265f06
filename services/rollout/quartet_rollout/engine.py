"""What a rollout engine is to the rest of this room.

To add an engine: write a module with an `open_engine(config)` that follows `OpenEngine`, and add
one line to `engines/__init__.py`. Engines know nothing of gRPC, of replica states or of pushes:
they complete prompts, and take named tensors between two tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from quartet.errors import QuartetError
from quartet.types import (
    GenerateRequest,
    GroupCompletions,
    LogprobKind,
    PauseMode,
    PrepareWeightsRequest,
    PushBackend,
    WeightManifest,
)

if TYPE_CHECKING:
    import torch

    from quartet.config import RolloutServeConfig
    from quartet.weights import Landing


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """What an engine is, known once its model is loaded."""

    name: str
    """Name in the registry."""
    max_sequence_length: int
    """Most tokens of prompt and completion together."""
    max_num_sequences: int
    """Completions worked on at the same time; more wait."""
    manifest: WeightManifest
    """Tensors that a push must bring."""
    logprob_kinds: tuple[LogprobKind, ...]
    push_backends: tuple[PushBackend, ...]
    capabilities: tuple[str, ...]
    """Optional behaviour: "sleep", "isolated"."""
    device: str
    """Where the weights lie: "cpu" or "cuda:0"."""
    digest: str
    """Digest of the weights as loaded."""
    push_ranks: tuple[int, ...] = ()
    """Ranks that it takes in a group of each of `push_backends`; empty is one in each."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Generated:
    """What an engine made of one request."""

    groups: tuple[GroupCompletions, ...]
    """In the order of the request."""
    queue_seconds: float
    """Between the request and its first sampled token."""


class Engine(Protocol):
    """One model that completes prompts. All methods belong to one event loop."""

    @property
    def spec(self) -> EngineSpec:
        """What it is."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Completions running or waiting."""
        ...

    async def failed(self) -> QuartetError:
        """Wait until it can never complete anything again. Waits for ever where that is not so."""
        ...

    async def generate(self, request: GenerateRequest) -> Generated:
        """Complete all groups of a request; a cancelled call stops its completions at once.

        One sample that fails carries its failure and leaves the others alone.

        Raises:
            RequestError: A prompt does not fit (PROMPT_TOO_LONG) or names unknown tokens.
        """
        ...

    async def load_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> int:
        """Swap all weights between two tokens and drop every cache of the old ones.

        Works while paused and while running; whatever was running goes on with the new weights.

        Returns:
            Completions that go on.

        Raises:
            FatalError: The old weights are gone and the new ones are not whole.
        """
        ...

    async def pause(self, mode: PauseMode) -> int:
        """Hold generation between two tokens. Returns the completions held."""
        ...

    async def resume(self) -> int:
        """Go on. Returns the completions that do."""
        ...

    async def sleep(self, level: int) -> None:
        """Give the device's memory back: 1 keeps the weights in host memory, 2 forgets them."""
        ...

    async def wake(self, tags: Collection[str] = ("weights", "kv_cache")) -> None:
        """Take memory back: of the weights, of the caches, or of both.

        Never asked twice for the same between two sleeps. Generation stays paused. After level 2
        the weights are undefined until they are loaded, which may happen before the caches wake.
        """
        ...


@runtime_checkable
class TakesPushes(Protocol):
    """An engine that has a better place for a push than memory of this process.

    What its landing makes of the tensors is what its `load_weights` gets at the commit.
    """

    def landing(self, request: PrepareWeightsRequest) -> Landing:
        """The receiving end of one push."""
        ...


class OpenEngine(Protocol):
    """Loads an engine on entry, and lets go of it on exit."""

    def __call__(self, config: RolloutServeConfig) -> AbstractAsyncContextManager[Engine]:
        """Raise ConfigError for settings that this engine cannot serve."""
        ...
