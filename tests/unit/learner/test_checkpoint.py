"""Checkpoints: an exact continuation, or a clear refusal."""

from __future__ import annotations

import json

import pytest
import torch
from quartet_learner import checkpoint, files
from quartet_learner.engine import LearnerEngine
from quartet_learner.settings import LearnerSettings

from quartet.errors import InfraError, RequestError
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
    torn = next((tmp_path / "c").glob("*model_states.pt"))
    torn.write_bytes(torn.read_bytes()[:-1])
    assert checkpoint.resolve(tmp_path, "") == "b"
    with pytest.raises(RequestError, match=r"damaged: .*model_states"):
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


def test_a_checkpoint_of_two_ranks_names_the_flag(make_engine, tmp_path):
    save(make_engine(), tmp_path, "a")
    facts = tmp_path / "a" / checkpoint.FACTS
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "world_size": 2}))
    with pytest.raises(RequestError) as caught:
        checkpoint.describe(tmp_path, "a", world_size=1)
    assert "--learner.num_ranks 2" in caught.value.info.remedy
