"""The loop of PPO and its family: sample, score, shape, train, push, again.

    prompts -> Pipeline -> Experience -> shape -> Lesson -> PpoLearners -> push -> log

Every step is recorded in the ledger before it begins and after it ended.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from quartet.algorithms import make_kl_controller
from quartet.config import PpoConfig
from quartet.config.derive import samples_per_rollout
from quartet.trainer.best import BestCheckpoint, best_key
from quartet.trainer.evaluate import Evaluation
from quartet.trainer.filtering import PromptCursor
from quartet.trainer.learners import PpoLearners
from quartet.trainer.metrics import Metrics, rollout_metrics, sample_texts, training_metrics
from quartet.trainer.pipeline import Rollout
from quartet.trainer.ppo_parts import (
    PpoInputs,
    checkpoints_of,
    evaluated_sources,
    evaluation_of,
    has_barrier,
    scoring_of,
    source_of,
)
from quartet.trainer.pushes import Pushes
from quartet.trainer.rest import rest_of
from quartet.trainer.rooms import Players
from quartet.trainer.run import Run, absolute
from quartet.trainer.schedule import schedule_of
from quartet.trainer.settings import nothing_left_note
from quartet.trainer.shaping import Lesson, ShapingSettings, shape

TEXTS_PER_STEP = 64
"""Samples of each step that are kept as text."""


class PpoLoop:
    """One run, with its players at hand."""

    def __init__(self, config: PpoConfig, run: Run, inputs: PpoInputs, players: Players) -> None:
        """Join pipeline, learners and ledger."""
        self._config = config
        self._run = run
        self._players = players
        self._shaping = ShapingSettings.of(config)
        self._schedule = schedule_of(config, len(inputs.prompts))
        self._kl = make_kl_controller(
            config.algo.kl.init_coef, target=config.algo.kl.target, horizon=config.algo.kl.horizon
        )
        self._cursor = PromptCursor(
            inputs.prompts, seed=config.train.seed, num_episodes=config.train.num_episodes
        )
        self._scoring = scoring_of(run, inputs, players)
        self._evaluation = evaluation_of(config, run, inputs, players, self._scoring)
        self._learners = PpoLearners(
            config,
            self._schedule,
            players,
            run_id=run.run_id,
            ledger=run.ledger,
            progress=run.progress,
        )
        self._rest = rest_of(config, players)
        self._pushes = Pushes(
            players.policy,
            players.sampler,
            run.launcher,
            rest=self._rest,
            barrier=has_barrier(config),
            run_id=run.run_id,
            policy_version=players.policy_version,
            progress=run.progress,
        )
        self._source = source_of(
            config,
            run,
            players,
            self._scoring,
            self._cursor,
            pushes=self._pushes,
            rest=self._rest,
        )
        self._checkpoints = checkpoints_of(config, run, inputs, players, rest=self._rest)
        key = best_key(config, evaluated_sources(config, inputs))
        self._best = (
            None
            if key is None
            else BestCheckpoint(config.ckpt, key, self._checkpoints, progress=run.progress)
        )

    async def run(self) -> None:
        """Do all steps, and export what was trained."""
        config, schedule = self._config, self._schedule
        frozen = schedule.freezing_steps
        rest = f", which rests for the first {frozen} rollouts" if frozen > 0 else ""
        self._run.progress.say(
            f"{schedule.num_prompts} prompts, {schedule.num_rollouts} rollouts of up to "
            f"{samples_per_rollout(config)} samples, {schedule.policy_steps} optimizer steps of "
            f"the policy{rest}"
        )
        await self._rest.start()
        behind = await self._resume() if config.ckpt.load_enable else 0
        if note := nothing_left_note(behind, schedule.num_rollouts, "train.num_episodes"):
            self._run.progress.say(note)
        if not behind:
            await self._learners.start()
        await self._pushes.start()
        async with self._source.running(behind + 1, schedule.num_rollouts):
            for step in range(behind + 1, schedule.num_rollouts + 1):
                if not await self._step(step):
                    break
        await self._export()

    async def _resume(self) -> int:
        """Go on from the latest checkpoint; returns the steps behind it."""
        restored = await self._checkpoints.restore()
        self._learners.go_on(restored)
        step = int(restored.state["cursor"])
        self._kl.load_state_dict(restored.state["kl"])
        self._cursor.consumed = int(restored.state["consumed_prompts"])
        # The push at the start repeats the last one.
        self._pushes.count = int(restored.state["pushes"]) - 1
        if self._best is not None:
            self._best.restore(restored.state.get("best"))
        await self._run.ledger.rewind(step)
        self._run.sinks.rewind(step)
        return step

    async def _step(self, step: int) -> bool:
        """From prompts to logged numbers; False when there are no prompts left."""
        began = time.monotonic()
        run = self._run
        self._rest.push_follows = step > self._schedule.freezing_steps
        work = await self._source.take(step)
        if work is None:
            return False
        rollout = work.rollout
        metrics: Metrics = {f"dropped/{k}": float(v) for k, v in rollout.dropped.items()}
        metrics |= work.metrics
        if rollout.pass_rate is not None:
            metrics["dynamic_filtering_pass_rate"] = rollout.pass_rate
        if len(rollout.experience):
            metrics |= await self._learn(step, rollout)
        else:
            run.progress.say(f"step {step}: no sample is left, so nothing is trained")
            if self._rest.weights_lost:
                async with self._pushes.weights:
                    await self._pushes.push(f"step {step}")
        self._source.trained(step)
        metrics |= {
            "episode": float(work.episode),
            "timing/generation": rollout.generation_seconds,
            "timing/make_experience": rollout.seconds - rollout.generation_seconds,
            "timing/step_total": time.monotonic() - began,
        }
        if self._rest.is_on:
            metrics["timing/sleep_wake"] = self._rest.seconds
            self._rest.seconds = 0.0
        state = {
            "cursor": step,
            "consumed_prompts": work.consumed,
            "kl": self._kl.state_dict(),
            "pushes": self._pushes.count,
        }
        await run.ledger.end_step(step, metrics=metrics, state=state)
        if step % self._config.logger.logging_steps == 0:
            run.sinks.log("train", step, metrics)
        run.summary |= {
            "steps": step,
            "policy_version": self._pushes.policy_version,
            "metrics": dict(sorted(metrics.items())),
        }
        if self._evaluation is not None and step % self._config.eval.steps == 0:
            await self._evaluate(step, self._evaluation, state)
        if self._best is not None:
            # After the evaluation: the best that a checkpoint knows of includes its own step.
            state["best"] = self._best.state
        await self._checkpoints.after_step(step, state)
        return True

    async def _learn(self, step: int, rollout: Rollout) -> Metrics:
        """Shape, train, push, and steer the KL coefficient."""
        kl_coef = self._kl.coef
        lesson = shape(rollout.experience, self._shaping, kl_coef=kl_coef)
        metrics = rollout_metrics(lesson, max_len=self._config.data.max_len)
        # Counted from the start of this run: services that stand by themselves go on counting.
        metrics |= {"kl_coef": kl_coef, "policy_version": float(self._pushes.count)}
        async with self._pushes.weights:
            began = time.monotonic()
            policy, critic = await self._learners.train(step, lesson, kl_coef=kl_coef)
            metrics |= training_metrics(policy, critic)
            metrics["timing/ppo_train"] = time.monotonic() - began
            await self._run.ledger.trained(lesson.experience.sequences.sample_ids)
            if policy is not None:
                began = time.monotonic()
                await self._pushes.push(f"step {step}")
                metrics["timing/broadcast"] = time.monotonic() - began
                if self._config.train.async_enable:
                    metrics["timing/push_wait"] = self._pushes.pause_seconds
        if "kl" in metrics:
            self._kl.update(metrics["kl"], len(lesson.experience))
        self._log_texts(step, lesson)
        return metrics

    async def _evaluate(self, step: int, evaluation: Evaluation, state: Mapping[str, Any]) -> None:
        """Evaluate the weights that were pushed last, and keep them if they are the best."""
        await self._rest.evaluate()
        began = time.monotonic()
        metrics = await evaluation.run(step, policy_version=self._pushes.policy_version)
        metrics["policy_version"] = float(self._pushes.count)
        metrics["timing/eval"] = time.monotonic() - began
        self._run.sinks.log("eval", step, metrics)
        self._run.summary["eval"] = {"step": step, "metrics": dict(sorted(metrics.items()))}
        if self._best is not None:
            # Nothing trains in the meantime: the learners hold what was evaluated.
            await self._best.consider(step, metrics, state)
            self._run.summary["best"] = self._best.state
            await self._run.ledger.save_state({"best": self._best.state})

    def _log_texts(self, step: int, lesson: Lesson) -> None:
        shown = lesson.experience.samples[:TEXTS_PER_STEP]
        texts = [self._scoring.text_of(sample) for sample in shown]
        self._run.sinks.texts(step, sample_texts(lesson, texts))

    async def _export(self) -> None:
        """Write the trained models where `ckpt.output_dir` says."""
        config, run = self._config, self._run
        await self._rest.save()
        # The services have working folders of their own.
        output_dir = absolute(config.ckpt.output_dir)
        exports = {"learner": (self._players.policy, output_dir)}
        if config.critic.save_value_network and self._players.critic is not None:
            exports["critic"] = (self._players.critic, f"{output_dir}_critic")
        for role, (trainee, folder) in exports.items():
            with run.progress.phase(f"export {role}"):
                path = await trainee.export_model(
                    request_id=f"{run.run_id}/{role}/export", folder=folder
                )
            run.progress.say(f"the {role}'s model is in {path}")
            run.summary[f"{role}_output_dir"] = path
