"""Bytes of one message per major type, that every later version must still read the same.

    python tools/wire_goldens.py            write the files that are missing
    python tools/wire_goldens.py --check    fail where a file is missing

A golden that exists is never written again: it is what an older version sent. To add one, add an
entry to GOLDENS and run this once. `tests/contract/test_goldens.py` decodes each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from quartet import codec, types

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "golden" / "wire"

_BATCH = types.SequenceBatch.of([[5, 6, 7], [8, 9]], ["s0", "s1"])
_FLAT = np.array([0, -0.5, -1.25, 0, -2], np.float32)
_SPEC = types.LogprobSpec(kind=types.LogprobKind.PROCESSED, temperature=0.7, top_p=0.95, top_k=50)
_FAILURE = types.Failure(
    error_class="DATA", reason="PROMPT_TOO_LONG", message="too long", replica="r-1"
)
_INFO = types.ServerInfo(
    service="rollout",
    server_version="0.1.0",
    replica="r-1",
    digest="d1",
    tokenizer_fingerprint="f1",
    capabilities=("sleep",),
    max_sequence_length=4096,
    max_concurrent_calls=64,
    model_name_or_path="m",
)
_MANIFEST = types.WeightManifest(
    tensors=(
        types.TensorSpec(name="embed", dtype="bfloat16", shape=(50, 8)),
        types.TensorSpec(name="norm", dtype="float32", shape=(8,)),
    ),
    bucket_bytes=1 << 20,
    aliases={"head": "embed"},
)

GOLDENS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "sequence_batch": (_BATCH, codec.encode_sequence_batch, codec.decode_sequence_batch),
    "generate_request": (
        types.GenerateRequest(
            request_id="q1",
            groups=(
                types.PromptGroup(
                    group_id="g0",
                    prompt_token_ids=(1, 2, 3),
                    num_samples=2,
                    seeds=(7, 2**64 - 1),
                    sample_ids=("a", "b"),
                ),
            ),
            sampling=types.SamplingParams(
                temperature=0.0, top_p=0.9, top_k=20, max_new_tokens=8, stop_token_ids=(2,)
            ),
            logprob_kind=types.LogprobKind.RAW,
            min_policy_version=0,
            isolated=True,
        ),
        codec.encode_generate_request,
        codec.decode_generate_request,
    ),
    "generate_result": (
        types.GenerateResult(
            groups=(
                types.GroupCompletions(
                    group_id="g0",
                    completions=(
                        types.Completion(
                            sample_id="a",
                            token_ids=np.array([4, 5, 2], np.int32),
                            logprobs=np.array([-0.5, -1.5, -0.25], np.float32),
                            finish_reason=types.FinishReason.STOP,
                            versions=(
                                types.VersionSpan(policy_version=3, start=0, end=2),
                                types.VersionSpan(policy_version=4, start=2, end=3),
                            ),
                        ),
                        types.Completion(sample_id="b", failure=_FAILURE),
                    ),
                ),
            ),
            logprob_spec=_SPEC,
            replica="r-1",
            queue_seconds=0.25,
        ),
        codec.encode_generate_result,
        codec.decode_generate_result,
    ),
    "rollout_info": (
        types.RolloutInfo(
            info=_INFO,
            engine="transformers",
            state=types.ReplicaState.SERVING,
            policy_version=3,
            logprob_kinds=(types.LogprobKind.RAW, types.LogprobKind.PROCESSED),
            push_backends=(types.PushBackend.GLOO,),
            manifest=_MANIFEST,
            completions_in_flight=2,
        ),
        codec.encode_rollout_info,
        codec.decode_rollout_info,
    ),
    "rollout_info_of_workers": (
        types.RolloutInfo(
            info=_INFO,
            engine="vllm",
            state=types.ReplicaState.SERVING,
            policy_version=3,
            push_backends=(types.PushBackend.NCCL, types.PushBackend.FILE),
            push_ranks=(4, 1),
        ),
        codec.encode_rollout_info,
        codec.decode_rollout_info,
    ),
    "prepare_weights_request": (
        types.PrepareWeightsRequest(
            request_id="q1",
            epoch=2,
            policy_version=4,
            manifest=_MANIFEST,
            backend=types.PushBackend.GLOO,
            rendezvous=types.Rendezvous(store_address="h:1", group_name="push-2"),
            rank=1,
            world_size=3,
            group_timeout=12.5,
        ),
        codec.encode_prepare_weights_request,
        codec.decode_prepare_weights_request,
    ),
    "prepare_weights_request_by_ipc": (
        types.PrepareWeightsRequest(
            request_id="q1",
            epoch=2,
            policy_version=4,
            manifest=_MANIFEST,
            backend=types.PushBackend.IPC,
            rendezvous=types.Rendezvous(
                ipc=types.IpcSegment(
                    machine="boot",
                    size_bytes=1056,
                    process_id=7,
                    descriptor=9,
                    inode=2**40,
                    gpu_uuid="gpu",
                    cuda_handle=bytes(range(64)),
                )
            ),
            rank=1,
            world_size=2,
            group_timeout=12.5,
        ),
        codec.encode_prepare_weights_request,
        codec.decode_prepare_weights_request,
    ),
    "score_request": (
        types.ScoreRequest(
            request_id="q1",
            items=(
                types.ScoreItem(
                    sample_id="a",
                    prompt="1 + 1 =",
                    query="1 + 1 = 2",
                    label={"answer": "2"},
                    token_ids=(1, 2, 3),
                    prompt_length=2,
                    truncated=True,
                ),
            ),
            tokenizer_fingerprint="f1",
        ),
        codec.encode_score_request,
        codec.decode_score_request,
    ),
    "score_batch": (
        types.ScoreBatch(
            results=(
                types.ScoreResult(
                    sample_id="a",
                    outcome=types.Reward(reward=0.5, score=1.0, extra_logs={"length": 3.0}),
                ),
                types.ScoreResult(sample_id="b", outcome=_FAILURE),
            ),
            replica="r-1",
            server_version="0.1.0",
            digest="d1",
        ),
        codec.encode_score_batch,
        codec.decode_score_batch,
    ),
    "compute_logprobs_request": (
        types.ComputeLogprobsRequest(
            chunk_id="0", sequences=_BATCH, temperature=0.7, max_tokens_per_micro_batch=64
        ),
        codec.encode_compute_logprobs_request,
        codec.decode_compute_logprobs_request,
    ),
    "start_run_request": (
        types.StartRunRequest(
            request_id="q1",
            spec=types.RunSpec(
                run_id="run",
                optimizer=types.OptimizerConfig(type="muon", lr=1e-3, muon=types.MuonConfig()),
                schedule=types.ScheduleConfig(name="linear", total_steps=10, warmup_ratio=0.1),
                max_norm=0.0,
                seed=7,
                full_determinism=True,
            ),
        ),
        codec.encode_start_run_request,
        codec.decode_start_run_request,
    ),
    "forward_request": (
        types.ForwardRequest(
            chunk_id="0",
            sequences=_BATCH,
            temperature=0.7,
            output=types.ForwardOutput.LOGPROBS,
            max_tokens_per_micro_batch=64,
            with_entropy=True,
        ),
        codec.encode_forward_request,
        codec.decode_forward_request,
    ),
    "forward_result": (
        types.ForwardResult(chunk_id="0", output=_FLAT, entropy=-_FLAT),
        codec.encode_forward_result,
        codec.decode_forward_result,
    ),
    "train_step_policy": (
        types.TrainStep(
            request_id="q1",
            run_id="run",
            loss=types.PolicyLoss(
                type="gspo",
                dual_clip=3.0,
                aggregation="seq-mean-token-sum-norm",
                aggregation_length=100,
                entropy_coef=0.0,
                kl_loss=types.KlLoss(coef=0.01, estimator="k3", unbiased_gradient=True),
                mismatch_correction=types.MismatchCorrection(level="seq", mode="clip"),
                temperature=0.7,
            ),
            expected_optimizer_steps=5,
            max_tokens_per_micro_batch=64,
            micro_batch_size=2,
        ),
        codec.encode_train_request,
        codec.decode_train_request,
    ),
    "train_step_dpo": (
        types.TrainStep(
            request_id="q1",
            run_id="run",
            loss=types.DpoLoss(beta=0.2, ipo=True, label_smoothing=0.1, nll_loss_coef=0.5),
            expected_optimizer_steps=0,
        ),
        codec.encode_train_request,
        codec.decode_train_request,
    ),
    "train_samples": (
        types.TrainSamples(
            sequences=_BATCH,
            action_mask=np.array([0, 1, 1, 0, 1], np.bool_),
            advantages=_FLAT,
            old_logprobs=_FLAT,
            ref_logprobs=_FLAT,
            rollout_logprobs=_FLAT,
            returns=_FLAT,
            old_values=_FLAT,
            margins=np.array([1.5], np.float32),
            rollout_logprob_spec=_SPEC,
        ),
        codec.encode_train_request,
        codec.decode_train_request,
    ),
    "train_result": (
        types.TrainResult(
            optimizer_steps=6,
            applied=False,
            metrics={"policy_loss": 0.5},
            grad_norm=1.5,
            lr=1e-6,
            num_samples=2,
            num_action_tokens=3,
            num_tokens=5,
            num_micro_batches=1,
            seconds=0.5,
        ),
        codec.encode_train_result,
        codec.decode_train_result,
    ),
    "push_weights_request": (
        types.PushWeightsRequest(
            request_id="q1",
            policy_version=4,
            addresses=("h:1", "h:2"),
            backend=types.PushBackend.FILE,
            bucket_bytes=1024,
            group_timeout=5.0,
            folder="/shared",
        ),
        codec.encode_push_weights_request,
        codec.decode_push_weights_request,
    ),
    "push_result": (
        types.PushResult(
            replicas=(
                types.ReplicaPushResult(address="h:1", replica="r-1", committed=True),
                types.ReplicaPushResult(address="h:2", failed_phase="prepare", error="gone"),
            ),
            total_bytes=832,
            num_buckets=2,
            prepare_seconds=0.25,
            transfer_seconds=0.5,
            commit_seconds=0.125,
            digest="abc",
        ),
        codec.encode_push_result,
        codec.decode_push_result,
    ),
    "push_result_phases": (
        types.PushResult(
            replicas=(types.ReplicaPushResult(address="h:1", replica="r-1", committed=True),),
            gather_seconds=0.5,
            pack_seconds=0.25,
            digest_seconds=0.125,
            broadcast_seconds=1.5,
        ),
        codec.encode_push_result,
        codec.decode_push_result,
    ),
}
"""By file name: the value, its encoder, its decoder."""


def missing() -> list[str]:
    """Names without a file."""
    return [name for name in GOLDENS if not (FOLDER / f"{name}.binpb").exists()]


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where missing")
    check = parser.parse_args().check
    for name in missing():
        print(f"{'missing' if check else 'written'}: {name}", file=sys.stderr)
        if check:
            continue
        value, encode, _ = GOLDENS[name]
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / f"{name}.binpb").write_bytes(encode(value).SerializeToString(deterministic=True))
    return 1 if check and missing() else 0


if __name__ == "__main__":
    sys.exit(main())
