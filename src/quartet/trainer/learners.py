"""Policy and critic of a PPO run: they start together and train at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from quartet.config import PpoConfig
from quartet.config.derive import train_token_budget
from quartet.obs.progress import Progress
from quartet.trainer.checkpoints import Restored
from quartet.trainer.ledger import Ledger
from quartet.trainer.rooms import Players, Trainee
from quartet.trainer.schedule import PpoSchedule
from quartet.trainer.settings import (
    critic_aux_loss_coef,
    policy_loss,
    run_spec,
    value_loss,
    warmup_note,
)
from quartet.trainer.shaping import Lesson
from quartet.trainer.training import (
    Training,
    TrainingReport,
    TrainingSettings,
    critic_samples,
    policy_samples,
)


class PpoLearners:
    """The learners of a run, each with its own optimizer, schedule and loss."""

    def __init__(
        self,
        config: PpoConfig,
        schedule: PpoSchedule,
        players: Players,
        *,
        run_id: str,
        ledger: Ledger,
        progress: Progress,
    ) -> None:
        """Train by the learners among `players`."""
        self._config = config
        self._schedule = schedule
        self._run_id = run_id
        self._progress = progress
        self.policy = self._training("learner", players.policy, ledger)
        self.critic = (
            None if players.critic is None else self._training("critic", players.critic, ledger)
        )

    def _training(self, role: str, trainee: Trainee, ledger: Ledger) -> Training:
        train = self._config.train
        settings = TrainingSettings(
            role=role,
            request_prefix=self._run_id,
            seed=train.seed,
            batch_size=train.batch_size,
            max_epochs=train.max_epochs,
            micro_batch_size=None if train.dynamic_batch_enable else train.micro_batch_size,
            max_tokens_per_micro_batch=train_token_budget(self._config),
        )
        return Training(settings, trainee, ledger=ledger)

    async def start(self) -> None:
        """Build optimizers and schedules for the steps that this run will really have."""
        train, schedule = self._config.train, self._schedule
        async with asyncio.TaskGroup() as tasks:
            actor, critic = self._config.actor, self._config.critic
            critic_aux = critic_aux_loss_coef(self._config)
            averaged = self.policy if train.enable_ema else None
            for training, section, optimizer, steps, aux in (
                (self.policy, "actor.", actor, schedule.policy_steps, actor.aux_loss_coef),
                (self.critic, "critic.", critic, schedule.critic_steps, critic_aux),
            ):
                if training is not None:
                    spec = run_spec(
                        self._run_id,
                        optimizer,
                        total_steps=steps,
                        seed=train.seed,
                        full_determinism=train.full_determinism_enable,
                        aux_loss_coef=aux,
                        ema_beta=train.ema_beta if training is averaged else None,
                    )
                    if note := warmup_note(spec, section):
                        self._progress.say(note)
                    tasks.create_task(training.start(spec))

    def go_on(self, restored: Restored) -> None:
        """Take over where a loaded checkpoint stands."""
        for training in (self.policy, self.critic):
            if training is not None:
                role = training.settings.role
                training.go_on(
                    run_id=restored.run_ids[role], optimizer_steps=restored.optimizer_steps[role]
                )

    async def train(
        self, step: int, lesson: Lesson, *, kl_coef: float
    ) -> tuple[TrainingReport | None, TrainingReport | None]:
        """Train on a rollout.

        Returns:
            What the policy made of it, None while it is frozen; and the critic, None without one.
        """
        frozen = step <= self._schedule.freezing_steps
        work: dict[str, Coroutine[Any, Any, TrainingReport]] = {}
        learners = (not frozen) + (self.critic is not None)
        total = len(lesson.experience) * self._config.train.max_epochs * learners
        with self._progress.phase(f"step {step} train", total=total, unit="samples") as phase:
            if not frozen:
                work["policy"] = self.policy.go_over(
                    step=step,
                    loss=policy_loss(self._config, kl_coef=kl_coef),
                    num_samples=len(lesson.experience),
                    cut=policy_samples(
                        lesson,
                        with_ref=self._config.algo.kl.use_loss,
                        with_rollout=self._config.algo.advantage.is_correction_level != "off",
                    ),
                    advance=phase.advance,
                )
            if self.critic is not None:
                work["critic"] = self.critic.go_over(
                    step=step,
                    loss=value_loss(self._config),
                    num_samples=len(lesson.experience),
                    cut=critic_samples(lesson),
                    advance=phase.advance,
                )
            async with asyncio.TaskGroup() as tasks:
                done = {name: tasks.create_task(steps) for name, steps in work.items()}
        reports = {name: task.result() for name, task in done.items()}
        return reports.get("policy"), reports.get("critic")
