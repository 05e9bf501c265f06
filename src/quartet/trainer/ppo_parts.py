"""The parts of a PPO run, each made from the flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quartet.agents.pool import AgentSettings
from quartet.config import PpoConfig
from quartet.config.derive import (
    generate_size,
    groups_in_flight,
    max_staleness,
    needs_groups,
    samples_per_rollout,
)
from quartet.data.samples import Prompt
from quartet.trainer.ahead import Ahead, AheadSettings
from quartet.trainer.checkpoints import Checkpoints
from quartet.trainer.drops import Drops
from quartet.trainer.episodes import Episodes
from quartet.trainer.evaluate import Evaluation
from quartet.trainer.evaluators import Evaluators
from quartet.trainer.filtering import PromptCursor, group_filter
from quartet.trainer.generation import Answers, Generation, GenerationSettings, Producer
from quartet.trainer.pipeline import Pipeline, PipelineSettings
from quartet.trainer.pushes import Pushes
from quartet.trainer.rest import Rest
from quartet.trainer.rooms import Players
from quartet.trainer.run import Run
from quartet.trainer.schedule import schedule_of
from quartet.trainer.scoring import Decode, Scoring
from quartet.trainer.settings import begun_with
from quartet.trainer.sources import InTurn, Source
from quartet.types import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class PpoInputs:
    """What was read before anything was started."""

    prompts: Sequence[Prompt]
    decode: Decode
    tokenizer_fingerprint: str
    agent: AgentSettings | None = None
    """Who makes the samples; None for single answers of the policy."""
    eval_prompts: Sequence[Prompt] = ()
    """What the policy is evaluated on; none where there is no evaluation."""


def evaluated_sources(config: PpoConfig, inputs: PpoInputs) -> set[str]:
    """Data sources that evaluations speak of; none where there is no evaluation."""
    return {p.datasource for p in inputs.eval_prompts} if config.eval.steps > 0 else set()


def generation_settings(config: PpoConfig, run: Run) -> GenerationSettings:
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


def _producer(config: PpoConfig, run: Run, players: Players) -> Producer:
    """Who makes samples of prompts."""
    if players.agents is None:
        return Answers(players.sampler)
    return Episodes(
        players.agents, players.sampler, max_length=config.data.max_len, say=run.progress.say
    )


def evaluation_of(
    config: PpoConfig, run: Run, inputs: PpoInputs, players: Players, scoring: Scoring
) -> Evaluation | None:
    """Evaluation as the flags ask for it; what they do not name is as in training."""
    if config.eval.steps < 1 or not inputs.eval_prompts:
        return None
    training = generation_settings(config, run)
    return Evaluation(
        replace(
            training,
            sampling=replace(training.sampling, temperature=config.eval.temperature),
            num_samples=config.eval.n_samples_per_prompt,
        ),
        inputs.eval_prompts,
        producer=_producer(config, run, players),
        scoring=scoring,
        max_groups_in_flight=_groups_in_flight(config, players),
        progress=run.progress,
    )


def has_barrier(config: PpoConfig) -> bool:
    """Whether a push waits until no completion is under way."""
    return config.train.async_enable and not config.train.partial_rollout_enable


def source_of(
    config: PpoConfig,
    run: Run,
    players: Players,
    scoring: Scoring,
    cursor: PromptCursor,
    *,
    pushes: Pushes,
    rest: Rest,
) -> Source:
    """Where rollouts come from: ahead of training, or in turn with it."""
    drops = Drops(limit=samples_per_rollout(config))
    pipeline = _pipeline(config, run, players, scoring, drops, rest)
    rollout = config.rollout
    if not config.train.async_enable:
        return InTurn(
            pipeline, cursor, batch_size=rollout.batch_size, pushes=pushes, ledger=run.ledger
        )
    return Ahead(
        AheadSettings(
            batch_size=rollout.batch_size,
            num_samples=rollout.n_samples_per_prompt,
            queue_size=config.train.async_queue_size,
            max_staleness=max_staleness(config),
            generate_size=generate_size(config),
            filtering=config.algo.dynamic_filtering_enable,
        ),
        pipeline,
        cursor,
        pushes=pushes,
        ledger=run.ledger,
        drops=drops,
        progress=run.progress,
    )


def _pipeline(
    config: PpoConfig, run: Run, players: Players, scoring: Scoring, drops: Drops, rest: Rest
) -> Pipeline:
    """How a rollout is made."""
    deterministic = config.train.full_determinism_enable
    generation = Generation(
        generation_settings(config, run),
        _producer(config, run, players),
        ledger=run.ledger,
        drops=drops,
    )
    return Pipeline(
        PipelineSettings(
            temperature=config.rollout.temperature,
            min_group=2 if needs_groups(config) else 1,
            group_filter=group_filter(config),
            deterministic=deterministic,
            max_groups_in_flight=_groups_in_flight(config, players),
            learners_last=config.train.async_enable or rest.is_on,
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
        rest=rest,
    )


def scoring_of(run: Run, inputs: PpoInputs, players: Players) -> Scoring:
    """How rewards are asked for."""
    return Scoring(
        players.judge,
        inputs.decode,
        run_id=run.run_id,
        tokenizer_fingerprint=inputs.tokenizer_fingerprint,
        with_token_ids=players.judge_wants_token_ids,
        max_samples=players.judge_max_samples,
    )


def checkpoints_of(
    config: PpoConfig, run: Run, inputs: PpoInputs, players: Players, *, rest: Rest
) -> Checkpoints:
    """Where the learners save, and the settings by which steps are counted."""
    learners = {"learner": (players.policy, "_actor")}
    if players.critic is not None:
        learners["critic"] = (players.critic, "_critic")
    schedule = schedule_of(config, len(inputs.prompts))
    began = begun_with(config.actor, total_steps=schedule.policy_steps, section="actor.")
    if players.critic is not None:
        began |= begun_with(config.critic, total_steps=schedule.critic_steps, section="critic.")
    return Checkpoints(
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
        begun_with=began,
        before_write=rest.save,
        progress=run.progress,
    )
