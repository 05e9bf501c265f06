"""The room around a scripted engine: states, versions, and what is refused in which of them."""

import asyncio
import dataclasses
from contextlib import asynccontextmanager

import numpy as np
import pytest
from quartet_rollout.engine import EngineSpec, Generated
from quartet_rollout.room import RolloutRoom

from quartet.errors import (
    FatalError,
    InfraError,
    RequestError,
    StateError,
    UnavailableError,
)
from quartet.testing.push import CountingSource, LocalReplica, make_manifest, make_tensors
from quartet.types import (
    AbortWeightsRequest,
    Completion,
    GenerateRequest,
    GroupCompletions,
    LogprobKind,
    PauseMode,
    PrepareWeightsRequest,
    PromptGroup,
    PushBackend,
    Rendezvous,
    ReplicaState,
    VersionSpan,
    WakeRequest,
)
from quartet.weights import push_weights

MANIFEST = make_manifest()


class ScriptedEngine:
    """Answers at once, or when its gate opens, and notes what it is told."""

    spec = EngineSpec(
        name="scripted",
        max_sequence_length=100,
        max_num_sequences=4,
        manifest=MANIFEST,
        logprob_kinds=(LogprobKind.RAW,),
        push_backends=(PushBackend.GLOO,),
        capabilities=("sleep",),
        device="cpu",
        digest="d",
    )

    def __init__(self):
        self.told = []
        self.num_in_flight = 0
        self.weights = {}
        self.load_error = None
        self.loading = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(self, request):
        await self.gate.wait()
        completion = Completion(
            token_ids=np.array([1], np.int32),
            logprobs=np.zeros(1, np.float32),
            versions=(VersionSpan(policy_version=0, start=0, end=1),),
        )
        groups = [
            GroupCompletions(group_id=g.group_id, completions=(completion,)) for g in request.groups
        ]
        return Generated(groups=tuple(groups), queue_seconds=0.5)

    async def load_weights(self, tensors, policy_version):
        self.loading.set()
        await self.gate.wait()
        if self.load_error is not None:
            raise self.load_error
        self.weights = {name: t.clone() for name, t in tensors}
        return 2

    async def pause(self, mode):
        self.told.append(f"pause {mode}")
        return 3

    async def resume(self):
        self.told.append("resume")
        return 3

    async def sleep(self, level):
        self.told.append(f"sleep {level}")

    async def wake(self, tags):
        self.told.append(f"wake {' '.join(sorted(tags))}")


class RoomTarget(LocalReplica):
    """A push target that is a room."""

    def __init__(self, room):
        super().__init__()
        self.room = room

    async def prepare_weights(self, request, *, timeout=None):
        return await self.room.prepare(request)

    async def receive_weights(self, request, *, timeout=None):
        async for event in self.room.receive(request):
            yield event

    async def commit_weights(self, request, *, timeout=None):
        return await self.room.commit(request)

    async def abort_weights(self, request, *, timeout=None):
        return self.room.abort(request)


@pytest.fixture
def engine():
    return ScriptedEngine()


@pytest.fixture
def opened(engine):
    @asynccontextmanager
    async def open_engine():
        yield engine
        engine.told.append("closed")

    return open_engine


@pytest.fixture
async def room(opened):
    made = RolloutRoom(opened, replica="r1", model_name_or_path="m", fingerprint=lambda: "f")
    await made.start()
    yield made
    await made.stop()


def request(**rest):
    groups = (PromptGroup(group_id="g", prompt_token_ids=(1,)),)
    return GenerateRequest(request_id="x", groups=groups, **rest)


async def push(room, version=1, epoch=1):
    result = await push_weights(
        manifest=MANIFEST,
        tensors=CountingSource(MANIFEST, make_tensors(version)),
        replicas=[RoomTarget(room)],
        epoch=epoch,
        policy_version=version,
        backend=PushBackend.GLOO,
        group_timeout=3.0,
    )
    return result.replicas[0]


