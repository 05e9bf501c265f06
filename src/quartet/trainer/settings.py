"""From flags to what learners are told: optimizer, schedule and losses."""

from __future__ import annotations

from typing import Any

from quartet.config import (
    AdvantageConfig,
    MuonConfig,
    OptimizerFields,
    PpoConfig,
)
from quartet.config.derive import aggregation_length, clip_band, correction_band, critic_model
from quartet.config.services import narrowed
from quartet.config.tree import flat
from quartet.types import (
    KlLoss,
    MismatchCorrection,
    OptimizerConfig,
    PolicyLoss,
    RunSpec,
    ScheduleConfig,
    ValueLoss,
)
from quartet.types import MuonConfig as MuonSettings

FEW_STEPS = 3
"""Optimizer steps of which the first, with a rate of 0, is a third or more."""

STARTS_ABOVE_0 = frozenset({"constant", "reduce_lr_on_plateau", "cosine_warmup_with_min_lr"})
"""Schedules of transformers whose first rate is not 0."""


def run_spec(
    run_id: str,
    optimizer: OptimizerFields,
    *,
    total_steps: int,
    seed: int,
    full_determinism: bool = False,
    aux_loss_coef: float = 0.0,
    ema_beta: float | None = None,
) -> RunSpec:
    """What StartRun needs, from the optimizer's flags and the known number of steps.

    `aux_loss_coef` is that of the losses to come: a model without a router refuses the run.
    With `ema_beta` the learner averages its weights and exports the average.
    """
    return RunSpec(
        run_id=run_id,
        optimizer=OptimizerConfig(
            type=optimizer.optim,
            lr=optimizer.adam.lr,
            betas=optimizer.adam.betas,
            eps=optimizer.adam.eps,
            weight_decay=optimizer.adam.weight_decay,
            muon=_muon(optimizer.muon) if optimizer.optim == "muon" else None,
        ),
        schedule=ScheduleConfig(
            name=optimizer.lr_scheduler,
            total_steps=max(1, total_steps),
            warmup_ratio=optimizer.lr_warmup_ratio,
            min_lr_ratio=optimizer.min_lr_ratio,
        ),
        max_norm=optimizer.max_norm,
        seed=seed,
        full_determinism=full_determinism,
        with_router_loss=aux_loss_coef != 0,
        ema_beta=ema_beta,
    )


def begun_with(
    optimizer: OptimizerFields, *, total_steps: int, section: str = ""
) -> dict[str, Any]:
    """By name, what `run_spec` tells a learner once: a run that goes on keeps what it began with.

    Args:
        optimizer: the flags.
        total_steps: optimizer steps that the schedule is laid out for.
        section: as in `warmup_note`.
    """
    flags = flat(narrowed(OptimizerFields, optimizer))
    if optimizer.optim != "muon":
        flags = {name: value for name, value in flags.items() if not name.startswith("muon.")}
    return {f"{section}{name}": value for name, value in flags.items()} | {
        f"steps of {section}lr_scheduler": total_steps
    }


def nothing_left_note(behind: int, total: int, passes: str) -> str:
    """What to know of a run that went on from behind its last step; empty for others.

    Args:
        behind: steps behind the checkpoint.
        total: steps of the run.
        passes: the flag that gives it more.
    """
    if not behind or behind < total:
        return ""
    return (
        f"note: the checkpoint is of step {behind} and the run ends with step {total}, so nothing "
        f"is left to train; more passes by --{passes}, where --train.max_steps allows them."
    )


def warmup_note(spec: RunSpec, section: str = "") -> str:
    """What a user should know where warm-up takes a third of a run or more; else nothing.

    The rate rises from 0, so the first optimizer step changes no weight.

    Args:
        spec: what the learner is told.
        section: where its optimizer's flags are: "actor.", "critic.", or nothing.
    """
    schedule = spec.schedule
    few = schedule.total_steps <= FEW_STEPS
    if not few or schedule.warmup_ratio <= 0 or schedule.name in STARTS_ABOVE_0:
        return ""
    return (
        f"note: {section}lr_warmup_ratio: warm-up begins with a rate of 0, so 1 of "
        f"{schedule.total_steps} optimizer steps trains nothing; 0 takes warm-up away."
    )


def policy_loss(config: PpoConfig, *, kl_coef: float) -> PolicyLoss:
    """The policy's loss. `kl_coef` counts where KL is part of the loss."""
    actor, kl = config.actor, config.algo.kl
    low, high = clip_band(actor)
    kl_loss = None
    if kl.use_loss and kl.init_coef > 0:
        kl_loss = KlLoss(
            coef=kl_coef,
            estimator=kl.estimator,
            unbiased_gradient=kl.unbiased_gradient,
            bound_all=kl.bound_all,
        )
    return PolicyLoss(
        type=actor.policy_loss_type,
        eps_clip_low=low,
        eps_clip_high=high,
        dual_clip=actor.dual_clip,
        # The ratio of gspo is one of whole sequences, and so is its mean.
        aggregation=(
            "seq-mean-token-mean" if actor.policy_loss_type == "gspo" else actor.loss_agg_mode
        ),
        aggregation_length=aggregation_length(config),
        entropy_coef=actor.entropy_coef,
        kl_loss=kl_loss,
        aux_loss_coef=actor.aux_loss_coef,
        mismatch_correction=mismatch_correction(config.algo.advantage),
        temperature=config.rollout.temperature,
    )


def mismatch_correction(advantage: AdvantageConfig) -> MismatchCorrection | None:
    """Correction between rollout engine and learner; None when it is off."""
    if advantage.is_correction_level == "off":
        return None
    low, high = correction_band(advantage)
    return MismatchCorrection(
        level=advantage.is_correction_level,
        mode=advantage.is_correction_mode,
        gating=advantage.is_correction_gating,
        threshold_low=low,
        threshold_high=high,
    )


def value_loss(config: PpoConfig) -> ValueLoss:
    """The critic's loss."""
    return ValueLoss(
        value_clip=config.critic.value_clip, aux_loss_coef=critic_aux_loss_coef(config)
    )


def critic_aux_loss_coef(config: PpoConfig) -> float:
    """The policy's weight of a router's loss, for a critic that starts from the same model.

    A critic from elsewhere, a reward model for example, may well have no router.
    """
    same = critic_model(config) == config.actor.model_name_or_path
    return config.actor.aux_loss_coef if same else 0.0


def _muon(muon: MuonConfig) -> MuonSettings:
    return MuonSettings(
        lr=muon.lr, momentum=muon.momentum, ns_steps=muon.ns_steps, nesterov=muon.nesterov
    )
