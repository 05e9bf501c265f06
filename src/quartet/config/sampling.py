"""Sections of generation: `vllm` and `rollout`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

EngineName = Literal["auto", "transformers", "vllm", "openai"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmEngineFields:
    """What one vLLM engine needs to know."""

    tensor_parallel_size: int = 1
    """GPUs of one engine."""
    enable_prefix_caching: bool = False
    """Share the cache of equal prompt beginnings. It is dropped at every change of weights."""
    enforce_eager: bool = False
    """Do not capture CUDA graphs: starts faster, generates slower."""
    enable_sleep: bool = False
    """Give the GPU's memory back while others train; needs `train.colocate_all`."""
    gpu_memory_utilization: float = 0.95
    """Share of the GPU's memory that the engine takes, in (0, 1]."""
    gloo_into: Literal["service", "workers"] = "service"
    """Who receives weights that come by gloo: the service, into memory that all workers of the
    engine map, or each worker by itself. By nccl it is always the workers."""
    extra: tuple[str, ...] = ()
    """Further arguments of vLLM's engine, as key=value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmConfig(VllmEngineFields):
    """Rollout engines. The names are vLLM's; counts hold for every engine."""

    num_engines: int | None = None
    """Rollout services that the trainer starts; None is 1."""
    sync_backend: str = "nccl"
    """How weights travel."""
    sync_with_ray: bool = False
    """Ray's collectives for weights; there is no Ray here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFields:
    """What the engine openai needs to know of the server that it asks."""

    server_url: str | None = None
    """Server of OpenAI's completions for the engine openai, http://host:port; several with commas,
    one for each engine."""
    server_key: str | None = field(default=None, repr=False)
    """Its key, sent as a bearer token. Never written to files or logs."""
    server_model: str | None = None
    """Name of the model there. None: the only one that it has."""
    server_logprobs: Literal["processed", "raw"] = "processed"
    """Log-probabilities that it returns; put to the test when the engine starts."""
    server_weights: str = "auto"
    """How it takes weights: vllm (vLLM's development mode), a URL that is told of a folder, none.
    auto: vllm where the server has it, else none."""
    server_folder: str | None = None
    """Folder for new weights that this service and the server both see. None: memory or the
    temporary folder, for a server on the same machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig(ServerFields):
    """What is sampled, and by which services."""

    batch_size: int = 1024
    """Prompts of one rollout."""
    n_samples_per_prompt: int = 1
    """Completions of each prompt: one group."""
    max_new_tokens: int | None = None
    """Most tokens of a completion. None: what `data.max_len` leaves after the prompt."""
    temperature: float = 1.0
    """Divides the logits, in sampling and in training."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this mass; 1 is all."""
    top_k: int = -1
    """Sample from the k likeliest tokens; -1 is all."""
    micro_batch_size: int = 1
    """Sequences of one forward pass for log-probabilities, values and rewards."""
    max_tokens_per_gpu: int | None = None
    """Token budget of such a pass with `train.dynamic_batch_enable`. None:
    `train.max_tokens_per_gpu`."""
    vllm_generate_batch_size: int | None = None
    """Prompts asked for at a time. None: `batch_size`."""
    engine: EngineName = "auto"
    """Rollout engine. auto: vLLM where it is installed, else transformers."""
    python: str | None = None
    """Python that runs the rollout services which the trainer starts, for an engine that lives in
    an environment of its own. None: the trainer's."""
    max_num_sequences: int = 64
    """Completions that one engine works on at the same time."""
    max_groups_in_flight: int | None = None
    """Prompts that generate at the same time, over all services. None: what the services say they
    can take."""
    address: str | None = None
    """Rollout services to use, host:port, several with commas; `dns:///name:port` and
    `file:///path` stand for services that come and go."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutEngineConfig(ServerFields):
    """The engine of `quartet serve rollout`."""

    model_name_or_path: str | None = None
    """The model to generate with until the first weight push."""
    engine: EngineName = "auto"
    """Rollout engine. auto: vLLM where it is installed, else transformers."""
    max_num_sequences: int = 64
    """Completions that the engine works on at the same time."""
