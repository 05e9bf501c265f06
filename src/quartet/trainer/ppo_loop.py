"""The loop of PPO and its family: sample, score, shape, train, push, again.

    prompts -> Pipeline -> Experience -> shape -> Lesson -> PpoLearners -> push -> log

Every step is recorded in the ledger before it begins and after it ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quartet.algorithms import make_kl_controller
from quartet.config import PpoConfig
from quartet.config.derive import groups_in_flight, needs_groups, samples_per_rollout
from quartet.data.samples import Prompt
from quartet.errors import FatalError, InfraError
from quartet.obs.metrics import POLICY_VERSION
from quartet.trainer.best import BestCheckpoint, best_key
from quartet.trainer.checkpoints import Checkpoints
from quartet.trainer.drops import Drops
from quartet.trainer.evaluate import Evaluation
from quartet.trainer.evaluators import Evaluators
from quartet.trainer.filtering import Draw, PromptCursor, group_filter
from quartet.trainer.generation import Generation, GenerationSettings
from quartet.trainer.learners import PpoLearners
from quartet.trainer.metrics import Metrics, rollout_metrics, sample_texts, training_metrics
from quartet.trainer.pipeline import Pipeline, PipelineSettings, Rollout
from quartet.trainer.rooms import Players
from quartet.trainer.run import Run, absolute
from quartet.trainer.schedule import schedule_of
from quartet.trainer.scoring import Decode, Scoring
from quartet.trainer.shaping import Lesson, ShapingSettings, shape
from quartet.types import SamplingParams

TEXTS_PER_STEP = 64
"""Samples of each step that are kept as text."""

PUSH_REPEATS = 2
"""How often a push that no replica took is tried again before it ends the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PpoInputs:
    """What was read before anything was started."""

    prompts: Sequence[Prompt]
    decode: Decode
    tokenizer_fingerprint: str
    eval_prompts: Sequence[Prompt] = ()
    """What the policy is evaluated on; none where there is no evaluation."""


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
        self._scoring = Scoring(
            players.judge,
            inputs.decode,
            run_id=run.run_id,
            tokenizer_fingerprint=inputs.tokenizer_fingerprint,
            with_token_ids=players.judge_wants_token_ids,
            max_samples=players.judge_max_samples,
        )
        self._pipeline = _pipeline(config, run, players, self._scoring)
        self._evaluation = _evaluation(config, run, inputs, players, self._scoring)
        self._learners = PpoLearners(
            config,
            self._schedule,
            players,
            run_id=run.run_id,
            ledger=run.ledger,
            progress=run.progress,
        )
        self._policy_version = players.policy_version
        self._pushes = 0
        self._sends = 0
        self._weights = asyncio.Lock()
        """Held while the policy's weights move: what is pushed in between would be neither."""
        run.launcher.on_restart = self._catch_up
        if config.rollout.address:
            # Nobody tells of a service elsewhere that was started again, but its version does.
            players.sampler.on_stale = self._catch_up
        learners = {"learner": (players.policy, "_actor")}
        if players.critic is not None:
            learners["critic"] = (players.critic, "_critic")
        self._checkpoints = Checkpoints(
            config.ckpt,
            learners,
            run_id=run.run_id,
            counted_by={
                "train.seed": config.train.seed,
                "train.batch_size": config.train.batch_size,
                "rollout.batch_size": config.rollout.batch_size,
                "rollout.n_samples_per_prompt": config.rollout.n_samples_per_prompt,
                "number of prompts": len(inputs.prompts),
                # An average can neither begin nor change its pace in the middle of a run.
                "train.ema_beta": config.train.ema_beta if config.train.enable_ema else None,
            },
            progress=run.progress,
        )
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
        behind = await self._resume() if config.ckpt.load_enable else 0
        if not behind:
            await self._learners.start()
        # The rollout services may hold anything: they are told what the policy is.
        await self._push("start")
        for step in range(behind + 1, schedule.num_rollouts + 1):
            draw = self._cursor.draw(config.rollout.batch_size)
            if not draw.prompts:  # a filter consumes more prompts a step
                break
            await self._step(step, draw)
        await self._export()

    async def _resume(self) -> int:
        """Go on from the latest checkpoint; returns the steps behind it."""
        restored = await self._checkpoints.restore()
        self._learners.go_on(restored)
        step = int(restored.state["cursor"])
        self._kl.load_state_dict(restored.state["kl"])
        self._cursor.consumed = int(restored.state["consumed_prompts"])
        # The push at the start repeats the last one.
        self._pushes = int(restored.state["pushes"]) - 1
        if self._best is not None:
            self._best.restore(restored.state.get("best"))
        await self._run.ledger.rewind(step)
        self._run.sinks.rewind(step)
        return step

    async def _step(self, step: int, draw: Draw) -> None:
        """From prompts to logged numbers."""
        began = time.monotonic()
        run = self._run
        prompt_ids = [p.prompt_id for p in draw.prompts]
        plan = {"episode": draw.episode, "first": draw.first, "prompt_ids": prompt_ids}
        await run.ledger.begin_step(step, policy_version=self._policy_version, plan=plan)
        rollout = await self._pipeline.make(
            step,
            draw.prompts,
            episode=draw.episode,
            policy_version=self._policy_version,
            more=lambda count: self._cursor.draw(count, episode=draw.episode).prompts,
        )
        metrics: Metrics = {f"dropped/{k}": float(v) for k, v in rollout.dropped.items()}
        if rollout.pass_rate is not None:
            metrics["dynamic_filtering_pass_rate"] = rollout.pass_rate
        if len(rollout.experience):
            metrics |= await self._learn(step, rollout)
        else:
            run.progress.say(f"step {step}: no sample is left, so nothing is trained")
        metrics |= {
            "episode": float(draw.episode),
            "timing/generation": rollout.generation_seconds,
            "timing/make_experience": rollout.seconds - rollout.generation_seconds,
            "timing/step_total": time.monotonic() - began,
        }
        state = {
            "cursor": step,
            "consumed_prompts": self._cursor.consumed,
            "kl": self._kl.state_dict(),
            "pushes": self._pushes,
        }
        await run.ledger.end_step(step, metrics=metrics, state=state)
        if step % self._config.logger.logging_steps == 0:
            run.sinks.log("train", step, metrics)
        run.summary |= {
            "steps": step,
            "policy_version": self._policy_version,
            "metrics": dict(sorted(metrics.items())),
        }
        if self._evaluation is not None and step % self._config.eval.steps == 0:
            await self._evaluate(step, self._evaluation, state)
        if self._best is not None:
            # After the evaluation: the best that a checkpoint knows of includes its own step.
            state["best"] = self._best.state
        await self._checkpoints.after_step(step, state)

    async def _learn(self, step: int, rollout: Rollout) -> Metrics:
        """Shape, train, push, and steer the KL coefficient."""
        kl_coef = self._kl.coef
        lesson = shape(rollout.experience, self._shaping, kl_coef=kl_coef)
        metrics = rollout_metrics(lesson, max_len=self._config.data.max_len)
        # Counted from the start of this run: services that stand by themselves go on counting.
        metrics |= {"kl_coef": kl_coef, "policy_version": float(self._pushes)}
        async with self._weights:
            began = time.monotonic()
            policy, critic = await self._learners.train(step, lesson, kl_coef=kl_coef)
            metrics |= training_metrics(policy, critic)
            metrics["timing/ppo_train"] = time.monotonic() - began
            await self._run.ledger.trained(lesson.experience.sequences.sample_ids)
            if policy is not None:
                began = time.monotonic()
                await self._push(f"step {step}")
                metrics["timing/broadcast"] = time.monotonic() - began
        if "kl" in metrics:
            self._kl.update(metrics["kl"], len(lesson.experience))
        self._log_texts(step, lesson)
        return metrics

    async def _evaluate(self, step: int, evaluation: Evaluation, state: Mapping[str, Any]) -> None:
        """Evaluate the weights that were pushed last, and keep them if they are the best."""
        began = time.monotonic()
        metrics = await evaluation.run(step, policy_version=self._policy_version)
        metrics["policy_version"] = float(self._pushes)
        metrics["timing/eval"] = time.monotonic() - began
        self._run.sinks.log("eval", step, metrics)
        self._run.summary["eval"] = {"step": step, "metrics": dict(sorted(metrics.items()))}
        if self._best is not None:
            # Nothing trains in the meantime: the learners hold what was evaluated.
            await self._best.consider(step, metrics, state)
            self._run.summary["best"] = self._best.state
            await self._run.ledger.save_state({"best": self._best.state})

    async def _push(self, when: str) -> None:
        """Have all rollout replicas serve the policy as it is now.

        Raises:
            FatalError: none of them took it.
        """
        version = self._policy_version + 1
        repeats = 0
        while problem := await self._send(version, when):
            # A rollout service that just died and is started again is worth another push.
            if await self._run.launcher.settle():
                continue
            # One lost call must not cost a run: the services may be well.
            if repeats == PUSH_REPEATS:
                what = f"version {version} of the policy in {1 + repeats} pushes: {problem}"
                raise FatalError(f"no rollout service took {what}", reason="PUSH_FAILED")
            repeats += 1
            again = f"trying again, {repeats} of at most {PUSH_REPEATS}"
            self._run.progress.say(f"{when} push: {again}: {problem}")
        self._policy_version = version
        POLICY_VERSION.set(version)
        self._pushes += 1

    async def _send(self, version: int, when: str, to: Sequence[str] | None = None) -> str:
        """Push once, to all or to given addresses; returns why no replica took it, or nothing."""
        self._sends += 1
        with self._run.progress.phase(f"{when} push") as phase:
            phase.waiting_for = "learner and rollout"
            try:
                result = await self._players.policy.push_weights(
                    request_id=f"{self._run.run_id}/push/{version}/{self._sends}",
                    policy_version=version,
                    addresses=to,
                )
            except InfraError as error:
                return str(error)
            phase.note = f"{result.total_bytes / 1e6:.1f} MB as version {version}"
        problems = [
            f"{r.address} does not have version {version}: {r.failed_phase} failed, {r.error}"
            for r in result.replicas
            if not r.committed
        ]
        for problem in problems:
            self._run.progress.say(f"rollout {problem}")
        return "; ".join(problems) if len(problems) == len(result.replicas) else ""

    async def _catch_up(self, role: str, address: str) -> None:
        """Give a rollout service that was started again the weights that generation asks for."""
        if role.startswith("rollout") and self._pushes:
            async with self._weights:
                await self._send(self._policy_version, f"{role} at {address} is back:", [address])

    def _log_texts(self, step: int, lesson: Lesson) -> None:
        shown = lesson.experience.samples[:TEXTS_PER_STEP]
        texts = [self._scoring.text_of(sample) for sample in shown]
        self._run.sinks.texts(step, sample_texts(lesson, texts))

    async def _export(self) -> None:
        """Write the trained models where `ckpt.output_dir` says."""
        config, run = self._config, self._run
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


