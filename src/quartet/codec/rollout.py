"""Messages of quartet.api.rollout.v1, without those of a weight push (see codec.weights)."""

from __future__ import annotations

import numpy as np

from quartet.api.rollout.v1 import rollout_service_pb2 as pb
from quartet.codec.check import at_least, decode_request_id, distinct, invalid, one_each, present
from quartet.codec.common import (
    check_sampling,
    decode_duration,
    decode_failure,
    decode_finish_reason,
    decode_logprob_kind,
    decode_logprob_spec,
    decode_server_info,
    encode_duration,
    encode_failure,
    encode_finish_reason,
    encode_logprob_kind,
    encode_logprob_spec,
    encode_server_info,
)
from quartet.codec.enums import PAUSE_MODE, REPLICA_STATE
from quartet.codec.weights import (
    decode_push_backend,
    decode_weight_manifest,
    encode_push_backend,
    encode_weight_manifest,
)
from quartet.types import (
    Completion,
    GenerateRequest,
    GenerateResult,
    GroupCompletions,
    LogprobKind,
    PauseMode,
    PromptGroup,
    ReplicaState,
    RolloutInfo,
    SamplingParams,
    SleepRequest,
    VersionSpan,
    WakeRequest,
)

encode_replica_state = REPLICA_STATE.encode
decode_replica_state = REPLICA_STATE.decode
encode_pause_mode = PAUSE_MODE.encode
decode_pause_mode = PAUSE_MODE.decode

MAX_SAMPLES = 65_536
"""Most samples of one Generate. A number alone asks for them all, and each costs the server memory
before it has a token, so a slip of the caller's would take the server down."""


def encode_rollout_info_request(include_manifest: bool) -> pb.GetInfoRequest:
    """Encode a call of GetInfo."""
    return pb.GetInfoRequest(include_manifest=include_manifest)


def decode_rollout_info_request(message: pb.GetInfoRequest) -> bool:
    """True when the caller wants the manifest."""
    return message.include_manifest


def encode_rollout_info(info: RolloutInfo) -> pb.GetInfoResponse:
    """Encode the answer of GetInfo."""
    return pb.GetInfoResponse(
        info=encode_server_info(info.info),
        engine=info.engine,
        state=encode_replica_state(info.state),
        policy_version=info.policy_version,
        logprob_kinds=[encode_logprob_kind(kind) for kind in info.logprob_kinds],
        push_backends=[encode_push_backend(backend) for backend in info.push_backends],
        manifest=None if info.manifest is None else encode_weight_manifest(info.manifest),
        completions_in_flight=info.completions_in_flight,
        push_ranks=info.push_ranks,
    )


def decode_rollout_info(message: pb.GetInfoResponse) -> RolloutInfo:
    """Decode the answer of GetInfo."""
    at_least(0, message.policy_version, "policy_version")
    at_least(0, message.completions_in_flight, "completions_in_flight")
    for ranks in message.push_ranks:
        at_least(1, ranks, "push_ranks")
    manifest = decode_weight_manifest(message.manifest) if message.HasField("manifest") else None
    return RolloutInfo(
        info=decode_server_info(message.info),
        engine=message.engine,
        state=decode_replica_state(message.state, "state"),
        policy_version=message.policy_version,
        logprob_kinds=tuple(decode_logprob_kind(n, "logprob_kinds") for n in message.logprob_kinds),
        push_backends=tuple(decode_push_backend(n, "push_backends") for n in message.push_backends),
        manifest=manifest,
        completions_in_flight=message.completions_in_flight,
        push_ranks=tuple(message.push_ranks),
    )


def encode_sampling_params(sampling: SamplingParams) -> pb.SamplingParams:
    """Encode how to sample."""
    return pb.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
    )


def decode_sampling_params(message: pb.SamplingParams, field: str = "sampling") -> SamplingParams:
    """Decode how to sample; what is unset takes the contract's default."""
    default = SamplingParams()
    temperature = message.temperature if message.HasField("temperature") else default.temperature
    top_p = message.top_p if message.HasField("top_p") else default.top_p
    top_k = message.top_k if message.HasField("top_k") else default.top_k
    check_sampling(temperature, top_p, top_k, field)
    most = message.max_new_tokens if message.HasField("max_new_tokens") else None
    fewest = default.min_new_tokens
    if message.HasField("min_new_tokens"):
        fewest = message.min_new_tokens
    at_least(0, fewest, f"{field}.min_new_tokens")
    if most is not None:
        at_least(1, most, f"{field}.max_new_tokens")
        at_least(fewest, most, f"{field}.max_new_tokens")
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_new_tokens=most,
        min_new_tokens=fewest,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos if message.HasField("ignore_eos") else default.ignore_eos,
    )


def encode_prompt_group(group: PromptGroup) -> pb.PromptGroup:
    """Encode one prompt and the samples wanted of it."""
    return pb.PromptGroup(
        group_id=group.group_id,
        prompt_token_ids=group.prompt_token_ids,
        num_samples=group.num_samples,
        seeds=group.seeds,
        sample_ids=group.sample_ids,
    )


