"""What DeepSpeed is told, and the optimizer that lives in main memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quartet_learner import engine as engine_module
from quartet_learner import optim
from quartet_learner.optim import deepspeed_config, effective_zero_stage
from quartet_learner.settings import LearnerSettings

from quartet.types import OptimizerConfig, RunSpec, ScheduleConfig

from .conftest import weights_of
from .test_checkpoint import run_steps

SPEC = RunSpec(run_id="r", optimizer=OptimizerConfig(), schedule=ScheduleConfig())


def settings_of(**changes) -> LearnerSettings:
    return LearnerSettings(model_name_or_path="x", **changes)


def offload_here(monkeypatch) -> None:
    """As if there were a GPU to offload from."""
    for module in (optim, engine_module):
        monkeypatch.setattr(module, "offloads", lambda settings: settings.adam_offload)


def test_without_a_gpu_offloading_changes_nothing_and_says_so(make_engine, caplog):
    plain = run_steps(make_engine(zero_stage=2), 0, 2)
    with caplog.at_level("WARNING"):
        engine = make_engine(zero_stage=2, adam_offload=True)
    assert "ds.adam_offload changes nothing here" in caplog.text
    assert run_steps(engine, 0, 2) == plain
    assert effective_zero_stage(settings_of(adam_offload=True)) == 0


def test_offloading_puts_states_in_main_memory_at_every_stage(monkeypatch):
    offload_here(monkeypatch)
    for stage, given in ((0, 1), (1, 1), (2, 2), (3, 3)):
        config = deepspeed_config(settings_of(zero_stage=stage, adam_offload=True), SPEC)
        assert config["zero_optimization"]["stage"] == given
        assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    plain = deepspeed_config(settings_of(zero_stage=2), SPEC)
    assert "offload_optimizer" not in plain["zero_optimization"]


def test_a_first_build_is_announced(monkeypatch, tmp_path, caplog):
    import deepspeed.ops.adam
    import torch.utils.cpp_extension

    built = []
    monkeypatch.setattr(torch.utils.cpp_extension, "get_default_build_root", lambda: str(tmp_path))
    monkeypatch.setattr(
        deepspeed.ops.adam, "DeepSpeedCPUAdam", lambda groups, **options: built.append(options)
    )
    offload_here(monkeypatch)
    model = torch.nn.Linear(2, 2)
    with caplog.at_level("WARNING"):
        optim.build_optimizer(model, OptimizerConfig(lr=0.5), settings_of(adam_offload=True))
    assert "compiling DeepSpeed's AdamW" in caplog.text
    assert str(tmp_path) in caplog.text
    assert built[0]["lr"] == 0.5
    assert built[0]["adamw_mode"]
    caplog.clear()
    there = tmp_path / "py311_cpu" / "cpu_adam" / "cpu_adam.so"
    there.parent.mkdir(parents=True)
    there.write_bytes(b"")
    optim.build_optimizer(model, OptimizerConfig(), settings_of(adam_offload=True))
    assert not caplog.text


@pytest.fixture
def compiled_adam(monkeypatch) -> None:
    """DeepSpeed's operator as it was compiled once; torch would build it anew for less."""
    from deepspeed.ops.op_builder import CPUAdamBuilder
    from torch.utils import cpp_extension

    found = sorted(Path(cpp_extension.get_default_build_root()).glob("*/cpu_adam/cpu_adam.so"))
    if not found:
        pytest.skip("DeepSpeed's AdamW for the CPU is not compiled here")
    operator = cpp_extension._import_module_from_library("cpu_adam", str(found[0].parent), True)
    monkeypatch.setattr(CPUAdamBuilder, "load", lambda _, verbose=False: operator)


@pytest.mark.usefixtures("compiled_adam")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_offloaded_adam_is_torchs(make_engine, monkeypatch, stage):
    options = {"lr": 1e-3, "weight_decay": 0.1, "zero_stage": stage}
    plain = make_engine(**options)
    expected = run_steps(plain, 0, 3)
    offload_here(monkeypatch)
    offloaded = make_engine(adam_offload=True, **options)
    for got, wanted in zip(run_steps(offloaded, 0, 3), expected, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)
    for name, weight in weights_of(plain).items():
        torch.testing.assert_close(weights_of(offloaded)[name], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_gradients_add_up_in_fp32(make_engine, stage):
    config = deepspeed_config(settings_of(zero_stage=stage, param_dtype="bfloat16"), SPEC)
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["zero_optimization"]["stage"] == max(stage, 2)
    # A rate whose steps are far below bf16's: the fp32 weights move all the same.
    engine = make_engine(zero_stage=stage, param_dtype="bfloat16", lr=1e-6)
    optimizer = engine.run.deepspeed.optimizer
    groups = (
        optimizer.fp32_partitioned_groups_flat
        if stage == 3
        else optimizer.single_partition_of_fp32_groups
    )
    before = [group.detach().clone() for group in groups]
    run_steps(engine, 0, 2)
    for group, start in zip(groups, before, strict=True):
        moved = (group.detach() - start).abs()
        assert 1e-7 < moved.median() < 3e-6


def test_what_gradients_add_up_in_can_be_chosen():
    chosen = settings_of(zero_stage=1, param_dtype="bfloat16", grad_accum_dtype="bf16")
    config = deepspeed_config(chosen, SPEC)
    assert config["data_types"] == {"grad_accum_dtype": "bf16"}
    assert config["zero_optimization"]["stage"] == 1
    assert "data_types" not in deepspeed_config(settings_of(), SPEC)


@pytest.mark.parametrize(
    "name", ["cosine", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "cosine_with_restarts"]
)
def test_no_cosine_rises_again_behind_its_end(name):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    config = ScheduleConfig(name=name, total_steps=4, warmup_ratio=0.0, min_lr_ratio=0.1)
    schedule = optim.build_schedule(optimizer, config)
    rates = []
    for _ in range(10):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[:5] == sorted(rates[:5], reverse=True)
    assert rates[5:] == [rates[4]] * 5
    assert rates[4] < 0.2
