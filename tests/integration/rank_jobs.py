"""What the ranks of a learner do in test_learner_cuts.py: `rank_jobs.py` is one rank, as a process.

Also run by the test itself, which is the only rank of a world of one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quartet_learner.engine import LearnerEngine
from quartet_learner.group import RankGroup, join_group
from quartet_learner.samples import take
from quartet_learner.settings import LearnerSettings

from quartet.types import (
    DpoLoss,
    Head,
    KlLoss,
    Loss,
    MuonConfig,
    OptimizerConfig,
    PairwiseLoss,
    PolicyLoss,
    RunSpec,
    ScheduleConfig,
    SequenceBatch,
    SftLoss,
    TrainSamples,
    TrainStep,
    ValueLoss,
)
from quartet.types.requests import LoadCheckpointRequest, SaveCheckpointRequest

POLICY = PolicyLoss(
    entropy_coef=0.01,
    kl_loss=KlLoss(coef=0.1, estimator="k3"),
    aggregation="seq-mean-token-mean",
    temperature=0.9,
)
EVERYTHING = 100_000

Cut = tuple[tuple[int, ...], int | None, dict[str, int], bool]
"""Lengths, order (None: as they are; -1: reversed), limits, packed."""
CUTS: dict[str, Cut] = {
    "even": ((5, 9, 3, 12, 7, 7, 2, 10, 30, 4, 4, 18), None, {"max_tokens": EVERYTHING}, False),
    "permuted": ((5, 9, 3, 12, 7, 7, 2, 10, 30, 4, 4, 18), -1, {"max_tokens": 60}, False),
    "packed": ((5, 9, 3, 12, 7, 7, 2, 10, 30, 4, 4, 18), None, {"max_tokens": 40}, True),
    "one each": ((5, 9, 3, 12, 7, 7, 2, 10, 30, 4, 4, 18), None, {"micro_batch_size": 1}, False),
    "uneven": ((40, 3, 3, 3, 2, 2, 2, 2), None, {"micro_batch_size": 2}, False),
    "empty ranks": ((7, 6), None, {"max_tokens": EVERYTHING}, True),
}
SOME_CUTS = ("even", "packed", "uneven", "empty ranks")
HEADS: dict[Head, tuple[tuple[Loss, Collection[str]], ...]] = {
    Head.LM: ((POLICY, CUTS), (PolicyLoss(type="gspo"), SOME_CUTS), (DpoLoss(), SOME_CUTS)),
    Head.VALUE: ((ValueLoss(), SOME_CUTS),),
    Head.REWARD: ((PairwiseLoss(), SOME_CUTS),),
}
"""What each head is trained on, over which cuts."""
RESUMED_STEPS = 3


def make_samples(lengths: tuple[int, ...], seed: int = 0) -> TrainSamples:
    """Everything that any loss needs."""
    rng = np.random.default_rng(seed)
    sequences = SequenceBatch.of([rng.integers(3, 300, n).tolist() for n in lengths])
    n = sequences.num_tokens
    mask = rng.random(n) < 0.7
    mask[sequences.offsets[1:] - 1] = True
    mask[sequences.offsets[:-1]] = False

    def numbers(mean: float, std: float) -> np.ndarray:
        return rng.normal(mean, std, n).astype(np.float32)

    old = numbers(-6, 0.2)
    return TrainSamples(
        sequences=sequences,
        action_mask=mask,
        # Not centred: of parts that cancel one another, the rounding would be all there is to see.
        advantages=numbers(1, 1),
        old_logprobs=old,
        ref_logprobs=old + numbers(0, 0.1),
        returns=numbers(0, 1),
        old_values=numbers(0, 1),
        margins=np.abs(numbers(0, 1))[: len(lengths) // 2],
    )


def begin(
    model: str, group: RankGroup, stage: int, head: Head, lr: float, **of_run: Any
) -> LearnerEngine:
    """An engine in a run, which does not clip where the rate is 0."""
    engine = LearnerEngine(
        LearnerSettings(model_name_or_path=model, head=head, zero_stage=stage), group
    )
    options = {
        "optimizer": OptimizerConfig(lr=lr),
        "schedule": ScheduleConfig(name="linear", total_steps=20, warmup_ratio=0.1),
        "max_norm": 0.0 if lr == 0 else 1.0,
    }
    engine.start_run(RunSpec(run_id="run", **(options | of_run)))
    return engine


def step_of(engine: LearnerEngine, loss: Loss, limits: dict[str, int]) -> TrainStep:
    """The engine's next step."""
    assert engine.run is not None
    return TrainStep(
        request_id="r",
        run_id="run",
        loss=loss,
        expected_optimizer_steps=engine.run.optimizer_steps,
        max_tokens_per_micro_batch=limits.get("max_tokens"),
        micro_batch_size=limits.get("micro_batch_size"),
    )


def gradients(model: str, group: RankGroup, stage: int) -> dict[str, tuple[np.ndarray, dict]]:
    """The whole gradient and the metrics of every cut, from the same weights: the rate is 0."""
    found = {}
    for head, losses in HEADS.items():
        engine = begin(model, group, stage, head, lr=0.0)
        seen = whole_gradients(engine)
        for loss, names in losses:
            for name in names:
                lengths, order, limits, packed = CUTS[name]
                samples = make_samples(lengths)
                if order is not None:
                    samples = take(samples, range(len(lengths))[::order])
                engine.settings = replace(engine.settings, packed=packed)
                result = engine.train(step_of(engine, loss, limits), samples)
                assert result.applied
                metrics = {**result.metrics, "grad_norm": result.grad_norm}
                key = f"{type(loss).__name__} {getattr(loss, 'type', '')} {name}"
                found[key] = (seen.pop(), metrics)
        engine.forget_run()
    return found