def decode_prompt_group(message: pb.PromptGroup, field: str = "group") -> PromptGroup:
    """Decode one prompt and the samples wanted of it."""
    if not message.prompt_token_ids:
        raise invalid(
            f"{field}.prompt_token_ids", "[]", "is empty", "a prompt has at least 1 token"
        )
    if min(message.prompt_token_ids) < 0:
        raise invalid(
            f"{field}.prompt_token_ids", min(message.prompt_token_ids), "has a negative token id"
        )
    at_least(1, message.num_samples, f"{field}.num_samples")
    _check_num_samples(message.num_samples, f"{field}.num_samples")
    one_each(message.seeds, message.num_samples, f"{field}.seeds", "samples")
    one_each(message.sample_ids, message.num_samples, f"{field}.sample_ids", "samples")
    return PromptGroup(
        group_id=present(message.group_id, f"{field}.group_id"),
        prompt_token_ids=tuple(message.prompt_token_ids),
        num_samples=message.num_samples,
        seeds=tuple(message.seeds),
        sample_ids=tuple(message.sample_ids),
    )


def encode_generate_request(request: GenerateRequest) -> pb.GenerateRequest:
    """Encode a call of Generate."""
    return pb.GenerateRequest(
        request_id=request.request_id,
        groups=[encode_prompt_group(group) for group in request.groups],
        sampling=encode_sampling_params(request.sampling),
        logprob_kind=encode_logprob_kind(request.logprob_kind),
        min_policy_version=request.min_policy_version,
        isolated=request.isolated,
    )


def decode_generate_request(message: pb.GenerateRequest) -> GenerateRequest:
    """Decode a call of Generate: at least one group, no group or sample twice, MAX_SAMPLES."""
    if not message.groups:
        raise invalid("groups", 0, "has no prompt to complete")
    distinct([group.group_id for group in message.groups], "groups.group_id")
    groups = tuple(decode_prompt_group(m, f"groups[{i}]") for i, m in enumerate(message.groups))
    _check_num_samples(sum(group.num_samples for group in groups), "groups.num_samples")
    distinct([name for group in message.groups for name in group.sample_ids], "groups.sample_ids")
    kind = LogprobKind.PROCESSED
    if message.HasField("logprob_kind"):
        kind = decode_logprob_kind(message.logprob_kind, "logprob_kind")
    oldest = message.min_policy_version if message.HasField("min_policy_version") else None
    return GenerateRequest(
        request_id=decode_request_id(message),
        groups=groups,
        sampling=decode_sampling_params(message.sampling),
        logprob_kind=kind,
        min_policy_version=oldest,
        isolated=message.isolated,
    )


def _check_num_samples(count: int, field: str) -> None:
    if count > MAX_SAMPLES:
        raise invalid(
            field,
            count,
            f"asks for {count} samples, above {MAX_SAMPLES}",
            "ask for fewer samples a call, in several calls",
        )


def encode_version_span(span: VersionSpan) -> pb.VersionSpan:
    """Encode which weights made some tokens."""
    return pb.VersionSpan(policy_version=span.policy_version, start=span.start, end=span.end)


def decode_version_span(message: pb.VersionSpan, field: str = "span") -> VersionSpan:
    """Decode which weights made some tokens."""
    at_least(0, message.policy_version, f"{field}.policy_version")
    at_least(0, message.start, f"{field}.start")
    at_least(message.start, message.end, f"{field}.end")
    return VersionSpan(policy_version=message.policy_version, start=message.start, end=message.end)


def encode_completion(completion: Completion) -> pb.Completion:
    """Encode one sample, or why there is none."""
    if completion.failure is not None:
        return pb.Completion(
            sample_id=completion.sample_id, error=encode_failure(completion.failure)
        )
    return pb.Completion(
        sample_id=completion.sample_id,
        # Lists of Python numbers: an array given to a repeated field is 2.4 times slower.
        token_ids=np.asarray(completion.token_ids, np.int32).tolist(),
        logprobs=np.asarray(completion.logprobs, np.float32).tolist(),
        finish_reason=encode_finish_reason(completion.finish_reason),
        versions=[encode_version_span(span) for span in completion.versions],
    )


def decode_completion(message: pb.Completion, field: str = "completion") -> Completion:
    """Decode one sample; every token has a log-probability and one version that made it."""
    if message.HasField("error"):
        failure = decode_failure(message.error, f"{field}.error")
        return Completion(sample_id=message.sample_id, failure=failure)
    count = len(message.token_ids)
    if len(message.logprobs) != count:
        raise invalid(
            f"{field}.logprobs",
            len(message.logprobs),
            f"has {len(message.logprobs)} elements for {count} tokens",
        )
    spans = tuple(
        decode_version_span(m, f"{field}.versions[{i}]") for i, m in enumerate(message.versions)
    )
    starts = [0, *(span.end for span in spans)]
    if [*(span.start for span in spans), count] != starts:
        raise invalid(
            f"{field}.versions", starts, f"do not cover its {count} tokens in order without gaps"
        )
    return Completion(
        sample_id=message.sample_id,
        # `fromiter`: `array` takes nearly twice as long with a repeated field.
        token_ids=np.fromiter(message.token_ids, np.int32, count),
        logprobs=np.fromiter(message.logprobs, np.float32, count),
        finish_reason=decode_finish_reason(message.finish_reason, f"{field}.finish_reason"),
        versions=spans,
    )


