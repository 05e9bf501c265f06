"""What services say of themselves, compared before the first prompt.

A mismatch here is one readable line at the start; not found here, it would be a crash at step 40
or, worse, a run that learns something else.
"""

from __future__ import annotations

from collections.abc import Iterable

from quartet.errors import ConfigError
from quartet.types import (
    Head,
    LearnerInfo,
    LogprobKind,
    RewardInfo,
    RolloutInfo,
    ServerInfo,
    WeightManifest,
)

API_VERSION = "v1"

SHOWN_NAMES = 3
"""Tensor names given as examples in a message."""

PARAM_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Data types as tensors have them, and as --ds.param_dtype calls them."""


def check_server(info: ServerInfo, role: str, address: str) -> None:
    """The contract's version fits.

    Raises:
        ConfigError: it does not.
    """
    if info.api_version != API_VERSION:
        raise _wrong(
            role,
            address,
            f"speaks {info.api_version}, this trainer {API_VERSION}",
            "install the same version of Quartet on both sides",
        )


def check_sleep(info: ServerInfo, role: str, address: str, *, flag: str) -> None:
    """The service can give its memory back.

    Raises:
        ConfigError: it cannot.
    """
    if "sleep" not in info.capabilities:
        raise _wrong(role, address, "cannot sleep", f"leave --{flag} away")


def check_head(info: LearnerInfo, role: str, address: str, *, head: Head) -> None:
    """The learner trains the kind of model that its role needs.

    Raises:
        ConfigError: it does not.
    """
    if info.head is not head:
        raise _wrong(
            role,
            address,
            f"has the head {info.head}, needed is {head}",
            f"start it with --learner.head {head}",
        )


def check_tokenizer(info: ServerInfo, role: str, address: str, *, fingerprint: str) -> None:
    """The service reads token ids as the policy's tokenizer does.

    Raises:
        ConfigError: it has another tokenizer, or cannot say which.
    """
    if info.tokenizer_fingerprint != fingerprint:
        found = info.tokenizer_fingerprint[:12] or "none"
        raise _wrong(
            role,
            address,
            f"has another tokenizer than the policy (fingerprint {found}, the policy's is "
            f"{fingerprint[:12]}; its model is {info.model_name_or_path or 'unknown'})",
            "serve a model with the policy's tokenizer",
        )


def check_length(info: ServerInfo, role: str, address: str, *, max_len: int) -> None:
    """The service takes sequences as long as they may become.

    Raises:
        ConfigError: it does not.
    """
    if 0 < info.max_sequence_length < max_len:
        raise _wrong(
            role,
            address,
            f"takes {info.max_sequence_length} tokens, but sequences may have {max_len}",
            f"lower --data.max_len to {info.max_sequence_length}",
        )


def check_reward(info: RewardInfo, address: str, *, fingerprint: str) -> None:
    """A scorer that wants token ids shares the policy's tokenizer.

    Raises:
        ConfigError: it does not.
    """
    if info.needs_token_ids:
        check_tokenizer(info.info, "reward", address, fingerprint=fingerprint)


def check_score_terms(
    info: RewardInfo, address: str, *, with_token_ids: bool, max_samples: int
) -> None:
    """A scorer that joins takes the calls that the run makes, which were settled at its start.

    Args:
        info: what the scorer says of itself.
        address: where it is.
        with_token_ids: whether calls carry token ids.
        max_samples: most samples of a call; 0 is no limit.

    Raises:
        ConfigError: it does not.
    """
    if info.needs_token_ids and not with_token_ids:
        raise _wrong(
            "reward",
            address,
            "reads token ids, which no scorer did when the run began, so none are sent",
            "begin a run with it, or serve a scorer that reads text",
        )
    most = info.max_samples_per_call
    if most and not 0 < max_samples <= most:
        raise _wrong(
            "reward",
            address,
            f"takes {most} samples a call, and calls may have {max_samples or 'any number'}",
            "let it take as many as the others, or begin a run with it",
        )


def check_rollout(info: RolloutInfo, address: str) -> None:
    """The engine returns the log-probabilities that training needs.

    Raises:
        ConfigError: it does not.
    """
    if LogprobKind.PROCESSED not in info.logprob_kinds:
        raise _wrong(
            "rollout",
            address,
            f"its engine {info.engine} cannot return processed log-probabilities",
            "serve with another engine",
        )


def check_manifests(learner: WeightManifest | None, rollout: RolloutInfo, address: str) -> None:
    """What the learner would push is what the engine wants: names, shapes and data types.

    Raises:
        ConfigError: naming the first tensors that differ.
    """
    if learner is None or rollout.manifest is None:
        # A service that cannot say beforehand refuses in PrepareWeights.
        return
    sent = {t.name: t.shape for t in learner.tensors}
    wanted = {t.name: t.shape for t in rollout.manifest.tensors}
    missing = set(wanted) - set(sent) - set(learner.aliases)
    extra = set(sent) - set(wanted) - set(rollout.manifest.aliases)
    shapes = {n for n in set(sent) & set(wanted) if sent[n] != wanted[n]}
    problems = [
        f"{text} {_examples(names)}"
        for text, names in (
            ("it wants but would not get", missing),
            ("it would get but does not know", extra),
            ("in another shape it would get", shapes),
        )
        if names
    ]
    if problems:
        raise _wrong(
            "rollout",
            address,
            f"holds another model than the policy: {'; '.join(problems)}",
            "serve the model that is trained",
        )
    _check_dtypes(learner, rollout.manifest, address)


def _check_dtypes(learner: WeightManifest, rollout: WeightManifest, address: str) -> None:
    """Weights are copied bit for bit, so both sides must hold them in the same data types."""
    sent = {t.name: t.dtype for t in learner.tensors}
    others = [t for t in rollout.tensors if sent.get(t.name, t.dtype) != t.dtype]
    if others:
        first = others[0]
        wanted = sent[first.name]
        flag = PARAM_DTYPES.get(wanted, wanted)
        raise _wrong(
            "rollout",
            address,
            f"holds {_examples(t.name for t in others)} as {first.dtype}, the learner as {wanted}",
            f"start it with --ds.param_dtype {flag}, as the learner",
        )


def _examples(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - SHOWN_NAMES} more" if len(ordered) > SHOWN_NAMES else ""
    return ", ".join(ordered[:SHOWN_NAMES]) + more


def _wrong(role: str, address: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"the {role} service at {address} {problem}",
        reason="SERVICE_DOES_NOT_FIT",
        field=f"{role}.address",
        value=address,
        remedy=remedy,
    )
