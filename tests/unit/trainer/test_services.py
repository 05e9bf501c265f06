"""The trainer against services on loopback: the loop, and every way in which one does not fit."""

import asyncio
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from quartet.clients import RefClient, RewardClient
from quartet.config import LearnerConfig, SftConfig
from quartet.errors import ConfigError, InfraError, UnavailableError
from quartet.testing.fakes import FakeLearner, FakeRef, FakeReward, FakeRollout
from quartet.testing.loopback import loopback
from quartet.trainer.launch import serve_command
from quartet.trainer.ppo_loop import PpoLoop
from quartet.trainer.run import first_cause
from quartet.trainer.services import _wait_all, connect_learner, connect_ppo, local_services
from quartet.types import Head, SequenceBatch, ServerInfo, TensorSpec, WeightManifest
from tests.unit.trainer.players import Cast, inputs, ppo_config

FINGERPRINT = "f" * 64


def info(service, **changes):
    fields = {"service": service, "replica": f"{service}-0", "tokenizer_fingerprint": FINGERPRINT}
    return ServerInfo(**(fields | changes))


def manifest(*names, shape=(2, 2), dtype="float32"):
    return WeightManifest(
        tensors=tuple(TensorSpec(name=n, dtype=dtype, shape=shape) for n in names)
    )


class Band:
    """Fake services on loopback. Replace one, then `connect`."""

    def __init__(self):
        weights = manifest("model.a", "model.b")
        self.learner = FakeLearner(Head.LM, info("learner"), weights)
        self.critic = FakeLearner(Head.VALUE, info("learner"))
        self.rollout = FakeRollout(info("rollout"), weights)
        self.ref = FakeRef(info("ref"))
        self.reward = FakeReward(info=info("reward"))
        self.cast = Cast()

    async def serve(self, stack):
        """Addresses by role."""
        roles = ("learner", "critic", "rollout", "ref", "reward")
        return {r: await stack.enter_async_context(loopback(getattr(self, r))) for r in roles}

    def config(self, addresses, **sections):
        merged = {role: {"address": address} for role, address in addresses.items()}
        merged["algo"] = {"advantage": {"estimator": "gae"}, "kl": {"init_coef": 0.01}}
        merged["launch"] = {"connect_timeout": 60.0}
        merged["rollout"] |= {"batch_size": 4, "n_samples_per_prompt": 2, "max_new_tokens": 8}
        for name, values in sections.items():
            merged[name] = merged.get(name, {}) | values
        return ppo_config(**merged)

    async def play(self, folder, *, steps=True, **sections):
        async with AsyncExitStack() as stack:
            config = self.config(await self.serve(stack), **sections)
            run = self.cast.run(config, folder)
            stack.push_async_callback(run.ledger.close)
            stack.callback(run.progress.close)
            players = await connect_ppo(config, run, stack, fingerprint=FINGERPRINT)
            if steps:
                await PpoLoop(config, run, inputs(8), players).run()
            return players


@pytest.fixture
def band():
    return Band()


async def test_loop_over_the_wire(band, tmp_path):
    await band.play(tmp_path)
    first, second = band.cast.metrics
    # Nothing has moved before the first update; then the policy has, and its reference has not.
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["kl"] == pytest.approx(0.01 * 2, abs=1e-5)
    # After every push the engine samples from the policy as it is.
    assert first["rollout_logprob_gap"] == pytest.approx(0.0, abs=1e-6)
    assert second["rollout_logprob_gap"] == pytest.approx(0.0, abs=1e-6)
    assert len(band.learner.trained) == len(band.critic.trained) == 4
    assert band.rollout.policy_version == 3