def whole_gradients(engine: LearnerEngine) -> list[np.ndarray]:
    """A list that gets the gradient of each step, taken right before the optimizer uses it."""
    from deepspeed.utils import safe_get_full_grad

    assert engine.run is not None
    deepspeed, seen = engine.run.deepspeed, []
    original = deepspeed.step

    def step() -> None:
        parts = [safe_get_full_grad(p) for p in engine.model.hf.parameters()]
        seen.append(torch.cat([part.double().flatten() for part in parts]).numpy())
        original()

    deepspeed.step = step
    return seen


def balance(model: str, group: RankGroup, stage: int) -> dict[str, tuple[np.ndarray, dict]]:
    """Gradients and metrics of a router's balance loss; `model` is a mixture of experts."""
    engine = begin(model, group, stage, Head.LM, lr=0.0, with_router_loss=True)
    seen = whole_gradients(engine)
    found = {}
    for name in ("even", "one each", "uneven", "empty ranks"):
        lengths, _, limits, _ = CUTS[name]
        step = step_of(engine, SftLoss(aux_loss_coef=0.1), limits)
        result = engine.train(step, make_samples(lengths))
        found[name] = (seen.pop(), {**result.metrics, "grad_norm": result.grad_norm})
    engine.forget_run()
    return found


def muon(model: str, group: RankGroup, stage: int) -> dict[str, tuple[np.ndarray, dict]]:
    """How far each parameter moved in two steps of Muon."""
    optimizer = OptimizerConfig(type="muon", lr=1e-3, muon=MuonConfig(lr=0.02))
    engine = begin(model, group, stage, Head.LM, lr=1e-3, optimizer=optimizer, max_norm=0.0)
    before = {n: p.detach().clone() for n, p in engine.model.hf.named_parameters()}
    trained(engine, 0, 2)
    now = dict(engine.model.hf.named_parameters())
    moves = {n: ((now[n] - p).flatten().detach().numpy(), {}) for n, p in before.items()}
    engine.forget_run()
    return moves


def trained(engine: LearnerEngine, first: int, count: int) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and rate of some steps."""
    out = []
    for number in range(first, first + count):
        samples = make_samples((5, 9, 3, 12, 7, 7, 2, 6), seed=number)
        result = engine.train(step_of(engine, POLICY, {"micro_batch_size": 2}), samples)
        out.append((result.metrics["policy_loss"], result.grad_norm, result.lr))
    return out


def save(model: str, group: RankGroup, stage: int, folder: Path) -> list[tuple]:
    """Train, write a checkpoint, and train on: what the run gives when nobody disturbs it."""
    engine = begin(model, group, stage, Head.LM, lr=1e-3)
    trained(engine, 0, 3)
    engine.save_checkpoint(
        SaveCheckpointRequest(request_id="s", folder=str(folder), tag="three", trainer_state=b"t")
    )
    expected = trained(engine, 3, RESUMED_STEPS)
    engine.forget_run()
    return expected


def resume(model: str, group: RankGroup, stage: int, folder: Path) -> list[tuple]:
    """Go on from a checkpoint, and write at once what was loaded."""
    engine = LearnerEngine(LearnerSettings(model_name_or_path=model, zero_stage=stage), group)
    request = LoadCheckpointRequest(request_id="l", folder=str(folder), tag="three")
    assert engine.load_checkpoint(request).optimizer_steps == 3
    again = SaveCheckpointRequest(
        request_id="s",
        folder=str(folder),
        tag=f"by_{group.world_size}x{stage}",
        trainer_state=b"t",
    )
    engine.save_checkpoint(again)
    got = trained(engine, 3, RESUMED_STEPS)
    engine.forget_run()
    return got


VECTORS = {"gradients": gradients, "balance": balance, "muon": muon}
"""Jobs that find named vectors, with metrics beside."""


def run_jobs(jobs: list[dict[str, Any]], group: RankGroup, model: str, results: Path) -> None:
    """Do one job after the other; rank 0 writes what each found."""
    for number, job in enumerate(jobs):
        if job["do"] in VECTORS:
            found = VECTORS[job["do"]](job.get("model", model), group, job["stage"])
            if group.rank == 0:
                np.savez(results / f"{number}.npz", **{key: g for key, (g, _) in found.items()})
                metrics = {key: m for key, (_, m) in found.items()}
                (results / f"{number}.json").write_text(json.dumps(metrics))
            continue
        do = save if job["do"] == "save" else resume
        steps = do(model, group, job["stage"], Path(job["folder"]))
        if group.rank == 0:
            (results / f"{number}.json").write_text(json.dumps(steps))


def main(order: str) -> None:
    """One rank, from the environment's RANK and WORLD_SIZE."""
    import torch.distributed as dist

    todo = json.loads(Path(order).read_text())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(todo["store"], world)
    group = join_group(store, rank, world)
    run_jobs(todo["jobs"], group, todo["model"], Path(todo["results"]))
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