def evaluated_sources(config: PpoConfig, inputs: PpoInputs) -> set[str]:
    """Data sources that evaluations speak of; none where there is no evaluation."""
    return {p.datasource for p in inputs.eval_prompts} if config.eval.steps > 0 else set()


def _generation(config: PpoConfig, run: Run) -> GenerationSettings:
    """How prompts are completed for training."""
    return GenerationSettings(
        run_id=run.run_id,
        seed=config.train.seed,
        sampling=SamplingParams(
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            max_new_tokens=config.rollout.max_new_tokens,
        ),
        num_samples=config.rollout.n_samples_per_prompt,
        isolated=config.train.full_determinism_enable,
    )


def _groups_in_flight(config: PpoConfig, players: Players) -> int:
    return groups_in_flight(config) or players.max_groups_in_flight


def _evaluation(
    config: PpoConfig, run: Run, inputs: PpoInputs, players: Players, scoring: Scoring
) -> Evaluation | None:
    """Evaluation as the flags ask for it; what they do not name is as in training."""
    if config.eval.steps < 1 or not inputs.eval_prompts:
        return None
    training = _generation(config, run)
    return Evaluation(
        replace(
            training,
            sampling=replace(training.sampling, temperature=config.eval.temperature),
            num_samples=config.eval.n_samples_per_prompt,
        ),
        inputs.eval_prompts,
        sampler=players.sampler,
        scoring=scoring,
        max_groups_in_flight=_groups_in_flight(config, players),
        progress=run.progress,
    )


def _pipeline(config: PpoConfig, run: Run, players: Players, scoring: Scoring) -> Pipeline:
    deterministic = config.train.full_determinism_enable
    drops = Drops(limit=samples_per_rollout(config))
    generation = Generation(
        _generation(config, run), players.sampler, ledger=run.ledger, drops=drops
    )
    return Pipeline(
        PipelineSettings(
            temperature=config.rollout.temperature,
            min_group=2 if needs_groups(config) else 1,
            group_filter=group_filter(config),
            deterministic=deterministic,
            max_groups_in_flight=_groups_in_flight(config, players),
        ),
        generation=generation,
        scoring=scoring,
        evaluators=Evaluators(
            policy=players.policy,
            reference=players.reference,
            reference_width=players.num_references,
            critic=players.critic,
        ),
        ledger=run.ledger,
        progress=run.progress,
        drops=drops,
    )
