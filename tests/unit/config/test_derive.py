from __future__ import annotations

import pytest

from quartet.config import PpoConfig, SftConfig
from quartet.config.derive import (
    attention,
    batch_sizes,
    clip_band,
    correction_band,
    critic_model,
    forward_token_budget,
    groups_in_flight,
    num_engines,
    num_ranks,
    optimizer_steps_per_rollout,
    push_backend,
    rollout_engine,
    split_list,
    train_token_budget,
)
from quartet.config.load import build
from quartet.config.machine import Machine, this_machine

CPU = Machine()
EIGHT = Machine(num_gpus=8, has_vllm=True, has_flash_attention=True)


def ppo(**values: object) -> PpoConfig:
    return build(PpoConfig, {name.replace("__", "."): v for name, v in values.items()}, {})


@pytest.mark.parametrize(
    ("text", "parts"), [(None, ()), ("", ()), ("a", ("a",)), (" a , b,", ("a", "b"))]
)
def test_split_list(text: str | None, parts: tuple[str, ...]):
    assert split_list(text) == parts


def test_clip_band():
    assert clip_band(ppo(actor__eps_clip=0.1).actor) == (0.1, 0.1)
    assert clip_band(ppo(actor__eps_clip_low_high=(0.2, 0.28)).actor) == (0.2, 0.28)


def test_correction_band():
    name = "algo__advantage__is_correction_threshold"
    assert correction_band(ppo(**{name: (0.5, 2.0)}).algo.advantage) == (0.5, 2.0)
    assert correction_band(ppo(**{name: (2.0,)}).algo.advantage) == (0.0, 2.0)


def test_the_critic_starts_from_what_is_closest_to_a_value():
    policy = {"actor__model_name_or_path": "p"}
    assert critic_model(ppo(**policy)) == "p"
    assert critic_model(ppo(**policy, reward__model_name_or_path="r")) == "r"
    given = ppo(**policy, reward__model_name_or_path="r", critic__model_name_or_path="c")
    assert critic_model(given) == "c"


def test_ranks():
    assert num_ranks(ppo(), CPU) == 1
    assert num_ranks(ppo(learner__num_ranks=2), CPU) == 2
    assert num_ranks(ppo(actor__num_nodes=2), EIGHT) == 16
    assert num_ranks(ppo(critic__num_gpus_per_node=4), EIGHT, "critic") == 4
    assert num_ranks(SftConfig(), CPU) == 1
    assert num_ranks(SftConfig(), EIGHT) == 8


def test_engines():
    assert num_engines(ppo()) == 1
    assert num_engines(ppo(vllm__num_engines=3)) == 3
    assert rollout_engine("auto", CPU) == "transformers"
    assert rollout_engine("auto", Machine(num_gpus=1)) == "transformers"
    assert rollout_engine("auto", EIGHT) == "vllm"
    assert rollout_engine("auto", Machine(has_vllm=True)) == "vllm"
    assert rollout_engine("transformers", EIGHT) == "transformers"
    assert rollout_engine("vllm", CPU) == "vllm"


def test_attention_without_a_gpu():
    assert attention("flash_attention_2", CPU) == "sdpa"
    assert attention("eager", CPU) == "eager"
    assert attention("flash_attention_2", EIGHT) == "flash_attention_2"


@pytest.mark.parametrize(
    ("samples", "batch", "sizes"), [(8, 4, [4, 4]), (9, 4, [4, 4, 1]), (3, 4, [3]), (0, 4, [])]
)
def test_no_sample_is_left_out(samples: int, batch: int, sizes: list[int]):
    assert batch_sizes(samples, batch) == sizes


def test_optimizer_steps():
    config = ppo(rollout__batch_size=5, rollout__n_samples_per_prompt=2, train__batch_size=4)
    assert optimizer_steps_per_rollout(config) == 3
    twice = ppo(rollout__batch_size=4, train__batch_size=4, train__max_epochs=2)
    assert optimizer_steps_per_rollout(twice) == 2


def test_budgets():
    assert train_token_budget(ppo()) is None
    assert forward_token_budget(ppo(rollout__micro_batch_size=3, data__max_len=10)) == 30
    dynamic = {"train__dynamic_batch_enable": True, "train__max_tokens_per_gpu": 5000}
    assert train_token_budget(ppo(**dynamic)) == 5000
    assert forward_token_budget(ppo(**dynamic)) == 5000
    assert forward_token_budget(ppo(**dynamic, rollout__max_tokens_per_gpu=7000)) == 7000


def test_groups_in_flight():
    assert groups_in_flight(ppo()) is None
    assert groups_in_flight(ppo(rollout__vllm_generate_batch_size=8)) == 8
    both = ppo(rollout__vllm_generate_batch_size=8, rollout__max_groups_in_flight=4)
    assert groups_in_flight(both) == 4


@pytest.mark.parametrize(
    ("values", "machine", "backend"),
    [
        ({}, CPU, "gloo"),
        ({}, EIGHT, "nccl"),
        ({"train__colocate_all": True}, EIGHT, "ipc"),
        ({"train__colocate_all": True, "vllm__num_engines": 8}, EIGHT, "gloo"),
        ({"train__colocate_all": True, "vllm__tensor_parallel_size": 2}, EIGHT, "gloo"),
        ({"train__colocate_all": True, "train__async_enable": True}, EIGHT, "nccl"),
        ({"train__colocate_all": True}, CPU, "gloo"),
        ({"train__colocate_all": True, "rollout__address": "h:1"}, EIGHT, "nccl"),
        ({"vllm__sync_backend": "gloo"}, EIGHT, "gloo"),
        ({"push__backend": "file", "vllm__sync_backend": "gloo"}, EIGHT, "file"),
        ({"learner__address": "h:1"}, CPU, "auto"),
    ],
)
def test_push_backend(values: dict[str, object], machine: Machine, backend: str):
    chosen, why = push_backend(ppo(**values), machine)
    assert chosen == backend
    assert why


def test_hidden_gpus_are_not_there():
    assert this_machine({"CUDA_VISIBLE_DEVICES": ""}).num_gpus == 0
    assert this_machine({"CUDA_VISIBLE_DEVICES": "-1"}).num_gpus == 0


def test_the_engine_is_looked_for_where_it_would_run(tmp_path):
    python = tmp_path / "python"
    for code, has_vllm in ((0, True), (1, False)):
        python.write_text(f"#!/bin/sh\nexit {code}\n")
        python.chmod(0o755)
        assert this_machine({}, engine_python=str(python)).has_vllm is has_vllm
    assert not this_machine({}, engine_python=str(tmp_path / "none")).has_vllm
