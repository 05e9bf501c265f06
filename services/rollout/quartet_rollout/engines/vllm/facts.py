"""What must be known of a model before, or without, loading its weights.

vLLM fuses and renames a model's tensors. A push brings them under the names that transformers
gives them, so those are read from a copy of the model without weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import cached_file

from quartet.nn.loading import loading_error
from quartet.types import WeightManifest
from quartet.weights import manifest_of_model
from quartet.weights.digest import PushDigest, bucket_digest
from quartet.weights.tensors import torch_dtype

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """A model as the engine's caller sees it."""

    manifest: WeightManifest
    """Tensors that a push must bring, under transformers' names."""
    max_positions: int | None
    """Most tokens of a sequence, when the model says so."""
    vocabulary: int
    """Tokens it knows."""
    eos_token_ids: frozenset[int]
    """Its own end tokens."""
    head_dim: int
    """Size of one attention head."""
    cache_bytes_per_token: int
    """Keys and values of one token in all layers."""
    digest: str
    """Digest of its weights in the dtype of the engine; empty when they are no safetensors."""


def read_facts(name_or_path: str, *, dtype: str, trust_remote_code: bool) -> ModelFacts:
    """Read a model's configuration and the headers of its files.

    Args:
        name_or_path: A folder, or a hub id.
        dtype: torch name of the dtype that the engine holds the weights in.
        trust_remote_code: Run Python code that comes with the model.

    Raises:
        ConfigError: There is no such model.
    """
    try:
        config: Any = AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=torch_dtype(dtype), trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError) as error:
        raise loading_error(error, name_or_path, "rollout.model_name_or_path") from error
    text = config.get_text_config()
    manifest = manifest_of_model(model)
    return ModelFacts(
        manifest=manifest,
        max_positions=getattr(text, "max_position_embeddings", None),
        vocabulary=text.vocab_size,
        eos_token_ids=_eos_token_ids(name_or_path, text),
        head_dim=_head_dim(text),
        cache_bytes_per_token=_cache_bytes(text, torch_dtype(dtype)),
        digest=_digest(name_or_path, manifest),
    )


def _eos_token_ids(name_or_path: str, text: Any) -> frozenset[int]:
    try:
        ids = GenerationConfig.from_pretrained(name_or_path).eos_token_id
    except (OSError, ValueError):  # a model need not bring one
        ids = None
    if ids is None:
        ids = text.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset(ids) if isinstance(ids, list | tuple) else frozenset({ids})


def _head_dim(text: Any) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _cache_bytes(text: Any, dtype: torch.dtype) -> int:
    """An upper bound: layers that keep no keys and values count like those that do."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * _head_dim(text) * dtype.itemsize


def _digest(name_or_path: str, manifest: WeightManifest) -> str:
    """Equal to `quartet.nn.digest.model_digest` of the loaded model, one tensor at a time."""
    from safetensors import safe_open

    files = _weight_files(name_or_path)
    if not {spec.name for spec in manifest.tensors} <= files.keys():
        return ""
    digest = PushDigest()
    for spec in manifest.tensors:
        with safe_open(files[spec.name], framework="pt") as tensors:
            digest.update(bucket_digest(tensors.get_tensor(spec.name).to(torch_dtype(spec.dtype))))
    return digest.hexdigest()


def _weight_files(name_or_path: str) -> Mapping[str, Path]:
    """The file of each tensor; empty when the model's weights are not in safetensors."""
    from safetensors import safe_open

    index = cached_file(name_or_path, _INDEX, _raise_exceptions_for_missing_entries=False)
    if index:
        places: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
        return {name: Path(index).parent / place for name, place in places.items()}
    single = cached_file(name_or_path, _SINGLE, _raise_exceptions_for_missing_entries=False)
    if not single:
        return {}
    with safe_open(single, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), Path(single))
