"""However the work is cut, over 1, 2 or 3 ranks of any ZeRO stage: the same numbers.

Each world of ranks is started once and does all its jobs (rank_jobs.py).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("rank_jobs.py")
STAGES_OF = {2: (0, 3), 3: (0, 1, 2, 3)}
"""The stages at which a world of so many ranks computes gradients."""
SAVED = ((1, 0), (2, 2), (2, 3))
"""Ranks and stage that write a checkpoint."""
RESUMED = {
    1: ((0, (2, 2)), (1, (2, 3)), (3, (2, 3))),
    2: ((1, (1, 0)), (3, (1, 0)), (3, (2, 2)), (0, (2, 3))),
    3: ((2, (2, 3)), (3, (2, 2)), (1, (1, 0))),
}
"""By ranks: the stage that goes on, and who wrote."""


@pytest.fixture(scope="module")
def jobs() -> Any:
    spec = importlib.util.spec_from_file_location("rank_jobs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def alone() -> Any:
    """This process as a learner's only rank."""
    import torch.distributed as dist
    from quartet_learner.group import join_group

    return join_group(dist.HashStore(), 0, 1)


async def run_ranks(world: int, work: list[dict], model: Path, folder: Path) -> Path:
    """Start `world` processes for `work`; the folder with what they found."""
    results = folder / f"results_{world}"
    results.mkdir()
    order = results / "order.json"
    store = str(results / "store")
    order.write_text(
        json.dumps({"store": store, "jobs": work, "model": str(model), "results": str(results)})
    )
    log = (results / "log").open("wb")
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, str(SCRIPT), str(order)),
            env={
                **os.environ,
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"},
            },
            stdout=log,
            stderr=log,
        )
        for rank in range(world)
    ]
    try:
        codes = await asyncio.gather(*(process.wait() for process in processes))
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
        log.close()
    assert codes == [0] * world, (results / "log").read_text()[-4000:]
    return results


@pytest.fixture(scope="module")
def found(jobs, alone, tiny_model_dir, tmp_path_factory) -> dict[str, Any]:
    """Everything that all worlds found: gradients by world and stage, steps by who did them."""
    folder = tmp_path_factory.mktemp("worlds")
    model = str(tiny_model_dir)

    def saved_by(shape: tuple[int, int]) -> str:
        return str(folder / f"{shape[0]}x{shape[1]}")

    experts = mixture_of_experts(folder / "experts")
    out: dict[str, Any] = {
        "expected": {},
        "got": {},
        "gradients": {},
        "balance": {(1, 0): jobs.balance(experts, alone, 0)},
        "muon": {(1, 0): jobs.muon(model, alone, 0)},
    }
    for world, stage in SAVED[:1]:
        where = Path(saved_by((world, stage)))
        out["expected"][world, stage] = jobs.save(model, alone, stage, where)
    out["gradients"][1, 0] = jobs.gradients(model, alone, 0)
    for world in (2, 3):
        work: list[dict[str, Any]] = []
        meaning: list[tuple[str, Any]] = []
        for stage in [s for w, s in SAVED if w == world]:
            work.append({"do": "save", "stage": stage, "folder": saved_by((world, stage))})
            meaning.append(("expected", (world, stage)))
        for stage, by in RESUMED[world]:
            work.append({"do": "resume", "stage": stage, "folder": saved_by(by)})
            meaning.append(("got", (by, (world, stage))))
        for stage in STAGES_OF[world]:
            work.append({"do": "gradients", "stage": stage})
            meaning.append(("gradients", (world, stage)))
        if world == 2:
            work.append({"do": "balance", "stage": 2, "model": experts})
            meaning.append(("balance", (world, 2)))
            work.append({"do": "muon", "stage": 0})
            meaning.append(("muon", (world, 0)))
        results = asyncio.run(run_ranks(world, work, tiny_model_dir, folder))
        for number, (kind, key) in enumerate(meaning):
            answer = json.loads((results / f"{number}.json").read_text())
            if (results / f"{number}.npz").exists():
                vectors = np.load(results / f"{number}.npz")
                answer = {cut: (vectors[cut], metrics) for cut, metrics in answer.items()}
            out[kind][key] = answer
    out["folder"] = saved_by
    for stage, by in RESUMED[1]:
        out["got"][by, (1, stage)] = jobs.resume(model, alone, stage, Path(saved_by(by)))
    return out


