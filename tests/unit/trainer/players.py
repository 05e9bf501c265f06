"""Players in this process: deterministic toys that record what they are asked."""

from __future__ import annotations

import asyncio
import hashlib
import io
import itertools
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from quartet.config import PpoConfig
from quartet.data.samples import Prompt
from quartet.errors import RequestError
from quartet.obs.progress import Progress
from quartet.trainer.launch import Launcher
from quartet.trainer.ledger import Ledger
from quartet.trainer.ppo_parts import PpoInputs
from quartet.trainer.rooms import Players
from quartet.trainer.run import Run
from quartet.trainer.sinks import Sinks
from quartet.types import (
    Completion,
    Failure,
    FinishReason,
    ForwardOutput,
    ForwardResult,
    GenerateResult,
    GroupCompletions,
    LoadCheckpointResult,
    LogprobKind,
    LogprobSpec,
    PushResult,
    ReplicaPushResult,
    Reward,
    ScoreBatch,
    ScoreResult,
    StartRunResult,
    TrainResult,
    VersionSpan,
)

_processes = itertools.count()


def logprobs_of(tokens):
    """A log-probability a token that every fake model agrees on; 0 for the first token."""
    values = -0.1 - (np.asarray(tokens, np.float64) % 7) / 10
    values[:1] = 0
    return values.astype(np.float32)