def encode_group_completions(group: GroupCompletions) -> pb.GroupCompletions:
    """Encode the samples of one prompt."""
    return pb.GroupCompletions(
        group_id=group.group_id,
        completions=[encode_completion(completion) for completion in group.completions],
    )


def decode_group_completions(
    message: pb.GroupCompletions, field: str = "group"
) -> GroupCompletions:
    """Decode the samples of one prompt."""
    return GroupCompletions(
        group_id=present(message.group_id, f"{field}.group_id"),
        completions=tuple(
            decode_completion(m, f"{field}.completions[{i}]")
            for i, m in enumerate(message.completions)
        ),
    )


def encode_generate_result(result: GenerateResult) -> pb.GenerateResponse:
    """Encode the answer of Generate."""
    return pb.GenerateResponse(
        groups=[encode_group_completions(group) for group in result.groups],
        logprob_spec=encode_logprob_spec(result.logprob_spec),
        replica=result.replica,
        queue_time=encode_duration(result.queue_seconds),
    )


def decode_generate_result(message: pb.GenerateResponse) -> GenerateResult:
    """Decode the answer of Generate."""
    return GenerateResult(
        groups=tuple(
            decode_group_completions(m, f"groups[{i}]") for i, m in enumerate(message.groups)
        ),
        logprob_spec=decode_logprob_spec(message.logprob_spec),
        replica=message.replica,
        queue_seconds=decode_duration(message.queue_time, "queue_time"),
    )


def encode_sleep_request(request: SleepRequest) -> pb.SleepRequest:
    """Encode a call of the rollout service's Sleep."""
    return pb.SleepRequest(request_id=request.request_id, level=request.level)


def decode_sleep_request(message: pb.SleepRequest) -> SleepRequest:
    """Decode a call of the rollout service's Sleep."""
    if message.level not in (1, 2):
        raise invalid("level", message.level, f"is {message.level}", "1 keeps, 2 forgets weights")
    return SleepRequest(request_id=decode_request_id(message), level=message.level)


def encode_sleep_response(state: ReplicaState) -> pb.SleepResponse:
    """Encode the state after Sleep."""
    return pb.SleepResponse(state=encode_replica_state(state))


def decode_sleep_response(message: pb.SleepResponse) -> ReplicaState:
    """Decode the state after Sleep."""
    return decode_replica_state(message.state, "state")


def encode_wake_request(request: WakeRequest) -> pb.WakeRequest:
    """Encode a call of the rollout service's Wake."""
    return pb.WakeRequest(request_id=request.request_id, tags=request.tags)


def decode_wake_request(message: pb.WakeRequest) -> WakeRequest:
    """Decode a call of the rollout service's Wake."""
    for tag in message.tags:
        if tag not in ("weights", "kv_cache"):
            raise invalid("tags", tag, f"has {tag!r}", "weights, kv_cache, or none for both")
    return WakeRequest(request_id=decode_request_id(message), tags=tuple(message.tags))


def encode_wake_response(state: ReplicaState) -> pb.WakeResponse:
    """Encode the state after Wake."""
    return pb.WakeResponse(state=encode_replica_state(state))


def decode_wake_response(message: pb.WakeResponse) -> ReplicaState:
    """Decode the state after Wake."""
    return decode_replica_state(message.state, "state")


def encode_pause_request(request_id: str, mode: PauseMode) -> pb.PauseRequest:
    """Encode a call of Pause."""
    return pb.PauseRequest(request_id=request_id, mode=encode_pause_mode(mode))


def decode_pause_request(message: pb.PauseRequest) -> tuple[str, PauseMode]:
    """Decode a call of Pause into its request_id and mode."""
    return decode_request_id(message), decode_pause_mode(message.mode, "mode")


def encode_pause_response(completions_held: int) -> pb.PauseResponse:
    """Encode how many completions are held."""
    return pb.PauseResponse(completions_held=completions_held)


def decode_pause_response(message: pb.PauseResponse) -> int:
    """Decode how many completions are held."""
    at_least(0, message.completions_held, "completions_held")
    return message.completions_held


def encode_resume_request(request_id: str) -> pb.ResumeRequest:
    """Encode a call of Resume; `decode_request_id` reads it."""
    return pb.ResumeRequest(request_id=request_id)


def encode_resume_response(completions_continued: int) -> pb.ResumeResponse:
    """Encode how many completions go on."""
    return pb.ResumeResponse(completions_continued=completions_continued)


def decode_resume_response(message: pb.ResumeResponse) -> int:
    """Decode how many completions go on."""
    at_least(0, message.completions_continued, "completions_continued")
    return message.completions_continued
