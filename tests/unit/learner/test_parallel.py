"""Which rank works on what, and what is cut over tensor ranks."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from quartet_learner import tensor_parallel
from quartet_learner.optim import effective_zero_stage
from quartet_learner.parallel import RankLayout
from quartet_learner.settings import LearnerSettings
from transformers import AutoModelForCausalLM, Qwen3Config

from quartet.errors import ConfigError

TWO = LearnerSettings(model_name_or_path="m", tensor_parallel_size=2)


def test_alone_everything_is_a_share_of_its_own():
    layout = RankLayout(world_size=3)
    layout.check()
    assert [layout.data_rank(rank) for rank in range(3)] == [0, 1, 2]
    assert all(layout.leads(rank) for rank in range(3))
    assert (layout.data_size, layout.gradient_size) == (3, 3)


def test_tensor_ranks_are_neighbours_then_ring_ranks_then_data_ranks():
    layout = RankLayout(world_size=12, tensor_size=2, ring_size=3)
    layout.check()
    assert [layout.data_rank(rank) for rank in range(12)] == [0] * 6 + [1] * 6
    assert [layout.ring_rank(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [rank for rank in range(12) if layout.leads(rank)] == [0, 6]
    assert layout.rings() == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    # DeepSpeed averages a weight's gradient over all ranks that hold the same part of it.
    assert layout.gradient_size == 6


def test_ranks_that_cannot_be_grouped_are_refused():
    with pytest.raises(ConfigError) as caught:
        RankLayout(world_size=6, tensor_size=2, ring_size=2).check()
    assert caught.value.info.field == "learner.num_ranks"


def test_the_plan_of_transformers_becomes_one_of_deepspeed(tiny_model_dir):
    hf = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    section = tensor_parallel.deepspeed_section(hf, TWO)["tensor_parallel"]
    assert section["autotp_size"] == 2
    cut = {}
    for name, _ in hf.named_parameters():
        for spec in section["partition_config"]["layer_specs"]:
            if any(re.match(pattern, f"hf.{name}") for pattern in spec["patterns"]):
                cut[re.sub(r"model\.layers\.\d+\.", "", name)] = spec["partition_type"]
    assert cut == {
        "self_attn.q_proj.weight": "column",
        "self_attn.k_proj.weight": "column",
        "self_attn.v_proj.weight": "column",
        "self_attn.o_proj.weight": "row",
        "mlp.gate_proj.weight": "column",
        "mlp.up_proj.weight": "column",
        "mlp.down_proj.weight": "row",
    }
    assert tensor_parallel.deepspeed_section(hf, LearnerSettings(model_name_or_path="m")) == {}


def test_norms_over_heads_have_their_gradients_added_up():
    section = tensor_parallel.deepspeed_section(SimpleNamespace(config=Qwen3Config()), TWO)
    specs = section["tensor_parallel"]["partition_config"]["layer_specs"]
    summed = [spec for spec in specs if spec.get("grad_allreduce")]
    assert [spec["partition_type"] for spec in summed] == ["skip", "skip"]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 3},
        {"num_key_value_heads": 1},
        {"intermediate_size": 33},
        {"base_model_tp_plan": None},
        {"base_model_tp_plan": {"layers.*.mlp.experts.gate_up_proj": "packed_colwise"}},
    ],
)
def test_models_that_cannot_be_cut_are_refused(tiny_model_dir, changes):
    hf = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    tensor_parallel.check_model(hf, 2)
    for name, value in changes.items():
        setattr(hf.config, name, value)
    with pytest.raises(ConfigError) as caught:
        tensor_parallel.check_model(hf, 2)
    assert caught.value.info.field == "ds.tensor_parallel_size"


def test_a_cut_parameter_is_whole_inside_and_the_same_memory_after():
    parameter = torch.nn.Parameter(torch.arange(4.0))
    part = parameter.data
    plain = torch.nn.Parameter(torch.zeros(2))

    def gather(parameters: list[torch.nn.Parameter]) -> None:
        parameters[0].data = torch.arange(8.0)

    parameter.ds_is_replaced_module = True  # pyright: ignore[reportAttributeAccessIssue]
    parameter.gather_params = gather  # pyright: ignore[reportAttributeAccessIssue]
    with tensor_parallel.whole([parameter, plain]):
        assert parameter.shape == (8,)
    assert parameter.data_ptr() == part.data_ptr()
    part += 1.0  # As an optimizer does that holds the memory and not the parameter.
    assert parameter.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_gradient_in_parts_is_left_to_stage_1():
    assert effective_zero_stage(LearnerSettings(model_name_or_path="m")) == 0
    assert effective_zero_stage(TWO) == 1
