from __future__ import annotations

from quartet.config import DpoConfig, PpoConfig, SftConfig
from quartet.config.load import build, load
from quartet.config.machine import Machine
from quartet.config.placement import gpus_needed, places

CPU, EIGHT = Machine(), Machine(num_gpus=8, has_vllm=True)


def ppo(**values: object) -> PpoConfig:
    small = {f"{role}.num_gpus_per_node": 1 for role in ("actor", "critic", "ref", "reward")}
    named = {name.replace("__", "."): value for name, value in values.items()}
    return build(PpoConfig, small | {"reward.model_name_or_path": "r"} | named, {})


def where(config: PpoConfig, machine: Machine) -> dict[str, tuple[int, ...]]:
    return {place.name: place.gpus for place in places(config, machine)}


def test_on_the_cpu_every_role_is_one_process():
    found = where(ppo(vllm__num_engines=2), CPU)
    assert list(found) == ["learner", "critic", "ref", "reward", "rollout-0", "rollout-1"]
    assert set(found.values()) == {()}
    assert gpus_needed(ppo(), CPU) == 0


def test_no_role_without_a_use():
    critic_free = {"algo__advantage__estimator": "reinforce"}
    assert "critic" not in where(ppo(**critic_free), CPU)
    assert "ref" not in where(ppo(algo__kl__init_coef=0.0), CPU)


def test_apart():
    config = ppo(vllm__num_engines=2, vllm__tensor_parallel_size=2)
    assert where(config, EIGHT) == {
        "learner": (0,),
        "critic": (1,),
        "ref": (2,),
        "reward": (3,),
        "rollout-0": (4, 5),
        "rollout-1": (6, 7),
    }
    assert gpus_needed(config, EIGHT) == 8


def test_pairs_share():
    config = ppo(train__colocate_actor_ref=True, train__colocate_critic_reward=True)
    found = where(config, EIGHT)
    assert found["ref"] == found["learner"] == (0,)
    assert found["reward"] == found["critic"] == (1,)
    assert found["rollout"] == (2,)


def test_rules_need_no_gpu():
    config = ppo(reward__model_name_or_path=None, reward__remote_url="x.py")
    assert where(config, EIGHT)["reward"] == ()
    assert gpus_needed(config, EIGHT) == 4


def test_the_seeds_line(seed_line: list[str]):
    config = load(PpoConfig, seed_line, environ={}).config
    found = where(config, EIGHT)
    assert found["learner"] == found["critic"] == tuple(range(8))
    assert [found[f"rollout-{i}"] for i in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [found[f"ref-{i}"] for i in range(8)] == [(i,) for i in range(8)]
    assert gpus_needed(config, EIGHT) == 8


def test_given_addresses_are_not_started():
    config = ppo(rollout__address="h1:1,h2:2", learner__address="h3:3", reward__address="h4:4")
    found = {place.name: place for place in places(config, EIGHT)}
    assert found["rollout-0"].address == "h1:1"
    assert found["rollout-1"].address == "h2:2"
    assert found["learner"].address == "h3:3"
    assert found["learner"].gpus == ()
    assert (found["critic"].gpus, found["ref"].gpus) == ((0,), (1,))


def test_offline():
    (learner,) = places(SftConfig(), EIGHT)
    assert (learner.ranks, learner.gpus) == (8, tuple(range(8)))
    two = build(DpoConfig, {"learner.num_ranks": 2}, {})
    assert [(p.name, p.gpus) for p in places(two, EIGHT)] == [("learner", (0, 1)), ("ref", (0,))]
    assert [(p.name, p.gpus) for p in places(two, CPU)] == [("learner", ()), ("ref", ())]