def reason_of(caught):
    return caught.value.info.reason


async def test_says_what_it_is(room):
    info = room.info(include_manifest=True)
    assert (info.state, info.engine, info.policy_version) == (ReplicaState.SERVING, "scripted", 0)
    assert info.manifest == MANIFEST
    assert info.info.tokenizer_fingerprint == "f"
    assert info.info.max_sequence_length == 100
    assert room.info(include_manifest=False).manifest is None


async def test_starting_answers_info_and_refuses_the_rest(opened):
    room = RolloutRoom(opened, replica="r1")
    assert room.info(include_manifest=True).state is ReplicaState.STARTING
    for call in (room.generate(request()), room.sleep(1), room.pause(PauseMode.KEEP)):
        with pytest.raises(StateError) as caught:
            await call
        assert reason_of(caught) == "REPLICA_STARTING"
    answer = room.abort(AbortWeightsRequest(epoch=1))
    assert answer.state is ReplicaState.STARTING
    await room.stop()


async def test_the_answer_names_distribution_and_replica(room):
    result = await room.generate(request(logprob_kind=LogprobKind.RAW))
    assert result.replica == "r1"
    assert result.logprob_spec.kind is LogprobKind.RAW
    assert result.queue_seconds == 0.5


async def test_a_push_changes_the_version(room, engine):
    with pytest.raises(StateError, match="version 0 serves, and at least 1") as caught:
        await room.generate(request(min_policy_version=1))
    assert reason_of(caught) == "POLICY_VERSION_TOO_OLD"
    assert (await push(room)).committed
    assert room.policy_version == 1
    assert all((engine.weights[n] == t).all() for n, t in make_tensors(1).items())
    await room.generate(request(min_policy_version=1))


async def test_a_torn_swap_is_stale_until_the_next_push(room, engine):
    engine.load_error = FatalError("half old and half new", reason="WEIGHTS_TORN")
    outcome = await push(room)
    assert (outcome.failed_phase, "half old" in outcome.error) == ("commit", True)
    assert room.state is ReplicaState.STALE
    assert room.policy_version == 0
    with pytest.raises(StateError) as caught:
        await room.generate(request())
    assert reason_of(caught) == "REPLICA_STALE"
    engine.load_error = None
    assert (await push(room, epoch=2)).committed
    assert room.state is ReplicaState.SERVING


async def test_a_swap_that_never_began_leaves_the_old_version_serving(room, engine):
    engine.load_error = InfraError("no engine thread")
    assert (await push(room)).failed_phase == "commit"
    assert room.state is ReplicaState.SERVING
    await room.generate(request())


async def test_sleep_waits_for_what_runs_refuses_calls_and_pushes(room, engine):
    assert await room.sleep(1) is ReplicaState.ASLEEP
    assert engine.told == ["pause drain", "sleep 1"]
    with pytest.raises(StateError) as caught:
        await room.generate(request())
    assert reason_of(caught) == "REPLICA_ASLEEP"
    assert "sleeping replica cannot take weights" in (await push(room)).error
    assert await room.wake(WakeRequest(request_id="w", tags=("weights",))) is ReplicaState.ASLEEP
    assert (await push(room, epoch=2)).committed
    assert await room.wake(WakeRequest(request_id="w", tags=("kv_cache",))) is ReplicaState.SERVING
    assert engine.told[2:] == ["wake weights", "wake kv_cache", "resume"]
    await room.generate(request())


async def test_forgotten_weights_are_stale_after_waking(room, engine):
    await room.sleep(2)
    assert await room.wake(WakeRequest(request_id="w")) is ReplicaState.STALE
    with pytest.raises(StateError) as caught:
        await room.generate(request())
    assert reason_of(caught) == "REPLICA_STALE"
    assert await room.resume() == 0
    # Calls may wait inside the engine: it must not go on with weights that mean nothing.
    assert engine.told == ["pause drain", "sleep 2", "wake kv_cache weights"]
    assert (await push(room)).committed
    assert room.state is ReplicaState.SERVING
    assert engine.told[3:] == ["resume"]