@dataclass
class FakeSampler:
    """Completes with 1 to 5 tokens that follow from the seed."""

    log: list = field(default_factory=list)
    failures: dict = field(default_factory=dict)
    """sample id -> Failure or FinishReason."""
    gates: dict = field(default_factory=dict)
    """group id -> event to wait for."""
    in_flight: int = 0
    most_in_flight: int = 0
    version: int = 0
    catch_up: object = None
    taken: list = field(default_factory=list)
    """Versions that a push is known to have brought."""
    pauses: list = field(default_factory=list)
    """Modes of the pauses, and None for each resume after one."""
    naps: list = field(default_factory=list)
    """What was told to sleep or wake; a cast can give all its players the same list."""

    async def to_push_to(self):
        return ("r:1",)

    def pushed(self, policy_version, result):
        self.taken.append(policy_version)

    def has(self, address, policy_version):
        return False

    async def pause(self, mode):
        self.pauses.append(mode)

    async def resume(self):
        if self.pauses and self.pauses[-1] is not None:
            self.pauses.append(None)

    async def sleep(self, level):
        self.naps.append(f"rollout sleep {level}")
        self.version = -1 if level == 2 else self.version

    async def wake(self, tags=()):
        self.naps.append(" ".join(["rollout wake", *tags]))

    async def generate(self, request):
        self.log.append(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        for group in request.groups:
            if group.group_id in self.gates:
                await self.gates[group.group_id].wait()
        await asyncio.sleep(0)
        self.in_flight -= 1
        sampling = request.sampling
        return GenerateResult(
            groups=tuple(self._group(group) for group in request.groups),
            logprob_spec=LogprobSpec(
                kind=LogprobKind.PROCESSED,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
            ),
            replica="rollout-0",
        )

    def _group(self, group):
        return GroupCompletions(
            group_id=group.group_id,
            completions=tuple(
                self._completion(group, name, seed)
                for name, seed in zip(group.sample_ids, group.seeds, strict=True)
            ),
        )

    def _completion(self, group, name, seed):
        failure = self.failures.get(name)
        if isinstance(failure, Failure):
            return Completion(sample_id=name, failure=failure)
        rng = np.random.default_rng(seed)
        tokens = rng.integers(5, 90, size=rng.integers(1, 6)).astype(np.int32)
        whole = [*group.prompt_token_ids, *tokens.tolist()]
        return Completion(
            sample_id=name,
            token_ids=tokens,
            logprobs=logprobs_of(whole)[-len(tokens) :],
            finish_reason=failure or FinishReason.STOP,
            versions=(VersionSpan(policy_version=self.version, start=0, end=len(tokens)),),
        )


@dataclass
class FakeJudge:
    """Rewards the hash of the text."""

    log: list = field(default_factory=list)
    failures: dict = field(default_factory=dict)

    async def score(self, request):
        self.log.append(request)
        await asyncio.sleep(0)
        return ScoreBatch(
            results=tuple(
                ScoreResult(
                    sample_id=item.sample_id,
                    outcome=self.failures.get(item.sample_id) or self._reward(item),
                )
                for item in request.items
            ),
            replica="reward-0",
        )

    def _reward(self, item):
        number = int(hashlib.sha256(item.query.encode()).hexdigest()[:4], 16) / 0xFFFF
        return Reward(reward=number, score=number, extra_logs={"digit": number * 10})


@dataclass
class FakeReference:
    """Agrees with the policy at its start."""

    log: list = field(default_factory=list)
    shift: float = 0.0

    async def compute_logprobs(self, chunks, *, temperature):
        self.log.append([list(c.sample_ids) for c in chunks])
        await asyncio.sleep(0)
        return [
            np.concatenate([logprobs_of(row) for row in c.rows()]) - np.float32(self.shift)
            for c in chunks
        ]


@dataclass
class FakeTrainee:
    """Counts optimizer steps and remembers what it was given."""

    head: str = "lm"
    sampler: FakeSampler | None = None
    log: list = field(default_factory=list)
    steps: int = 0
    run_id: str = ""
    not_finite: set = field(default_factory=set)
    """Numbers of the steps whose gradient is not finite."""
    refuse_push: bool = False

    async def start_run(self, spec):
        self.log.append(("start", spec))
        self.run_id = spec.run_id
        return StartRunResult(optimizer_steps=0)

    async def forward(self, chunks, *, output, temperature=1.0):
        self.log.append(("forward", [list(c.sample_ids) for c in chunks]))
        await asyncio.sleep(0)
        scale = np.float32(0.5 if output is ForwardOutput.VALUES else 1.0)
        return [
            ForwardResult(
                chunk_id=str(i),
                output=np.concatenate([logprobs_of(row) for row in c.rows()]) * scale,
            )
            for i, c in enumerate(chunks)
        ]

    async def train(self, step, samples):
        self.log.append(("train", step, samples))
        await asyncio.sleep(0)
        assert step.expected_optimizer_steps == self.steps
        assert step.run_id == self.run_id
        applied = len([e for e in self.log if e[0] == "train"]) - 1 not in self.not_finite
        self.steps += applied
        mask = np.concatenate([s.action_mask for s in samples])
        metrics = {"policy_loss" if self.head == "lm" else "critic_loss": float(self.steps)}
        if self.head == "lm":
            metrics["ppo_ratio"] = 1.0
            if getattr(step.loss, "kl_loss", None) is not None:
                metrics["kl"] = 0.25
        return TrainResult(
            optimizer_steps=self.steps,
            applied=applied,
            metrics={k: v if applied else math.nan for k, v in metrics.items()},
            grad_norm=0.5 if applied else math.inf,
            lr=1e-3,
            num_samples=sum(len(s.sequences) for s in samples),
            num_action_tokens=int(mask.sum()),
            num_tokens=len(mask),
            num_micro_batches=1,
        )

    async def push_weights(self, *, request_id, policy_version, addresses):
        self.log.append(("push", policy_version))
        if self.sampler is not None and not self.refuse_push:
            self.sampler.version = policy_version
        return PushResult(
            replicas=(
                ReplicaPushResult(address="r:1", committed=not self.refuse_push, error="no room"),
            ),
            total_bytes=100,
        )

    async def export_model(self, *, request_id, folder, config_values=None):
        self.log.append(("export", folder, config_values or {}))
        return folder

    async def save_checkpoint(self, *, request_id, folder, tag, trainer_state):
        self.log.append(("checkpoint", folder, tag))
        path = Path(folder) / tag
        path.mkdir(parents=True)
        (path / "state").write_bytes(trainer_state)
        (path / "steps").write_text(f"{self.steps} {self.run_id}")
        (Path(folder) / "latest").write_text(tag)
        return str(path)

    async def load_checkpoint(self, *, folder, tag):
        if not (Path(folder) / "latest").exists():
            raise RequestError(f"there is no checkpoint in {folder}", reason="NO_CHECKPOINT")
        tag = tag or (Path(folder) / "latest").read_text()
        steps, self.run_id = (Path(folder) / tag / "steps").read_text().split()
        self.steps = int(steps)
        self.log.append(("load", folder, tag))
        return LoadCheckpointResult(
            tag=tag,
            optimizer_steps=self.steps,
            trainer_state=(Path(folder) / tag / "state").read_bytes(),
            run_id=self.run_id,
        )

    def of(self, kind):
        return [entry for entry in self.log if entry[0] == kind]


class MemorySink:
    """Keeps what is logged."""

    def __init__(self):
        self.rows = []
        self.samples = []
        self.closed = False

    def log(self, kind, step, metrics):
        self.rows.append((kind, step, dict(metrics)))

    def texts(self, step, samples):
        self.samples.append((step, list(samples)))

    def rewind(self, step):
        self.rewound = step

    def close(self):
        self.closed = True


@dataclass
class Cast:
    """A set of fake players and a run for them."""

    sampler: FakeSampler = field(default_factory=FakeSampler)
    judge: FakeJudge = field(default_factory=FakeJudge)
    reference: FakeReference | None = field(default_factory=FakeReference)
    policy: FakeTrainee = field(default_factory=FakeTrainee)
    critic: FakeTrainee | None = None
    sink: MemorySink = field(default_factory=MemorySink)

    def __post_init__(self):
        self.policy.sampler = self.sampler

    @property
    def players(self):
        return Players(
            sampler=self.sampler,
            judge=self.judge,
            policy=self.policy,
            reference=self.reference,
            critic=self.critic,
        )

    def run(self, config, folder):
        progress = Progress(stream=io.StringIO())

        async def serving(_):
            return True

        return Run(
            config=config,
            folder=folder,
            run_id=f"run/{next(_processes)}",
            progress=progress,
            ledger=Ledger(folder / "ledger.sqlite"),
            sinks=Sinks([self.sink]),
            launcher=Launcher(folder, [], probe=serving, progress=progress),
        )

    @property
    def metrics(self):
        return [metrics for kind, _, metrics in self.sink.rows if kind == "train"]


def prompts(count):
    return [
        Prompt(prompt_id=f"p{i}", text=f"prompt {i}", token_ids=(1, 2 + i % 3, 3), label=str(i))
        for i in range(count)
    ]


def inputs(count):
    return PpoInputs(
        prompts=prompts(count),
        decode=lambda ids: " ".join(map(str, ids)),
        tokenizer_fingerprint="f" * 64,
    )


def ppo_config(**sections):
    """A small GRPO configuration; keywords replace fields: `rollout={"batch_size": 2}`."""
    config = PpoConfig()
    defaults = {
        "algo": {"advantage": {"estimator": "group_norm"}},
        # Long enough for a Generate call a prompt.
        "rollout": {"batch_size": 4, "n_samples_per_prompt": 2, "max_new_tokens": 1024},
        "train": {"batch_size": 4, "seed": 7},
        "data": {"max_len": 32},
        "ckpt": {"output_dir": "/exported"},
    }
    for values in (defaults, sections):
        for name, changes in values.items():
            config = replace(config, **{name: _changed(getattr(config, name), changes)})
    return config


def _changed(section, changes):
    values = {
        name: _changed(getattr(section, name), value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return replace(section, **values)
