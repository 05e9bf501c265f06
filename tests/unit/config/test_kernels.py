"""Kernels that need a GPU or a package are refused before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quartet.config import LearnerServeConfig, RefServeConfig, SftConfig
from quartet.config.kernels import kernel_obstacles
from quartet.config.load import build
from quartet.config.machine import Machine
from quartet.config.runnable import obstacles

CPU = Machine()
FULL = Machine(
    num_gpus=8,
    has_flash_attention=True,
    has_flash_attention_3=True,
    has_ring_attention=True,
    has_liger=True,
)
FP32 = {"ds.param_dtype": "fp32"}
FLASH_3 = {"ds.attn_implementation": "flash_attention_3"}
RING = {"ds.ring_attn_size": 2, "ds.packing_samples": True}


def found(values: dict[str, object], machine: Machine, cls: type = LearnerServeConfig) -> list[str]:
    return [error.info.field for error in kernel_obstacles(build(cls, values, {}).ds, machine)]


@pytest.mark.parametrize(
    ("values", "machine", "fields"),
    [
        ({}, CPU, []),
        ({}, FULL, []),
        (FP32, CPU, []),
        (FP32, FULL, ["ds.attn_implementation"]),
        (FP32, replace(FULL, has_flash_attention=False), []),
        (FP32 | {"ds.attn_implementation": "sdpa"}, FULL, []),
        (FLASH_3, CPU, []),
        (FLASH_3, FULL, []),
        (FLASH_3, replace(FULL, has_flash_attention_3=False), ["ds.attn_implementation"]),
        (FLASH_3 | FP32, FULL, ["ds.attn_implementation"]),
        ({"ds.use_liger_kernel": True}, CPU, ["ds.use_liger_kernel"]),
        ({"ds.use_liger_kernel": True}, replace(FULL, has_liger=False), ["ds.use_liger_kernel"]),
        ({"ds.use_liger_kernel": True}, FULL, []),
        ({"ds.deepcompile": True}, CPU, ["ds.deepcompile"]),
        ({"ds.deepcompile": True}, FULL, []),
        (RING, CPU, []),
        (RING, FULL, []),
        (RING, replace(FULL, has_ring_attention=False), ["ds.ring_attn_size"]),
        (
            RING | {"ds.attn_implementation": "sdpa"},
            replace(FULL, has_ring_attention=False),
            [],
        ),
    ],
)
def test_what_a_learner_needs(values, machine, fields):
    assert found(values, machine) == fields


def test_services_that_only_read_need_flash_attention_too():
    assert found(FP32, FULL, RefServeConfig) == ["ds.attn_implementation"]


def test_every_refusal_says_what_to_do():
    values = {"ds.use_liger_kernel": True, "ds.deepcompile": True}
    refused = list(kernel_obstacles(build(LearnerServeConfig, values, {}).ds, CPU))
    assert [bool(error.info.remedy) for error in refused] == [True, True]


def test_a_learner_elsewhere_is_not_asked():
    values = {"ds.deepcompile": True, "learner.address": "there:1"}
    assert list(obstacles(build(SftConfig, values, {}), CPU)) == []


def test_ranks_that_this_machine_would_have_fit_the_groups():
    values = {"ds.tensor_parallel_size": 2}
    assert [e.info.field for e in obstacles(build(SftConfig, values, {}), CPU)] == [
        "learner.num_ranks"
    ]
    assert list(obstacles(build(SftConfig, values | {"learner.num_ranks": 4}, {}), CPU)) == []