async def test_a_push_comes_before_the_caches_take_their_memory(room, engine):
    await room.sleep(2)
    await room.wake(WakeRequest(request_id="w", tags=("weights",)))
    assert (await push(room)).committed
    assert (room.state, room.policy_version) == (ReplicaState.ASLEEP, 1)
    with pytest.raises(StateError) as caught:
        await room.generate(request())
    assert reason_of(caught) == "REPLICA_ASLEEP"
    assert "resume" not in engine.told
    assert await room.wake(WakeRequest(request_id="w", tags=("kv_cache",))) is ReplicaState.SERVING
    assert engine.told[2:] == ["wake weights", "wake kv_cache", "resume"]


async def test_after_a_torn_swap_the_engine_ends_what_it_began_and_waits(room, engine):
    engine.load_error = FatalError("half old and half new", reason="WEIGHTS_TORN")
    await push(room)
    assert engine.told == ["pause abort"]
    assert await room.resume() == 0
    engine.load_error = None
    await push(room, epoch=2)
    assert engine.told == ["pause abort", "resume"]


async def test_orders_that_change_nothing_are_no_error(room, engine):
    assert await room.wake(WakeRequest(request_id="w")) is ReplicaState.SERVING
    await room.sleep(1)
    await room.sleep(1)
    assert engine.told == ["pause drain", "sleep 1"]


async def test_a_pause_outlives_a_sleep(room, engine):
    assert await room.pause(PauseMode.KEEP) == 3
    await room.sleep(1)
    assert await room.wake(WakeRequest(request_id="w")) is ReplicaState.SERVING
    assert engine.told[1] == "resume"  # to let the drain end
    assert engine.told[-1] == "wake kv_cache weights"
    assert await room.resume() == 3


async def test_no_sleep_in_the_middle_of_a_push(room, engine):
    engine.gate.clear()
    pushing = asyncio.ensure_future(push(room))
    await engine.loading.wait()
    with pytest.raises(StateError) as caught:
        await room.sleep(1)
    assert reason_of(caught) == "PUSH_UNDER_WAY"
    engine.gate.set()
    assert (await pushing).committed


async def test_a_sleep_that_the_engine_cannot_have_pauses_nothing(room, engine, monkeypatch):
    monkeypatch.setattr(engine, "spec", dataclasses.replace(engine.spec, capabilities=()))
    with pytest.raises(StateError) as refused:
        await room.sleep(1)
    assert refused.value.info.reason == "SLEEP_DISABLED"
    assert room.state is ReplicaState.SERVING
    assert engine.told == []


@pytest.mark.parametrize("offered", [(), (PushBackend.FILE,)])
async def test_a_push_by_other_ways_than_the_engines_is_refused(room, engine, monkeypatch, offered):
    monkeypatch.setattr(engine, "spec", dataclasses.replace(engine.spec, push_backends=offered))
    request = PrepareWeightsRequest(
        request_id="r",
        epoch=1,
        policy_version=1,
        manifest=MANIFEST,
        backend=PushBackend.GLOO,
        rendezvous=Rendezvous(),
        rank=1,
        world_size=2,
        group_timeout=1.0,
    )
    with pytest.raises(RequestError, match="scripted takes no weights by gloo") as refused:
        await room.prepare(request)
    assert refused.value.info.reason == "WEIGHTS_BACKEND_UNSUPPORTED"
    assert all(f"--push.backend {name}" in refused.value.info.remedy for name in offered)
    assert room.state is ReplicaState.SERVING


async def test_draining_is_unavailable_so_that_callers_go_elsewhere(room):
    await room.stop()
    assert room.state is ReplicaState.DRAINING
    with pytest.raises(UnavailableError):
        await room.generate(request())