async def test_temperature_reaches_every_model(band, tmp_path):
    rollout = {"batch_size": 4, "n_samples_per_prompt": 2, "max_new_tokens": 8, "temperature": 0.7}
    await band.play(tmp_path, rollout=rollout)
    assert band.cast.metrics[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert band.cast.metrics[0]["rollout_logprob_gap"] == pytest.approx(0.0, abs=1e-6)
    assert band.learner.trained[0][0].loss.temperature == 0.7


async def test_versions_go_on_where_used_services_stand(band, tmp_path):
    band.rollout.policy_version = 41
    players = await band.play(tmp_path)
    assert players.policy_version == 41
    assert band.rollout.policy_version == 44
    assert band.cast.metrics[0]["policy_version"] == 1.0


class Restarting(FakeRollout):
    """Loses its weights before the second step, as a service that somebody starts again."""

    restarts = 0

    async def Generate(self, request, context):
        if self.policy_version == 2 and not self.restarts:
            self.restarts += 1
            self.policy_version = self.weights = 0
        return await super().Generate(request, context)


async def test_an_addressed_rollout_that_was_started_again_is_caught_up(band, tmp_path):
    band.rollout = Restarting(info("rollout"), band.rollout.manifest)
    await band.play(tmp_path)
    assert band.rollout.restarts == 1
    # Twice trained; the push in between carried the version that was there.
    assert band.rollout.policy_version == 3
    gaps = [m["rollout_logprob_gap"] for m in band.cast.metrics]
    assert gaps == pytest.approx([0, 0], abs=1e-6)


async def test_a_rollout_that_stays_behind_ends_the_run(band, tmp_path):
    band.rollout = Restarting(info("rollout"), band.rollout.manifest)
    band.rollout.script.fail("CommitWeights", InfraError("no room"), after=2)
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - looked at below
        await band.play(tmp_path, launch={"connect_timeout": 2.0})
    text = str(first_cause(caught.value))
    assert "no rollout service for" in text
    assert "does not have version 2: commit failed, no room" in text


class Growing(FakeRollout):
    """Has `change` called when it is asked for the second step, before it answers."""

    change = None

    async def Generate(self, request, context):
        if self.policy_version == 2 and self.change is not None:
            change, self.change = self.change, None
            await change()
        return await super().Generate(request, context)


@pytest.fixture
async def listed(band, tmp_path, monkeypatch):
    """Plays a run whose replicas of a role are those of a file; `list` changes it."""
    monkeypatch.setattr("quartet.clients.members._REREAD_SECONDS", 0.02)
    async with AsyncExitStack() as stack:
        yield Listed(band, tmp_path, stack)


class Listed:
    def __init__(self, band, folder, stack):
        self.band, self.folder, self.stack = band, folder, stack
        self.said = []

    async def serve(self, fake):
        return await self.stack.enter_async_context(loopback(fake))

    def list(self, role, *addresses):
        (self.folder / role).write_text("".join(f"{a}\n" for a in addresses))

    async def play(self, role, **sections):
        band = self.band
        addresses = await band.serve(self.stack)
        self.list(role, addresses[role])
        self.first = addresses[role]
        config = band.config(addresses | {role: f"file://{self.folder / role}"}, **sections)
        run = band.cast.run(config, self.folder)
        self.stack.push_async_callback(run.ledger.close)
        self.stack.callback(run.progress.close)
        run.progress.say = self.said.append
        self.players = await connect_ppo(config, run, self.stack, fingerprint=FINGERPRINT)
        await PpoLoop(config, run, inputs(8), self.players).run()
        return await run.ledger.counts()

    async def until_said(self, text):
        async with asyncio.timeout(60):
            while not any(text in line for line in self.said):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)


async def test_a_rollout_that_joins_has_the_weights_before_its_first_token(band, listed):
    band.rollout = Growing(info("rollout"), band.rollout.manifest)
    # It was pushed to by another run: a higher version is no sign of the right weights.
    other = FakeRollout(info("rollout", replica="new"), band.rollout.manifest)
    other.policy_version = other.weights = 40

    async def change():
        address = await listed.serve(other)
        listed.list("rollout", address)
        # The first is off the list, and its calls end; later ones go to the other.
        await listed.until_said("is off the list")
        async with asyncio.timeout(60):
            await other.script.until(lambda: other.policy_version == 2)

    band.rollout.change = change
    rollout = {"batch_size": 4, "n_samples_per_prompt": 2, "max_new_tokens": 1024}
    counts = await listed.play("rollout", rollout=rollout | {"max_groups_in_flight": 1})
    assert counts == {"trained": 16}
    assert other.script.count("Generate") > 0
    asked = [c.request.min_policy_version for c in other.script.calls if c.method == "Generate"]
    assert set(asked) == {2}
    methods = [c.method for c in other.script.calls]
    assert methods.index("CommitWeights") < methods.index("Generate")
    gaps = [m["rollout_logprob_gap"] for m in band.cast.metrics]
    assert gaps == pytest.approx([0, 0], abs=1e-6)
    # The push after the second step went to those who are on the list.
    assert (band.rollout.policy_version, other.policy_version) == (2, 3)


