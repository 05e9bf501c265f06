"""Client of the learner service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quartet import codec
from quartet.api.learner.v1 import learner_service_pb2 as pb
from quartet.api.learner.v1.learner_service_pb2_grpc import LearnerServiceStub
from quartet.clients.base import Client, new_request_id
from quartet.clients.chunks import cut, join_batches, split_batch, split_samples
from quartet.types import (
    DpoLoss,
    ExportModelRequest,
    ForwardOutput,
    ForwardRequest,
    ForwardResult,
    LearnerInfo,
    LoadCheckpointRequest,
    LoadCheckpointResult,
    PairwiseLoss,
    PushBackend,
    PushResult,
    PushWeightsRequest,
    RunSpec,
    SaveCheckpointRequest,
    SavedFolder,
    SequenceBatch,
    StartRunRequest,
    StartRunResult,
    TrainResult,
    TrainSamples,
    TrainStep,
)

_NOTHING = np.zeros(0, np.float32)


class LearnerClient(Client):
    """Trains one model.

    Every method takes `timeout` in seconds; None takes the deadline of rpc.policy. A `request_id`
    left out is a new one; give it to repeat a call.
    """

    room = "learner"
    service = "quartet.api.learner.v1.LearnerService"
    stub_class = LearnerServiceStub

    async def get_info(self, *, timeout: float | None = None) -> LearnerInfo:
        """What the server says of itself, and where its run stands."""
        answer = await self._unary("GetInfo", pb.GetInfoRequest(), timeout=timeout)
        return self._read(codec.decode_learner_info, answer)

    async def start_run(
        self, spec: RunSpec, *, request_id: str = "", timeout: float | None = None
    ) -> StartRunResult:
        """Build optimizer and schedule, and begin a run."""
        request = StartRunRequest(request_id=request_id or new_request_id(), spec=spec)
        answer = await self._unary(
            "StartRun",
            codec.encode_start_run_request(request),
            timeout=timeout,
            request_id=request.request_id,
        )
        return self._read(codec.decode_start_run_result, answer)

    async def forward(
        self,
        chunks: Sequence[SequenceBatch],
        *,
        output: ForwardOutput | None = None,
        temperature: float = 1.0,
        max_tokens_per_micro_batch: int | None = None,
        with_entropy: bool = False,
        timeout: float | None = None,
    ) -> list[ForwardResult]:
        """Evaluate the model. One result for each chunk, in order.

        Args:
            chunks: whole sequences; small chunks travel together, large ones in several messages.
            output: [N] log-probabilities, [N] values or [B] rewards; None is what the head gives.
            temperature: divisor of the logits.
            max_tokens_per_micro_batch: most tokens in one forward pass on one rank.
            with_entropy: compute the entropy of every token's distribution as well (lm head).
            timeout: seconds.
        """
        pieces = split_batch(join_batches(chunks)) if chunks else []
        requests = [
            codec.encode_forward_request(
                ForwardRequest(
                    chunk_id=str(number),
                    sequences=piece,
                    temperature=temperature,
                    output=output,
                    max_tokens_per_micro_batch=max_tokens_per_micro_batch,
                    with_entropy=with_entropy,
                )
            )
            for number, piece in enumerate(pieces)
        ]
        results: list[ForwardResult] = []
        if requests:
            answers = await self._stream_both("Forward", requests, timeout=timeout)
            for number, (piece, answer) in enumerate(zip(pieces, answers, strict=True)):
                results.append(self._read(codec.decode_forward_result, answer))
                self._check_piece(results[-1], number, piece, output)
        return self._by_chunk(chunks, results)

    async def train(
        self, step: TrainStep, samples: Sequence[TrainSamples], *, timeout: float | None = None
    ) -> TrainResult:
        """One optimizer step over all samples. A repeat of its request_id never steps twice."""
        # Pairs (chosen, rejected) stay in one message.
        unit = 2 if isinstance(step.loss, PairwiseLoss | DpoLoss) else 1
        pieces = [piece for each in samples for piece in split_samples(each, unit=unit)]
        requests = [codec.encode_train_request(part) for part in (step, *pieces)]
        answer = await self._stream_up(
            "Train", requests, timeout=timeout, request_id=step.request_id
        )
        return self._read(codec.decode_train_result, answer)

    async def save_checkpoint(
        self,
        *,
        folder: str,
        tag: str,
        trainer_state: bytes = b"",
        request_id: str = "",
        timeout: float | None = None,
    ) -> SavedFolder:
        """Write a checkpoint `tag` under `folder`, on the learner's disk."""
        request = SaveCheckpointRequest(
            request_id=request_id or new_request_id(),
            folder=folder,
            tag=tag,
            trainer_state=trainer_state,
        )
        message = codec.encode_save_checkpoint_request(request)
        answer = await self._unary(
            "SaveCheckpoint", message, timeout=timeout, request_id=request.request_id
        )
        return self._read(codec.decode_save_checkpoint_result, answer)

    async def load_checkpoint(
        self, *, folder: str, tag: str = "", request_id: str = "", timeout: float | None = None
    ) -> LoadCheckpointResult:
        """Go on from a checkpoint; without a tag, from the latest whole one."""
        request = LoadCheckpointRequest(
            request_id=request_id or new_request_id(), folder=folder, tag=tag
        )
        message = codec.encode_load_checkpoint_request(request)
        answer = await self._unary(
            "LoadCheckpoint", message, timeout=timeout, request_id=request.request_id
        )
        return self._read(codec.decode_load_checkpoint_result, answer)

    async def export_model(
        self,
        *,
        folder: str,
        config_values: Mapping[str, float] | None = None,
        request_id: str = "",
        timeout: float | None = None,
    ) -> SavedFolder:
        """Write a folder that transformers opens, with `config_values` in its config.json."""
        request = ExportModelRequest(
            request_id=request_id or new_request_id(),
            folder=folder,
            config_values=config_values or {},
        )
        message = codec.encode_export_model_request(request)
        answer = await self._unary(
            "ExportModel", message, timeout=timeout, request_id=request.request_id
        )
        return self._read(codec.decode_export_model_result, answer)

    async def push_weights(
        self,
        *,
        policy_version: int,
        addresses: Sequence[str],
        backend: PushBackend | None = None,
        bucket_bytes: int = 64 << 20,
        group_timeout: float = 30.0,
        folder: str = "",
        request_id: str = "",
        timeout: float | None = None,
    ) -> PushResult:
        """Push the weights to the rollout servers at `addresses`, as `policy_version`."""
        request = PushWeightsRequest(
            request_id=request_id or new_request_id(),
            policy_version=policy_version,
            addresses=tuple(addresses),
            backend=backend,
            bucket_bytes=bucket_bytes,
            group_timeout=group_timeout,
            folder=folder,
        )
        message = codec.encode_push_weights_request(request)
        answer = await self._unary(
            "PushWeights", message, timeout=timeout, request_id=request.request_id
        )
        return self._read(codec.decode_push_result, answer)

    async def sleep(self, *, request_id: str = "", timeout: float | None = None) -> None:
        """Move optimizer state and parameters off the device."""
        message = codec.encode_learner_sleep_request(request_id or new_request_id())
        await self._unary("Sleep", message, timeout=timeout)

    async def wake(self, *, request_id: str = "", timeout: float | None = None) -> None:
        """Move them back."""
        message = codec.encode_learner_wake_request(request_id or new_request_id())
        await self._unary("Wake", message, timeout=timeout)

    def _by_chunk(
        self, chunks: Sequence[SequenceBatch], results: Sequence[ForwardResult]
    ) -> list[ForwardResult]:
        """Results of messages as results of chunks."""
        tokens = [chunk.num_tokens for chunk in chunks]
        if not results:
            return [ForwardResult(chunk_id=str(i), output=_NOTHING) for i in range(len(chunks))]
        output = np.concatenate([result.output for result in results])
        per_token = len(output) == sum(tokens)
        sizes = tokens if per_token else [len(chunk) for chunk in chunks]
        if len(output) != sum(sizes):
            raise self._broken("some chunks have a number a token, others one a sequence")
        found = [result.entropy for result in results if result.entropy is not None]
        if found and len(found) != len(results):
            raise self._broken("some chunks have entropies, others have none")
        entropies = cut(np.concatenate(found), tokens) if found else [None] * len(chunks)
        return [
            ForwardResult(chunk_id=str(i), output=part, entropy=entropy)
            for i, (part, entropy) in enumerate(zip(cut(output, sizes), entropies, strict=True))
        ]

    def _check_piece(
        self,
        result: ForwardResult,
        number: int,
        piece: SequenceBatch,
        output: ForwardOutput | None,
    ) -> None:
        """Refuse a result that is not that of its chunk."""
        if result.chunk_id != str(number):
            raise self._broken(f"chunk {result.chunk_id!r} came back in the place of {number}")
        allowed = {piece.num_tokens, len(piece)}
        if output is not None:
            rewards = output is ForwardOutput.REWARDS
            allowed = {len(piece)} if rewards else {piece.num_tokens}
        if len(result.output) not in allowed:
            raise self._broken(f"{len(result.output)} numbers for {piece.num_tokens} tokens")
        if result.entropy is not None and len(result.entropy) != piece.num_tokens:
            raise self._broken(f"{len(result.entropy)} entropies for {piece.num_tokens} tokens")
