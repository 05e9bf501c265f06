"""Each way to take the same training step, in fp32, with fused AdamW and the norm clipped to 1.

The loss is the mean negative log-likelihood of the completions' tokens. The learning rate is so
small that the step that warms up leaves the weights as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.learner.batch import Batch, cut_padded, small_batch
from benchmarks.learner.meter import Meter

LEARNING_RATE = 1e-12
BETAS = (0.9, 0.95)
MAX_NORM = 1.0
NOT_TRAINED = -100
"""Label that transformers leaves out of the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What all contenders are given."""

    model: str
    """Folder."""
    batch: Batch
    budget: int
    """Most tokens of a micro-batch, padding included."""
    vocabulary: int

    def warm_up(self, count: int) -> Batch:
        """`count` short sequences, for a step that is not measured."""
        return small_batch(count, vocabulary=self.vocabulary)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the measured step answers."""

    loss: float
    grad_norm: float
    """Before clipping."""
    tokens_computed: int
    """Of all its forward passes, padding included."""


Contender = Callable[[Task, Meter], Outcome]


def plain(task: Task, meter: Meter, *, ordered: bool) -> Outcome:
    """Train in a PyTorch loop as a careful user writes it.

    Padded micro-batches within the token budget, logits of the trained places only, one backward
    pass a micro-batch.
    """
    model = _load(task).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, fused=True)

    def step(batch: Batch) -> Outcome:
        total, computed = 0.0, 0
        for numbers in cut_padded(batch.lengths.tolist(), task.budget, ordered=ordered):
            ids, mask, labels = _padded(batch, numbers)
            computed += ids.numel()
            hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
            chosen = labels[:, 1:] != NOT_TRAINED
            logits = model.get_output_embeddings()(hidden[:, :-1][chosen])
            losses = torch.nn.functional.cross_entropy(
                logits.float(), labels[:, 1:][chosen], reduction="sum"
            )
            loss = losses / batch.num_trained
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return Outcome(loss=total, grad_norm=float(norm), tokens_computed=computed)

    step(task.warm_up(1))
    with meter:
        return step(task.batch)


def trainer(task: Task, meter: Meter) -> Outcome:
    """The HF Trainer, given the plain loop's micro-batches in the same order."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Measure(TrainerCallback):
        """Measures the second step."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                meter.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                meter.stop()

    def parts_of(batch: Batch, cut: Sequence[Sequence[int]]) -> list[dict[str, Tensor]]:
        names = ("input_ids", "attention_mask", "labels")
        return [dict(zip(names, _padded(batch, part), strict=True)) for part in cut]

    parts = parts_of(task.batch, cut_padded(task.batch.lengths.tolist(), task.budget))
    warm_up = parts_of(task.warm_up(len(parts)), [[i] for i in range(len(parts))])
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=len(parts),
            max_steps=2,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            adam_beta2=BETAS[1],
            max_grad_norm=MAX_NORM,
            optim="adamw_torch_fused",
            train_sampling_strategy="sequential",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        hf = Trainer(
            model=_load(task),
            args=arguments,
            train_dataset=[*warm_up, *parts],  # type: ignore[arg-type]
            data_collator=lambda items: items[0],
            callbacks=[Measure()],
        )
        hf.train()
    logged = [row for row in hf.state.log_history if "grad_norm" in row][-1]
    return Outcome(
        loss=float(logged["loss"]),
        grad_norm=float(logged["grad_norm"]),
        tokens_computed=sum(part["input_ids"].numel() for part in parts),
    )


def quartet(task: Task, meter: Meter, *, packed: bool) -> Outcome:
    """The learner's engine, called as its service calls it."""
    import torch.distributed as dist
    from quartet_learner.batching import Limits, plan_micro_batches, tokens_taken
    from quartet_learner.engine import LearnerEngine
    from quartet_learner.group import join_group
    from quartet_learner.settings import LearnerSettings

    from quartet.types import (
        OptimizerConfig,
        RunSpec,
        ScheduleConfig,
        SequenceBatch,
        SftLoss,
        TrainSamples,
        TrainStep,
    )

    settings = LearnerSettings(model_name_or_path=task.model, packed=packed)
    engine = LearnerEngine(settings, join_group(dist.HashStore(), 0, 1))
    engine.start_run(
        RunSpec(
            run_id="benchmark",
            optimizer=OptimizerConfig(lr=LEARNING_RATE, betas=BETAS),
            schedule=ScheduleConfig(name="constant"),
            max_norm=MAX_NORM,
        )
    )

    def step(batch: Batch, number: int) -> Outcome:
        result = engine.train(
            TrainStep(
                request_id=str(number),
                run_id="benchmark",
                loss=SftLoss(),
                expected_optimizer_steps=number,
                max_tokens_per_micro_batch=task.budget,
            ),
            TrainSamples(
                sequences=SequenceBatch(
                    token_ids=batch.token_ids.astype(np.int32),
                    lengths=batch.lengths.astype(np.int32),
                ),
                action_mask=batch.trained,
            ),
        )
        return Outcome(
            loss=result.metrics["gpt_loss"], grad_norm=result.grad_norm, tokens_computed=0
        )

    step(task.warm_up(2), 0)
    with meter:
        found = step(task.batch, 1)
    lengths = task.batch.lengths.tolist()
    limits = Limits(max_tokens=task.budget, padded=not packed)
    plan = plan_micro_batches(lengths, limits, world_size=1).ranks[0]
    return Outcome(
        loss=found.loss,
        grad_norm=found.grad_norm,
        tokens_computed=sum(tokens_taken(part, lengths, not packed) for part in plan),
    )


def quartet_with_masks(task: Task, meter: Meter) -> Outcome:
    """The learner, packed, with the masks of transformers in place of its own attention."""
    from quartet_learner import model

    model.use_causal_attention = lambda _: False
    return quartet(task, meter, packed=True)


CONTENDERS: dict[str, Contender] = {
    "plain": partial(plain, ordered=True),
    "plain-unordered": partial(plain, ordered=False),
    "trainer": trainer,
    "quartet": partial(quartet, packed=False),
    "quartet-packed": partial(quartet, packed=True),
    "quartet-packed-masks": quartet_with_masks,
}
"""By the name that --contenders takes."""


def _load(task: Task) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        task.model, dtype=torch.float32, attn_implementation="sdpa", use_cache=False
    )


def _padded(batch: Batch, numbers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """[rows, width] ids, attention mask and labels of the sequences `numbers`."""
    rows = list(batch.rows())
    width = max(int(batch.lengths[i]) for i in numbers)
    ids = np.zeros((len(numbers), width), np.int64)
    mask = np.zeros_like(ids)
    labels = np.full_like(ids, NOT_TRAINED)
    for row, number in enumerate(numbers):
        tokens, trained = rows[number]
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
        labels[row, : len(tokens)][trained] = tokens[trained]
    return torch.from_numpy(ids), torch.from_numpy(mask), torch.from_numpy(labels)