async def test_a_rollout_that_joins_and_does_not_fit_is_left_out(band, listed):
    band.rollout = Growing(info("rollout"), band.rollout.manifest)
    other = FakeRollout(info("rollout"), manifest("model.a"))

    async def change():
        listed.list("rollout", listed.first, await listed.serve(other))
        await listed.until_said("is left out")

    band.rollout.change = change
    assert await listed.play("rollout") == {"trained": 16}
    (line,) = [line for line in listed.said if "is left out" in line]
    assert "holds another model than the policy" in line
    assert {"CommitWeights", "Generate"}.isdisjoint(c.method for c in other.script.calls)


async def test_a_push_that_misses_a_replica_is_made_up_for_by_one_to_it_alone(band, listed):
    other = FakeRollout(info("rollout", replica="other"), band.rollout.manifest)
    other.script.fail("CommitWeights", InfraError("no room"), after=1, times=1)
    address = await listed.serve(other)
    serve = band.serve

    async def both(stack):
        addresses = await serve(stack)
        addresses["rollout"] += f",{address}"
        return addresses

    band.serve = both
    assert await listed.play("reward") == {"trained": 16}
    assert any(f"{address} does not have version 2: commit failed" in s for s in listed.said)
    pushes = [c.request for c in band.learner.script.calls if c.method == "PushWeights"]
    assert [(p.policy_version, len(p.addresses)) for p in pushes] == [
        (1, 2),
        (2, 2),
        (2, 1),
        (3, 2),
    ]
    assert pushes[2].addresses == (address,)
    assert (band.rollout.policy_version, other.policy_version) == (3, 3)


async def test_rewards_are_replaced_one_by_one(band, listed):
    band.rollout = Growing(info("rollout"), band.rollout.manifest)
    unfit = FakeReward(info=info("reward"))
    unfit.info = replace(unfit.info, max_samples_per_call=1)
    other = FakeReward(info=info("reward"))

    async def change():
        listed.list("reward", await listed.serve(unfit), await listed.serve(other))
        await listed.until_said("is left out")

    band.rollout.change = change
    assert await listed.play("reward") == {"trained": 16}
    assert "takes 1 samples a call, and calls may have any number" in " ".join(listed.said)
    assert band.reward.script.count("Score") > 0
    assert other.script.count("Score") > 0
    assert unfit.script.count("Score") == 0


async def test_a_list_without_anybody_is_named(band, listed):
    nobody = {"address": f"file://{listed.folder / 'nobody'}"}
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - looked at below
        await listed.play("ref", ref=nobody)
    assert "nobody cannot be read: No such file" in str(first_cause(caught.value))
    listed.list("nobody")
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - looked at below
        await listed.play("ref", ref=nobody, launch={"connect_timeout": 3.0})
    text = str(first_cause(caught.value))
    assert "no ref service at file://" in text
    assert "the list of addresses is empty" in text


