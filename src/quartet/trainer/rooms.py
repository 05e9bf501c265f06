"""What the loop asks of the services, in one place. `services.connect` makes the real one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quartet.agents.pool import AgentPool
from quartet.types import (
    ForwardOutput,
    ForwardResult,
    GenerateRequest,
    GenerateResult,
    LoadCheckpointResult,
    PauseMode,
    PushResult,
    RunSpec,
    ScoreBatch,
    ScoreRequest,
    SequenceBatch,
    StartRunResult,
    TrainResult,
    TrainSamples,
    TrainStep,
)


class Sampler(Protocol):
    """The rollout replicas."""

    catch_up: Callable[[str], Awaitable[None]] | None
    """Called with the address of a replica that lacks the weights of the last push: one that joins,
    that was started again, or that a push did not reach. It gets no calls until this returns."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Complete prompts on a replica that serves."""
        ...

    async def to_push_to(self) -> tuple[str, ...]:
        """Addresses of the replicas that can take weights now; waits until there is one."""
        ...

    def pushed(self, policy_version: int, result: PushResult) -> None:
        """Note who took a version. Calls go to those that have it, and the others catch up."""
        ...

    def has(self, address: str, policy_version: int) -> bool:
        """Whether a replica took a version in a push, as far as is known."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Hold generation on all replicas between two tokens; returns when it is held."""
        ...

    async def resume(self) -> None:
        """Go on after a pause; no harm where there was none."""
        ...

    async def sleep(self, level: int) -> None:
        """Give the devices' memory back: 1 keeps the weights in main memory, 2 forgets them."""
        ...

    async def wake(self, tags: Sequence[str] = ()) -> None:
        """Take it again, all or by tag: "weights", "kv_cache"."""
        ...


class Judge(Protocol):
    """The reward replicas."""

    async def score(self, request: ScoreRequest) -> ScoreBatch:
        """Score completions; each item gets a reward or a failure."""
        ...

    async def sleep(self) -> None:
        """Give the device's memory back until `wake`."""
        ...

    async def wake(self) -> None:
        """Take it again."""
        ...


class Reference(Protocol):
    """The reference model's replicas."""

    async def compute_logprobs(
        self, chunks: Sequence[SequenceBatch], *, temperature: float
    ) -> list[NDArray[np.float32]]:
        """[N] log-probabilities of each chunk's tokens."""
        ...

    async def sleep(self) -> None:
        """Give the device's memory back until `wake`."""
        ...

    async def wake(self) -> None:
        """Take it again."""
        ...


class Trainee(Protocol):
    """A learner: the policy or the critic."""

    async def start_run(self, spec: RunSpec) -> StartRunResult:
        """Build optimizer and schedule."""
        ...

    async def forward(
        self, chunks: Sequence[SequenceBatch], *, output: ForwardOutput, temperature: float = 1.0
    ) -> list[ForwardResult]:
        """Evaluate the model on each chunk."""
        ...

    async def train(self, step: TrainStep, samples: Sequence[TrainSamples]) -> TrainResult:
        """Take one optimizer step."""
        ...

    async def push_weights(
        self, *, request_id: str, policy_version: int, addresses: Sequence[str]
    ) -> PushResult:
        """Push the weights to rollout replicas."""
        ...

    async def export_model(
        self, *, request_id: str, folder: str, config_values: dict[str, float] | None = None
    ) -> str:
        """Write a folder that transformers opens; its path is returned."""
        ...

    async def save_checkpoint(
        self, *, request_id: str, folder: str, tag: str, trainer_state: bytes
    ) -> str:
        """Write a checkpoint; its path is returned."""
        ...

    async def load_checkpoint(self, *, folder: str, tag: str) -> LoadCheckpointResult:
        """Go on from a checkpoint; without a tag, from the latest whole one."""
        ...

    async def sleep(self) -> None:
        """Give the device's memory back until `wake`."""
        ...

    async def wake(self) -> None:
        """Take it again."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Players:
    """Everybody who takes part in a PPO run."""

    sampler: Sampler
    judge: Judge | None
    """None where an agent gives the rewards."""
    policy: Trainee
    reference: Reference | None = None
    """None when KL has no weight."""
    critic: Trainee | None = None
    """None for estimators without values."""
    policy_version: int = 0
    """The highest version that any of them has seen."""
    num_references: int = 1
    """Replicas of the reference model."""
    max_groups_in_flight: int = 64
    """Prompt groups that the rollout replicas take at once."""
    agents: AgentPool | None = None
    """Who makes the samples; None for single answers of the policy."""
    judge_wants_token_ids: bool = False
    judge_max_samples: int = 0
    """Most samples of a Score call; 0 is no limit."""
