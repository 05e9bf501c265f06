"""Checkpoints: an exact continuation, or a clear refusal."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from quartet_learner import checkpoint, files, fragments
from quartet_learner.engine import LearnerEngine
from quartet_learner.parallel import RankLayout
from quartet_learner.settings import LearnerSettings
from safetensors.torch import load_file, save_file

from quartet.errors import InfraError, RequestError, StateError
from quartet.types import ScheduleConfig, SftLoss
from quartet.types.requests import LoadCheckpointRequest, SaveCheckpointRequest

from .conftest import weights_of
from .steps import make_samples, step_of


def save(engine, folder, tag, trainer_state=b""):
    return engine.save_checkpoint(
        SaveCheckpointRequest(
            request_id="s", folder=str(folder), tag=tag, trainer_state=trainer_state
        )
    )


def load(engine, folder, tag=""):
    found = checkpoint.resolve(folder, tag)
    return engine.load_checkpoint(
        LoadCheckpointRequest(request_id="l", folder=str(folder), tag=found)
    )


def run_steps(engine, first, count):
    out = []
    for number in range(first, first + count):
        result = engine.train(
            step_of(SftLoss(), number, micro_batch_size=3), make_samples(seed=number)
        )
        out.append((result.metrics["gpt_loss"], result.grad_norm, result.lr))
    return out


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "float32"), (2, "float32"), (3, "float32"), (2, "bfloat16")]
)
def test_a_continued_run_is_bit_for_bit_the_undisturbed_one(
    make_engine, tiny_model_dir, group, tmp_path, stage, dtype
):
    schedule = ScheduleConfig(name="cosine_with_min_lr", total_steps=8, warmup_ratio=0.2)
    engine = make_engine(zero_stage=stage, param_dtype=dtype, lr=5e-3, schedule=schedule)
    run_steps(engine, 0, 3)
    saved = save(engine, tmp_path, "step3", b"\x00trainer")
    assert saved.path == str(tmp_path / "step3")
    assert saved.size_bytes > 100_000
    torch_draw = torch.rand(1)
    expected = run_steps(engine, 3, 3)

    torch.manual_seed(999)
    other = LearnerEngine(
        LearnerSettings(
            model_name_or_path=str(tiny_model_dir), zero_stage=stage, param_dtype=dtype
        ),
        group,
    )
    loaded = load(other, tmp_path)
    assert (loaded.tag, loaded.optimizer_steps) == ("step3", 3)
    assert (loaded.run_id, loaded.trainer_state) == ("run", b"\x00trainer")
    assert torch.equal(torch.rand(1), torch_draw)
    assert run_steps(other, 3, 3) == expected
    for name, weight in weights_of(engine).items():
        assert torch.equal(weight, weights_of(other)[name]), name


def test_a_run_goes_back_to_its_own_checkpoint(make_engine, tmp_path):
    engine = make_engine(lr=5e-3)
    run_steps(engine, 0, 1)
    save(engine, tmp_path, "one")
    expected = run_steps(engine, 1, 2)
    assert load(engine, tmp_path, "one").optimizer_steps == 1
    assert run_steps(engine, 1, 2) == expected
    assert engine.start_run(engine.run.spec).resumed


def test_latest_is_the_newest_whole_one(make_engine, tmp_path):
    engine = make_engine()
    for tag in ("a", "b", "c"):
        save(engine, tmp_path, tag)
    assert (tmp_path / "latest").read_text() == "c"
    assert checkpoint.resolve(tmp_path, "") == "c"
    torn = next((tmp_path / "c").glob("state_0_*.safetensors"))
    torn.write_bytes(torn.read_bytes()[:-1])
    assert checkpoint.resolve(tmp_path, "") == "b"
    with pytest.raises(RequestError, match=r"damaged: state_0_0"):
        checkpoint.resolve(tmp_path, "c")
    flipped = tmp_path / "b" / "trainer_state.bin"
    flipped.write_bytes(b"x")
    assert checkpoint.resolve(tmp_path, "") == "a"
    (tmp_path / "latest").write_text("")
    assert checkpoint.resolve(tmp_path, "") == "a"


def test_a_save_that_died_leaves_the_last_one_in_force(make_engine, tmp_path, monkeypatch):
    engine = make_engine()
    save(engine, tmp_path, "good")

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "put_in_place", full_disk)
    with pytest.raises(InfraError, match="No space left"):
        save(engine, tmp_path, "bad")
    monkeypatch.undo()
    assert checkpoint.resolve(tmp_path, "") == "good"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good", "latest"]
    # What a killed process left behind does not disturb the next attempt.
    (tmp_path / ".bad.tmp" / "bad").mkdir(parents=True)
    (tmp_path / ".bad.tmp" / "bad" / "junk").write_text("half")
    save(engine, tmp_path, "bad")
    assert not (tmp_path / "bad" / "junk").exists()


def test_the_same_step_of_the_same_run_replaces_its_checkpoint(make_engine, tmp_path):
    # A run that is killed between the policy's save and the critic's comes by a second time.
    engine = make_engine()
    run_steps(engine, 0, 1)
    save(engine, tmp_path, "before")
    run_steps(engine, 1, 1)
    save(engine, tmp_path, "a", b"first")
    load(engine, tmp_path, "before")
    run_steps(engine, 1, 1)
    save(engine, tmp_path, "a", b"second")
    assert load(engine, tmp_path, "a").trainer_state == b"second"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "before", "latest"]


def test_a_tag_of_another_step_or_run_is_refused(make_engine, tmp_path):
    engine = make_engine()
    save(engine, tmp_path, "a")
    run_steps(engine, 0, 1)
    with pytest.raises(RequestError, match="there is a checkpoint a"):
        save(engine, tmp_path, "a")
    facts = json.loads((tmp_path / "a" / checkpoint.FACTS).read_text())
    facts |= {"run_id": "another", "optimizer_steps": 1}
    (tmp_path / "a" / checkpoint.FACTS).write_text(json.dumps(facts))
    with pytest.raises(RequestError, match="there is a checkpoint a"):
        save(engine, tmp_path, "a")


def test_no_checkpoint(tmp_path):
    with pytest.raises(RequestError, match="no whole checkpoint"):
        checkpoint.resolve(tmp_path / "nowhere", "")
    with pytest.raises(RequestError, match="no checkpoint x"):
        checkpoint.resolve(tmp_path, "x")


def test_another_zero_stage_goes_on(make_engine, tiny_model_dir, group, tmp_path, caplog):
    schedule = ScheduleConfig(name="cosine_with_min_lr", total_steps=9, warmup_ratio=0.2)
    for saved_by, loaded_by in ((0, 1), (1, 3), (3, 2), (2, 0)):
        folder = tmp_path / str(saved_by)
        engine = make_engine(zero_stage=saved_by, lr=5e-3, schedule=schedule, ema_beta=0.5)
        run_steps(engine, 0, 3)
        save(engine, folder, "step3")
        expected = run_steps(engine, 3, 3)
        other = LearnerEngine(
            LearnerSettings(model_name_or_path=str(tiny_model_dir), zero_stage=loaded_by), group
        )
        with caplog.at_level("INFO"):
            assert load(other, folder).optimizer_steps == 3
        assert f"1 ranks with ZeRO stage {saved_by}; going on with 1 and {loaded_by}" in caplog.text
        for got, wanted in zip(run_steps(other, 3, 3), expected, strict=True):
            assert got == pytest.approx(wanted, rel=1e-6)
        for name, average in engine.run.average.values.items():
            torch.testing.assert_close(other.run.average.values[name], average, rtol=0, atol=1e-6)


def test_16_bit_weights_go_on_from_their_fp32_ones(make_engine, tmp_path):
    # A rate this small does not show in bf16 within six steps: it is the fp32 weights that count.
    engine = make_engine(zero_stage=1, param_dtype="bfloat16", lr=1e-5)
    run_steps(engine, 0, 3)
    save(engine, tmp_path, "a")
    run_steps(engine, 3, 3)
    other = make_engine(zero_stage=3, param_dtype="bfloat16", run_id="other")
    load(other, tmp_path, "a")
    run_steps(other, 3, 3)
    save(engine, tmp_path / "stays", "b")
    save(other, tmp_path / "moved", "b")
    stays, moved = (fragments_of(tmp_path / name / "b") for name in ("stays", "moved"))
    for key, values in stays.items():
        torch.testing.assert_close(moved[key], values, rtol=1e-4, atol=1e-7)


def fragments_of(folder):
    found = {}
    for file in folder.glob("state_*.safetensors"):
        found.update(load_file(file))
    return found


def test_another_model_is_refused_by_its_first_parameter(make_engine, tmp_path):
    engine = make_engine()
    save(engine, tmp_path, "lm")
    stored = checkpoint.describe(tmp_path, "lm")
    checkpoint.check_fits(stored, engine.model, engine.group)
    critic = make_engine(head="value")
    with pytest.raises(RequestError, match=r"score\.weight has no place there and shape \[1, "):
        checkpoint.check_fits(stored, critic.model, critic.group)
    save(critic, tmp_path, "critic")
    with pytest.raises(RequestError, match=r"score\.weight has shape .* there and no place here"):
        checkpoint.check_fits(checkpoint.describe(tmp_path, "critic"), engine.model, engine.group)
    name = "model.layers.0.mlp.up_proj.weight"
    facts = json.loads((tmp_path / "lm" / checkpoint.FACTS).read_text())
    facts["parameters"][name][0] += 1
    (tmp_path / "lm" / checkpoint.FACTS).write_text(json.dumps(facts))
    with pytest.raises(RequestError, match=name) as caught:
        checkpoint.check_fits(checkpoint.describe(tmp_path, "lm"), engine.model, engine.group)
    assert caught.value.info.reason == "CHECKPOINT_OF_OTHER_MODEL"


def test_matrices_spread_over_other_ranks_are_refused_by_the_flag(make_engine, tmp_path):
    engine = make_engine()
    save(engine, tmp_path, "a")
    spread = replace(engine.group, layout=RankLayout(world_size=2, tensor_size=2))
    with pytest.raises(RequestError, match="spread over 1 ranks") as caught:
        checkpoint.check_fits(checkpoint.describe(tmp_path, "a"), engine.model, spread)
    assert caught.value.info.field == "ds.tensor_parallel_size"
    # What such ranks write says which part of a matrix it is.
    save_spread = checkpoint.Moment(
        model=engine.model,
        deepspeed=engine.run.deepspeed,
        spec=engine.run.spec,
        optimizer_steps=0,
        average=None,
    )
    checkpoint.save(save_spread, replace(spread, world_size=1), tmp_path, "b", b"")
    stored = checkpoint.describe(tmp_path, "b")
    assert all(name.endswith("@0/2") for name in stored.shapes)
    checkpoint.check_fits(stored, engine.model, spread)


def test_what_no_rank_wrote_is_named(make_engine, tmp_path):
    engine = make_engine(ema_beta=0.9)
    run_steps(engine, 0, 1)
    save(engine, tmp_path, "a")
    (tmp_path / "a" / "ema.safetensors").unlink()
    with pytest.raises(RequestError, match=r"lacks ema\.safetensors"):
        checkpoint.check_fits(checkpoint.describe(tmp_path, "a"), engine.model, engine.group)
    file = tmp_path / "a" / "state_0_0.safetensors"
    tensors = load_file(file)
    key = next(k for k in tensors if k.startswith("exp_avg_sq|0|"))
    tensors[key] = tensors[key][:-1].clone()
    save_file(tensors, file)
    with pytest.raises(RequestError, match=key.split("|")[2] + r" \(exp_avg_sq\)"):
        checkpoint.check_fits(checkpoint.describe(tmp_path, "a"), engine.model, engine.group)


def test_a_load_that_fails_half_way_leaves_no_run(make_engine, tmp_path, monkeypatch):
    engine = make_engine()
    run_steps(engine, 0, 2)
    save(engine, tmp_path, "a")
    original = fragments.Place.write

    def worn_disk(place, values, part):
        if place.name.startswith("model.norm"):
            raise OSError(5, "Input/output error")
        original(place, values, part)

    monkeypatch.setattr(fragments.Place, "write", worn_disk)
    with pytest.raises(InfraError, match=r"loading checkpoint a failed: .*Input/output"):
        load(engine, tmp_path)
    monkeypatch.undo()
    with pytest.raises(StateError, match="no run is under way; checkpoint a could not be loaded"):
        engine.started()
    assert load(engine, tmp_path).optimizer_steps == 2


def test_a_checkpoint_of_another_release_says_so(make_engine, tmp_path):
    save(make_engine(), tmp_path, "a")
    facts = json.loads((tmp_path / "a" / checkpoint.FACTS).read_text())
    del facts["format"]
    (tmp_path / "a" / checkpoint.FACTS).write_text(json.dumps(facts))
    with pytest.raises(RequestError, match="has format 1, this release reads 2"):
        checkpoint.describe(tmp_path, "a")


class Killed(BaseException):
    """What nobody catches."""


WRITES = {
    "states": (fragments, "save_file"),
    "random state": (checkpoint, "save_file"),
    "inventory": (files, "inventory"),
    "making it durable": (files, "sync"),
    "the name": (files, "put_in_place"),
    "the pointer": (files, "write_atomically"),
}


@pytest.mark.parametrize("at", WRITES)
def test_a_full_disk_at_any_write_leaves_the_last_one_in_force(
    make_engine, tmp_path, monkeypatch, at
):
    engine = make_engine()
    save(engine, tmp_path, "good")

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*WRITES[at], full_disk)
    with pytest.raises(InfraError, match="No space left"):
        save(engine, tmp_path, "bad")
    monkeypatch.undo()
    assert (tmp_path / "latest").read_text() == "good"
    assert load(engine, tmp_path).tag == "good"
    assert not list(tmp_path.glob(".*"))
    save(engine, tmp_path, "bad")
    assert checkpoint.resolve(tmp_path, "") == "bad"


@pytest.mark.parametrize("at", WRITES)
def test_a_kill_at_any_write_leaves_a_whole_one(make_engine, tmp_path, monkeypatch, at):
    engine = make_engine()
    save(engine, tmp_path, "good")

    def killed(*_, **__):
        raise Killed

    monkeypatch.setattr(*WRITES[at], killed)
    # A process that is gone cleans nothing up.
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(Killed):
        save(engine, tmp_path, "next")
    monkeypatch.undo()
    assert load(engine, tmp_path).tag == "good"
    save(engine, tmp_path, "next")
    assert not list(tmp_path.glob(".*"))
    assert load(engine, tmp_path).tag == "next"


def test_a_kill_while_a_checkpoint_is_replaced_leaves_an_older_one(
    make_engine, tmp_path, monkeypatch
):
    engine = make_engine()
    save(engine, tmp_path, "older")
    save(engine, tmp_path, "a")
    rename, calls = type(tmp_path).rename, []

    def killed_between(path, target):
        calls.append(path.name)
        if len(calls) == 2:
            raise Killed
        return rename(path, target)

    monkeypatch.setattr(type(tmp_path), "rename", killed_between)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(Killed):
        save(engine, tmp_path, "a")
    monkeypatch.undo()
    assert (tmp_path / "latest").read_text() == "a"
    assert checkpoint.resolve(tmp_path, "") == "older"
    save(engine, tmp_path, "a")
    assert checkpoint.resolve(tmp_path, "") == "a"
    assert not list(tmp_path.glob(".*"))