async def fails(band, folder, **sections):
    """The one line that a user would see."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - looked at below
        await band.play(folder, steps=False, **sections)
    error = first_cause(caught.value)
    assert isinstance(error, ConfigError)
    assert "\n" not in str(error)
    return str(error)


async def test_nobody_listens(band, tmp_path, unused_port):
    short = {"connect_timeout": 3.0}
    ref = {"address": f"127.0.0.1:{unused_port}"}
    text = await fails(band, tmp_path, ref=ref, launch=short)
    assert f"no ref service at 127.0.0.1:{unused_port} after 3." in text


@pytest.fixture
async def unused_port():
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port


async def test_a_service_that_is_gone_is_waited_for_aloud(band, tmp_path):
    said = []
    async with AsyncExitStack() as stack:
        addresses = await band.serve(stack)
        gone = await stack.enter_async_context(AsyncExitStack())
        addresses["ref"] = await gone.enter_async_context(loopback(FakeRef(info("ref"))))
        config = band.config(addresses, launch={"connect_timeout": 3.0})
        run = band.cast.run(config, tmp_path)
        stack.push_async_callback(run.ledger.close)
        stack.callback(run.progress.close)
        run.progress.say = said.append
        players = await connect_ppo(config, run, stack, fingerprint=FINGERPRINT)
        await gone.aclose()
        with pytest.raises(UnavailableError) as caught:
            await players.reference.compute_logprobs([SequenceBatch.of([[1, 2]])], temperature=1.0)
    assert any(line.startswith(f"waiting for ref at {addresses['ref']} (") for line in said)
    assert "(start it again and begin anew; " in str(caught.value)
    assert "--launch.connect_timeout, now 3, sets" in str(caught.value)


async def test_connecting_names_whoever_is_missing(band, tmp_path, unused_port):
    shown = []

    class Phase:
        waiting_for = ""

        def advance(self):
            """Nobody counts here."""

        def __setattr__(self, name, value):
            shown.append(value)

    gone = f"127.0.0.1:{unused_port}"
    async with AsyncExitStack() as stack:
        there = await stack.enter_async_context(loopback(band.reward))
        waits = []
        for role, client_class, address in (
            ("ref", RefClient, gone),
            ("reward", RewardClient, there),
        ):
            client = await stack.enter_async_context(client_class(address))
            waits.append((f"{role} at {address}", partial(client.wait_ready, 0.5)))
        with pytest.raises(BaseExceptionGroup):
            await _wait_all(waits, 0.5, Phase())
    assert shown == [
        f"ref at {gone}, reward at {there}, at most 0.5 s",
        f"ref at {gone}, at most 0.5 s",
    ]


async def test_service_of_the_wrong_kind(band, tmp_path):
    band.ref = FakeReward(info=info("reward"))
    assert "is no ref service" in await fails(band, tmp_path)


async def test_wrong_head(band, tmp_path):
    band.critic = FakeLearner(Head.LM, info("learner"))
    assert "has the head lm, needed is value" in await fails(band, tmp_path)


@pytest.mark.parametrize("role", ["learner", "critic", "rollout", "ref"])
async def test_other_tokenizer(band, tmp_path, role):
    service = getattr(band, role)
    other = replace(info(service.name), tokenizer_fingerprint="0" * 64, model_name_or_path="/m")
    if role == "ref":
        band.ref = FakeRef(other)
    else:
        service.server_info = other
    text = await fails(band, tmp_path)
    assert f"the {role} service at 127.0.0.1:" in text
    assert "another tokenizer than the policy (fingerprint 000000000000" in text
    assert "its model is /m" in text


async def test_reward_that_reads_tokens_needs_the_same_tokenizer(band, tmp_path):
    band.reward.info = replace(
        band.reward.info, info=info("reward", tokenizer_fingerprint=""), needs_token_ids=True
    )
    assert "fingerprint none" in await fails(band, tmp_path)


async def test_reward_that_reads_text_needs_no_tokenizer(band, tmp_path):
    band.reward.info = replace(band.reward.info, info=info("reward", tokenizer_fingerprint=""))
    players = await band.play(tmp_path, steps=False)
    assert not players.judge_wants_token_ids


async def test_reward_with_the_policys_tokenizer_gets_its_tokens(band, tmp_path):
    players = await band.play(tmp_path, steps=False)
    assert players.judge_wants_token_ids


async def test_context_that_is_too_short(band, tmp_path):
    band.rollout.server_info = info("rollout", max_sequence_length=16)
    text = await fails(band, tmp_path)
    assert "takes 16 tokens, but sequences may have 32 (lower --data.max_len to 16)" in text


async def test_other_api_version(band, tmp_path):
    band.rollout.server_info = info("rollout", api_version="v2")
    assert "speaks v2, this trainer v1" in await fails(band, tmp_path)


async def test_other_tensor_names(band, tmp_path):
    band.rollout.manifest = manifest("model.a", "lm_head.c")
    text = await fails(band, tmp_path)
    assert "it wants but would not get lm_head.c" in text
    assert "it would get but does not know model.b" in text


async def test_other_shapes(band, tmp_path):
    band.rollout.manifest = manifest("model.a", "model.b", shape=(3, 2))
    assert "in another shape it would get model.a, model.b" in await fails(band, tmp_path)


async def test_other_data_types(band, tmp_path):
    band.rollout.manifest = manifest("model.a", "model.b", dtype="bfloat16")
    text = await fails(band, tmp_path)
    assert "holds model.a, model.b as bfloat16, the learner as float32" in text
    assert "(start it with --ds.param_dtype fp32, as the learner)" in text


async def test_sft_learner_with_a_reward_head(band, tmp_path):
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(loopback(FakeLearner(Head.REWARD)))
        config = replace(SftConfig(), learner=LearnerConfig(address=address))
        run = band.cast.run(config, tmp_path)
        stack.push_async_callback(run.ledger.close)
        stack.callback(run.progress.close)
        with pytest.raises(ConfigError, match="has the head reward, needed is lm"):
            await connect_learner(config, run, stack, head=Head.LM, fingerprint=FINGERPRINT)


def test_only_services_without_an_address_are_started():
    config = ppo_config(rollout={"address": "h1:1,h2:2"}, learner={"address": "h3:3"})
    services = {s.role: s for s in local_services(config)}
    assert set(services) == {"ref", "reward"}
    assert services["ref"].max_restarts == 3
    # Without a GPU each process gets one thread: there are several.
    if services["ref"].env.get("CUDA_VISIBLE_DEVICES") == "":
        assert services["ref"].env["OMP_NUM_THREADS"] == "1"


def test_the_rollout_service_alone_runs_in_another_python():
    config = ppo_config(rollout={"python": "other/bin/python"})
    services = {s.role: s for s in local_services(config)}
    assert {role for role, s in services.items() if s.python != sys.executable} == {"rollout"}
    command = serve_command(services["rollout"], Path("a.yaml"), Path("ready"))
    assert command[0] == "other/bin/python"


def test_each_engine_asks_its_own_server_with_a_key_that_no_file_holds():
    config = ppo_config(
        rollout={
            "engine": "openai",
            "server_url": "http://a:1,http://b:2",
            "server_key": "the-key",
        },
        vllm={"num_engines": 2},
    )
    services = {s.role: s for s in local_services(config)}
    assert "server_url: http://a:1" in services["rollout-0"].settings
    assert "server_url: http://b:2" in services["rollout-1"].settings
    assert not any("the-key" in s.settings for s in services.values())
    keyed = {role for role, s in services.items() if "the-key" in s.env.values()}
    assert keyed == {"rollout-0", "rollout-1"}
    assert services["rollout-0"].env["QUARTET_ROLLOUT__SERVER_KEY"] == "the-key"


def test_gae_starts_a_critic_with_a_value_head():
    config = ppo_config(algo={"advantage": {"estimator": "gae"}})
    services = {s.role: s for s in local_services(config)}
    assert set(services) == {"learner", "critic", "rollout", "ref", "reward"}
    assert services["critic"].room == "learner"
    assert "head: value" in services["critic"].settings
    # A learner that dies takes its run with it: nothing else has its optimizer's state.
    assert services["learner"].max_restarts == services["critic"].max_restarts == 0


def test_no_kl_no_reference():
    config = ppo_config(algo={"advantage": {"estimator": "group_norm"}, "kl": {"init_coef": 0.0}})
    assert "ref" not in {s.role for s in local_services(config)}
