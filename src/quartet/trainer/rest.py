"""Who is awake when, where models share devices: `--vllm.enable_sleep` and `--ds.enable_sleep`.

Phases are barriers then, and only who works in one has its memory:

    generate                rollout
    score, reference        reward, ref
    evaluate, train         learner, critic
    push                    learner, and the weights of rollout; its caches when learner sleeps
    evaluation of a policy  rollout, reward
    save                    learner, critic

At each change those who are not needed go to sleep before those who are needed wake up, so memory
never holds both. An engine that will be pushed to before it generates again forgets its weights
(level 2); otherwise it keeps them in main memory (level 1).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from quartet.config import PpoConfig
from quartet.trainer.rooms import Players

KEEP, FORGET = 1, 2
"""Levels of a rollout engine's sleep."""

LEARNERS = ("learner", "critic")
JUDGES = ("reward", "ref")


class Sleeper(Protocol):
    """A service that can give its device's memory back."""

    async def sleep(self) -> None:
        """Give it back."""
        ...

    async def wake(self) -> None:
        """Take it again."""
        ...


class SleepingEngine(Protocol):
    """The rollout replicas."""

    async def sleep(self, level: int) -> None:
        """Give memory back: 1 keeps the weights in main memory, 2 forgets them."""
        ...

    async def wake(self, tags: Sequence[str] = ()) -> None:
        """Take it again, all or by tag: "weights", "kv_cache"."""
        ...


class Rest:
    """Puts services to sleep and wakes them. Does nothing where none is to sleep."""

    def __init__(
        self,
        engine: SleepingEngine | None,
        sleepers: Mapping[str, Sleeper],
        *,
        left: Sequence[SleepingEngine | Sleeper] = (),
    ) -> None:
        """Know who sleeps; `start` comes first.

        Args:
            engine: The rollout replicas; None where they never sleep.
            sleepers: By role, those of the others that do.
            left: Those that do not in this run, but may have been left asleep by another.
        """
        self._engine = engine
        self._sleepers = sleepers
        self._left = left
        # Who knows what the last run left: the first phase tells everybody where to be.
        self._asleep = {role for role in LEARNERS if role in sleepers}
        self._lock = asyncio.Lock()
        self.push_follows = True
        """Whether the weights are pushed before anything is generated again."""
        self.weights_lost = False
        """Whether the engine has forgotten its weights and has not been pushed to since."""
        self.seconds = 0.0
        """Spent on going to sleep and waking up, so far."""

    @property
    def is_on(self) -> bool:
        """Whether anybody sleeps."""
        return self._engine is not None or bool(self._sleepers)

    async def start(self) -> None:
        """Have the learners awake, and nobody asleep for whom this run has no phases."""
        await _together(player.wake() for player in self._left)
        await self.learn()

    async def generate(self) -> None:
        """Have the engine awake, alone."""
        await self._shift("rollout")

    async def judge(self) -> None:
        """Have those awake who score and compare."""
        await self._shift(*JUDGES)

    async def learn(self) -> None:
        """Have the learners awake; the weights that the engine has may be gone."""
        await self._shift(*LEARNERS)

    async def save(self) -> None:
        """Have the learners awake, and the engine able to go on as it was."""
        self.push_follows = False
        await self._shift(*LEARNERS)

    async def evaluate(self) -> None:
        """Have those awake who complete and score prompts."""
        self.push_follows = False
        await self._shift("rollout", "reward")

    @asynccontextmanager
    async def pushing(self) -> AsyncGenerator[None]:
        """Hold the policy and the engine's weights in memory together, and as little as possible.

        Afterwards the engine is awake, alone.
        """
        async with self._lock, self._timed():
            await self._all_but("learner", "rollout")
            await self._wake("learner")
            await self._wake_engine("weights")
        yield
        self.weights_lost = False
        async with self._lock, self._timed():
            await self._all_but("rollout")
            await self._wake_engine("kv_cache")

    @asynccontextmanager
    async def learner_awake(self) -> AsyncGenerator[None]:
        """Wake the policy for a moment, whatever the phase: an engine came back empty."""
        async with self._lock:
            was_asleep = "learner" in self._asleep
            await self._wake("learner")
            yield
            if was_asleep:
                await self._sleep("learner")

    async def _shift(self, *roles: str) -> None:
        """Let these be awake, and nobody else."""
        async with self._lock, self._timed():
            await self._all_but(*roles)
            await _together(self._wake(role) for role in roles if role != "rollout")
            if "rollout" in roles:
                await self._wake_engine("weights", "kv_cache")

    async def _all_but(self, *roles: str) -> None:
        """Send the others to sleep."""
        if self._engine is not None and "rollout" not in roles and "rollout" not in self._asleep:
            level = FORGET if self.push_follows else KEEP
            await self._engine.sleep(level)
            self._asleep |= {"rollout", "weights", "kv_cache"}
            self.weights_lost = self.weights_lost or level == FORGET
        await _together(self._sleep(role) for role in self._sleepers if role not in roles)

    async def _sleep(self, role: str) -> None:
        if role in self._sleepers and role not in self._asleep:
            await self._sleepers[role].sleep()
            self._asleep.add(role)

    async def _wake(self, role: str) -> None:
        if role in self._asleep:
            await self._sleepers[role].wake()
            self._asleep.discard(role)

    async def _wake_engine(self, *tags: str) -> None:
        """Wake parts of the engine; it generates when all of them are awake."""
        wanted = [tag for tag in tags if tag in self._asleep]
        if self._engine is None or not wanted:
            return
        await self._engine.wake(wanted)
        self._asleep -= set(wanted)
        if not self._asleep & {"weights", "kv_cache"}:
            self._asleep.discard("rollout")

    @asynccontextmanager
    async def _timed(self) -> AsyncGenerator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began


async def _together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await all; the first failure ends the others."""
    async with asyncio.TaskGroup() as tasks:
        for one in work:
            tasks.create_task(one)


def rest_of(config: PpoConfig, players: Players) -> Rest:
    """Who sleeps between its phases, as the flags ask for it."""
    engine = players.sampler if config.vllm.enable_sleep else None
    found: dict[str, Sleeper | None] = {
        "learner": players.policy,
        "critic": players.critic,
        "ref": players.reference,
        # Functions and endpoints hold no memory of a device.
        "reward": None if config.reward.remote_url else players.judge,
    }
    models = {role: player for role, player in found.items() if player is not None}
    # Only what stands by itself can have been left asleep.
    stands = {
        "learner": config.learner.address,
        "critic": config.critic.address,
        "ref": config.ref.address,
        "reward": config.reward.address,
    }
    left: list[SleepingEngine | Sleeper] = []
    if engine is None and config.rollout.address:
        left.append(players.sampler)
    if not config.ds.enable_sleep:
        left += [player for role, player in models.items() if stands[role]]
    return Rest(engine, models if config.ds.enable_sleep else {}, left=left)
