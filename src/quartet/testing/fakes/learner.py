"""A learner service that counts its steps."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from quartet import codec
from quartet.api.learner.v1 import learner_service_pb2 as pb
from quartet.api.learner.v1 import learner_service_pb2_grpc as pb_grpc
from quartet.clients.rollout import RolloutClient
from quartet.errors import QuartetError, RequestError, StateError
from quartet.rpc.idempotency import IdempotencyCache, RequestDigest
from quartet.testing.fakes import model
from quartet.testing.fakes.script import Script
from quartet.types import (
    CommitWeightsRequest,
    ForwardOutput,
    ForwardRequest,
    ForwardResult,
    Head,
    LearnerInfo,
    LoadCheckpointResult,
    PrepareWeightsRequest,
    PushBackend,
    PushResult,
    PushWeightsRequest,
    Rendezvous,
    ReplicaPushResult,
    RunSpec,
    SavedFolder,
    ServerInfo,
    StartRunResult,
    TrainResult,
    TrainSamples,
    TrainStep,
    WeightManifest,
)

_OUTPUT_OF_HEAD = {
    Head.LM: ForwardOutput.LOGPROBS,
    Head.VALUE: ForwardOutput.VALUES,
    Head.REWARD: ForwardOutput.REWARDS,
}


class FakeLearner(pb_grpc.LearnerServiceServicer):
    """Trains the imaginary model: every step makes each token a little likelier.

    Args:
        head: lm, value or reward.
        info: what GetInfo says.
        manifest: the tensors that a push would send.
    """

    name = "learner"

    def __init__(
        self,
        head: Head = Head.LM,
        info: ServerInfo | None = None,
        manifest: WeightManifest | None = None,
    ) -> None:
        self.script = Script()
        self.head = head
        self.server_info = info or ServerInfo(service="learner", replica="learner-fake")
        self.replica = self.server_info.replica
        self.manifest = manifest or WeightManifest(tensors=())
        self.spec: RunSpec | None = None
        self.optimizer_steps = 0
        self.policy_version = 0
        self.trained: list[tuple[TrainStep, list[TrainSamples]]] = []
        """Every step that was applied, with its samples."""
        self._checkpoints: dict[tuple[str, str], LoadCheckpointResult] = {}
        self._epochs = itertools.count(1)
        self._answers: IdempotencyCache[pb.TrainResponse] = IdempotencyCache(
            stop_with_callers=False
        )

    def register(self, server: grpc.aio.Server) -> str:
        """Add the servicer."""
        pb_grpc.add_LearnerServiceServicer_to_server(self, server)
        return pb.DESCRIPTOR.services_by_name["LearnerService"].full_name

    async def start(self) -> None:
        """Nothing to load."""

    async def stop(self) -> None:
        """Nothing to let go."""

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        """Say where the run stands."""
        await self.script.enter("GetInfo", None)
        return codec.encode_learner_info(
            LearnerInfo(
                info=self.server_info,
                head=self.head,
                num_parameters=model.VOCABULARY,
                run_id=self.spec.run_id if self.spec else "",
                optimizer_steps=self.optimizer_steps,
                policy_version=self.policy_version,
                manifest=self.manifest,
            )
        )

    async def StartRun(self, request: pb.StartRunRequest, context: Any) -> pb.StartRunResponse:
        """Begin a run, or go on with the one of this name."""
        asked = codec.decode_start_run_request(request)
        await self.script.enter("StartRun", asked)
        resumed = self.spec is not None and self.spec.run_id == asked.spec.run_id
        if not resumed:
            self.spec, self.optimizer_steps = asked.spec, 0
        return codec.encode_start_run_result(
            StartRunResult(
                optimizer_steps=self.optimizer_steps,
                resumed=resumed,
                num_parameters=model.VOCABULARY,
            )
        )

    async def Forward(
        self, request_iterator: AsyncIterator[pb.ForwardRequest], context: Any
    ) -> AsyncIterator[pb.ForwardResponse]:
        """Evaluate each chunk."""
        self._require_run()
        async for request in request_iterator:
            chunk = codec.decode_forward_request(request)
            await self.script.enter("Forward", chunk)
            yield codec.encode_forward_result(self._evaluate(chunk))

    def _evaluate(self, chunk: ForwardRequest) -> ForwardResult:
        output = chunk.output or _OUTPUT_OF_HEAD[self.head]
        if output is not _OUTPUT_OF_HEAD[self.head]:
            raise RequestError(
                f"a {self.head} head gives no {output}", field="output", value=output
            )
        batch, steps = chunk.sequences, self.optimizer_steps
        flat = {
            ForwardOutput.LOGPROBS: lambda: model.logprobs(batch, steps, chunk.temperature),
            ForwardOutput.VALUES: lambda: model.values(batch, steps),
            ForwardOutput.REWARDS: lambda: model.rewards(batch, steps),
        }[output]()
        entropy = model.entropies(batch) if chunk.with_entropy else None
        return ForwardResult(chunk_id=chunk.chunk_id, output=flat, entropy=entropy)

    async def Train(
        self, request_iterator: AsyncIterator[pb.TrainRequest], context: Any
    ) -> pb.TrainResponse:
        """One step."""
        messages = [message async for message in request_iterator]
        parts = [codec.decode_train_request(message) for message in messages]
        await self.script.enter("Train", parts)
        if not parts or not isinstance(parts[0], TrainStep):
            raise RequestError("the header does not come first", field="header")
        step = parts[0]
        samples = [part for part in parts[1:] if isinstance(part, TrainSamples)]
        return await self._answers.run(
            step.request_id, RequestDigest(*messages), lambda: self._train(step, samples)
        )

    async def _train(self, step: TrainStep, samples: list[TrainSamples]) -> pb.TrainResponse:
        spec = self._require_run()
        if step.run_id != spec.run_id or step.expected_optimizer_steps != self.optimizer_steps:
            raise StateError(
                f"run {spec.run_id} stands at step {self.optimizer_steps}",
                reason="WRONG_STEP",
                field="expected_optimizer_steps",
                value=str(step.expected_optimizer_steps),
            )
        if not samples:
            raise RequestError("a step without samples", field="samples")
        self.optimizer_steps += 1
        self.trained.append((step, samples))
        masks = [each.action_mask for each in samples if each.action_mask is not None]
        return codec.encode_train_result(
            TrainResult(
                optimizer_steps=self.optimizer_steps,
                metrics=self._metrics(),
                grad_norm=1.0 / self.optimizer_steps,
                lr=spec.optimizer.lr,
                num_samples=sum(len(each.sequences) for each in samples),
                num_action_tokens=sum(int(np.count_nonzero(mask)) for mask in masks),
                num_tokens=sum(each.sequences.num_tokens for each in samples),
                num_micro_batches=len(samples),
            )
        )

    def _metrics(self) -> dict[str, float]:
        loss = 1.0 / self.optimizer_steps
        if self.head is Head.VALUE:
            return {"critic_loss": loss, "values": 0.0}
        if self.head is Head.REWARD:
            return {"loss": loss, "acc": 1.0, "chosen_reward": 1.0, "reject_reward": 0.0}
        return {"policy_loss": loss, "ppo_clip_ratio": 0.0, "ppo_kl": 0.0, "gpt_loss": loss}

    async def SaveCheckpoint(
        self, request: pb.SaveCheckpointRequest, context: Any
    ) -> pb.SaveCheckpointResponse:
        """Remember where the run stands."""
        asked = codec.decode_save_checkpoint_request(request)
        await self.script.enter("SaveCheckpoint", asked)
        spec = self._require_run()
        if (asked.folder, asked.tag) in self._checkpoints:
            raise RequestError(f"{asked.tag} exists", field="tag", value=asked.tag)
        self._checkpoints[asked.folder, asked.tag] = LoadCheckpointResult(
            tag=asked.tag,
            optimizer_steps=self.optimizer_steps,
            trainer_state=asked.trainer_state,
            run_id=spec.run_id,
        )
        return codec.encode_save_checkpoint_result(SavedFolder(path=f"{asked.folder}/{asked.tag}"))

    async def LoadCheckpoint(
        self, request: pb.LoadCheckpointRequest, context: Any
    ) -> pb.LoadCheckpointResponse:
        """Go back to where the run stood."""
        asked = codec.decode_load_checkpoint_request(request)
        await self.script.enter("LoadCheckpoint", asked)
        tags = [tag for folder, tag in self._checkpoints if folder == asked.folder]
        tag = asked.tag or (tags[-1] if tags else "")
        found = self._checkpoints.get((asked.folder, tag))
        if found is None:
            raise RequestError(f"no checkpoint {tag!r} in {asked.folder}", field="tag", value=tag)
        self.optimizer_steps = found.optimizer_steps
        return codec.encode_load_checkpoint_result(found)

    async def ExportModel(
        self, request: pb.ExportModelRequest, context: Any
    ) -> pb.ExportModelResponse:
        """Write a folder with a config.json that says how many steps it has behind it."""
        asked = codec.decode_export_model_request(request)
        await self.script.enter("ExportModel", asked)
        target = Path(asked.folder) / "config.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(
            json.dumps({"optimizer_steps": self.optimizer_steps, **asked.config_values})
        )
        saved = SavedFolder(path=asked.folder, size_bytes=target.stat().st_size)
        return codec.encode_export_model_result(saved)

    async def PushWeights(
        self, request: pb.PushWeightsRequest, context: Any
    ) -> pb.PushWeightsResponse:
        """Push the number of steps to fake rollout servers, by the real methods."""
        asked = codec.decode_push_weights_request(request)
        await self.script.enter("PushWeights", asked)
        results = [await self._push(asked, address) for address in asked.addresses]
        if any(result.committed for result in results):
            self.policy_version = asked.policy_version
        return codec.encode_push_result(PushResult(replicas=tuple(results)))

    async def _push(self, asked: PushWeightsRequest, address: str) -> ReplicaPushResult:
        epoch = next(self._epochs)
        prepare = PrepareWeightsRequest(
            request_id=asked.request_id,
            epoch=epoch,
            policy_version=asked.policy_version,
            manifest=self.manifest,
            backend=asked.backend or PushBackend.GLOO,
            rendezvous=Rendezvous(),
            rank=1,
            world_size=2,
        )
        commit = CommitWeightsRequest(
            epoch=epoch, policy_version=asked.policy_version, digest=str(self.optimizer_steps)
        )
        phase = "prepare"
        async with RolloutClient(address) as rollout:
            try:
                joined = await rollout.prepare_weights(prepare)
                phase = "commit"
                await rollout.commit_weights(commit)
            except QuartetError as error:
                return ReplicaPushResult(address=address, failed_phase=phase, error=str(error))
        return ReplicaPushResult(address=address, replica=joined.replica, committed=True)

    async def Sleep(self, request: pb.SleepRequest, context: Any) -> pb.SleepResponse:
        """Do nothing."""
        await self.script.enter("Sleep", codec.decode_request_id(request))
        return pb.SleepResponse()

    async def Wake(self, request: pb.WakeRequest, context: Any) -> pb.WakeResponse:
        """Do nothing."""
        await self.script.enter("Wake", codec.decode_request_id(request))
        return pb.WakeResponse()

    def _require_run(self) -> RunSpec:
        if self.spec is None:
            raise StateError("no run was started", reason="NO_RUN", remedy="call StartRun first")
        return self.spec