def mixture_of_experts(folder: Path) -> str:
    """A tiny Mixtral of four experts, two of which each token takes."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        MixtralForCausalLM(config).save_pretrained(folder)
    return str(folder)


def test_the_balance_loss_does_not_depend_on_the_cut(found):
    for name, (gradient, metrics) in found["balance"][2, 2].items():
        expected, logged = found["balance"][1, 0]["even" if name == "one each" else name]
        off = np.linalg.norm(gradient - expected) / np.linalg.norm(expected)
        assert off <= 2e-6, (name, off)
        assert metrics == pytest.approx(logged, rel=2e-6, abs=1e-7), name


def test_muon_moves_two_ranks_as_one(found):
    for name, (move, _) in found["muon"][2, 0].items():
        expected, _ = found["muon"][1, 0][name]
        # Its iterations run in bf16, which is what fp32's other rounding is seen through.
        assert np.linalg.norm(move - expected) <= 0.02 * np.linalg.norm(expected), name


def test_gradient_and_metrics_do_not_depend_on_the_cut(found):
    for (world, stage), cuts in found["gradients"].items():
        for name, (gradient, metrics) in cuts.items():
            # The same samples at once, in order, on one rank.
            one_batch = name if "uneven" in name or "empty" in name else whole_of(name)
            expected, logged = found["gradients"][1, 0][one_batch]
            off = np.linalg.norm(gradient - expected) / np.linalg.norm(expected)
            assert off <= 1e-6, (world, stage, name, off)
            assert metrics == pytest.approx(logged, rel=1e-6, abs=1e-7), (world, stage, name)


def whole_of(name: str) -> str:
    for cut in ("permuted", "packed", "one each"):
        name = name.replace(cut, "even")
    return name


def test_any_ranks_and_stage_go_on_from_a_checkpoint(found):
    for (by, shape), steps in found["got"].items():
        wanted = found["expected"][by]
        assert steps[0] == pytest.approx(wanted[0], rel=1e-6, abs=1e-7), (by, shape)
        # Other ranks round differently, and Adam passes that on to each next step.
        for got, expected in zip(steps[1:], wanted[1:], strict=True):
            assert got == pytest.approx(expected, rel=5e-5, abs=1e-6), (by, shape)


def test_what_other_ranks_loaded_is_what_was_written_to_the_bit(found):
    for by, shape in found["got"]:
        folder = Path(found["folder"](by))
        written = whole_state(folder / "three")
        again = whole_state(folder / f"by_{shape[0]}x{shape[1]}")
        assert set(again) == set(written)
        assert {kind for kind, _ in written} == {"weight", "exp_avg", "exp_avg_sq", "step"}
        for key, values in written.items():
            assert np.array_equal(again[key], values), (by, shape, key)
        for name in ("counters.json", "run.binpb", "trainer_state.bin"):
            one, other = (folder / tag / name for tag in ("three", f"by_{shape[0]}x{shape[1]}"))
            assert one.read_bytes() == other.read_bytes(), name


def whole_state(folder: Path) -> dict[tuple[str, str], Any]:
    """Whole tensors by kind and parameter, from all fragments; steps by parameter."""
    pieces: dict[tuple[str, str], dict[int, Any]] = {}
    out: dict[tuple[str, str], Any] = {}
    for file in sorted(folder.glob("state_*.safetensors")):
        with safe_open(file, framework="np") as stored:
            for name, step in json.loads(stored.metadata()["steps"]).items():
                out["step", name] = step
            for key in stored.keys():  # noqa: SIM118 - not a mapping
                kind, start, name = key.split("|")
                pieces.setdefault((kind, name), {})[int(start)] = stored.get_tensor(key)
    for key, parts in pieces.items():
        out[key] = np.concatenate([parts[start] for start in sorted(parts)])
    return out
