"""Client of the ref service."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quartet import codec
from quartet.api.ref.v1 import ref_service_pb2 as pb
from quartet.api.ref.v1.ref_service_pb2_grpc import RefServiceStub
from quartet.clients.base import Client, new_request_id
from quartet.clients.chunks import cut, join_batches, split_batch
from quartet.types import ComputeLogprobsRequest, RefInfo, SequenceBatch


class RefClient(Client):
    """Log-probabilities of given tokens under a frozen model."""

    room = "ref"
    service = "quartet.api.ref.v1.RefService"
    stub_class = RefServiceStub

    async def get_info(self, *, timeout: float | None = None) -> RefInfo:
        """What the server says of itself."""
        answer = await self._unary("GetInfo", pb.GetInfoRequest(), timeout=timeout)
        return self._read(codec.decode_ref_info, answer)

    async def compute_logprobs(
        self,
        chunks: Sequence[SequenceBatch],
        *,
        temperature: float = 1.0,
        max_tokens_per_micro_batch: int | None = None,
        timeout: float | None = None,
    ) -> list[NDArray[np.float32]]:
        """The [N] log-probabilities of each chunk, aligned with its tokens.

        Args:
            chunks: whole sequences; small chunks travel together, large ones in several messages.
            temperature: divisor of the logits, the one the policy is sampled with.
            max_tokens_per_micro_batch: most tokens in one forward pass; None is the server's own.
            timeout: seconds; None takes the deadline of rpc.policy.
        """
        pieces = split_batch(join_batches(chunks)) if chunks else []
        requests = [
            codec.encode_compute_logprobs_request(
                ComputeLogprobsRequest(
                    chunk_id=str(number),
                    sequences=piece,
                    temperature=temperature,
                    max_tokens_per_micro_batch=max_tokens_per_micro_batch,
                )
            )
            for number, piece in enumerate(pieces)
        ]
        if not requests:
            return [np.zeros(0, np.float32) for _ in chunks]
        answers = await self._stream_both("ComputeLogprobs", requests, timeout=timeout)
        parts: list[NDArray[np.float32]] = []
        for number, (piece, answer) in enumerate(zip(pieces, answers, strict=True)):
            chunk_id, logprobs = self._read(codec.decode_compute_logprobs_response, answer)
            if chunk_id != str(number) or len(logprobs) != piece.num_tokens:
                raise self._broken(f"chunk {chunk_id!r} came back in the place of {number}")
            parts.append(logprobs)
        return cut(np.concatenate(parts), [chunk.num_tokens for chunk in chunks])

    async def sleep(self, *, request_id: str = "", timeout: float | None = None) -> None:
        """Free device memory."""
        message = codec.encode_ref_sleep_request(request_id or new_request_id())
        await self._unary("Sleep", message, timeout=timeout)

    async def wake(self, *, request_id: str = "", timeout: float | None = None) -> None:
        """Take device memory back."""
        message = codec.encode_ref_wake_request(request_id or new_request_id())
        await self._unary("Wake", message, timeout=timeout)
