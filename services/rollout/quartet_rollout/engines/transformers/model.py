"""The model as the batch sees it: prompts in, keys and values and logits out."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

from quartet.errors import ConfigError
from quartet.nn import LmHead, lm_head_of
from quartet.nn.loading import load_arguments, loading_error, pick_device
from quartet_rollout.engines.transformers.cache import BatchCache

if TYPE_CHECKING:
    from quartet.config import RolloutServeConfig


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prefilled:
    """What a forward pass over whole sequences gives."""

    logits: torch.Tensor  # [B, V]
    """After the last token of each sequence."""
    layers: list[tuple[torch.Tensor, torch.Tensor]]  # [B, heads, longest, dim] each
    """Keys and values; what is right of a sequence's own length is padding."""


class CausalLm:
    """A transformers causal language model, used from one thread.

    Attributes:
        model: the module, in evaluation mode.
        device: where it runs.
        max_length: most tokens of a sequence.
        eos_token_ids: the model's own end tokens.
    """

    def __init__(self, model: Any, *, max_length: int) -> None:
        self.model = model.eval().requires_grad_(False)
        config = model.config.get_text_config()
        _check_architecture(config, model)
        self.max_length = min(max_length, getattr(config, "max_position_embeddings", max_length))
        self.vocabulary: int = config.vocab_size
        self.eos_token_ids = _eos_token_ids(model)
        parameters = inspect.signature(model.base_model.forward).parameters
        # transformers 5.20 renamed it, and warns at each call under the old name.
        self.device: torch.device = next(model.parameters()).device
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    def release(self, *, keep: bool) -> None:
        """Free the device: move the weights to host memory, or forget them."""
        # Storage is swapped under the parameters: ties between them stay, and so do buffers,
        # which no push would bring back.
        for parameter in self.model.parameters():
            parameter.data = parameter.data.cpu() if keep else parameter.data.new_empty(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Bring the weights back; forgotten ones get memory and no meaning."""
        for name, parameter in self.model.named_parameters():
            data = parameter.data
            is_there = data.shape == self._shapes[name]
            data = data if is_there else data.new_empty(self._shapes[name])
            parameter.data = data.to(self.device)

    def prefill(self, sequences: Sequence[Sequence[int]]) -> Prefilled:
        """Run whole sequences, padded on the right: under a causal mask nobody sees the padding."""
        device = self.device
        lengths = torch.tensor([len(s) for s in sequences], device=device)
        width = int(lengths.max())
        ids = torch.tensor([[*s, *[0] * (width - len(s))] for s in sequences], device=device)
        positions = torch.arange(width, device=device).expand_as(ids)
        cache = DynamicCache()
        hidden = self._hidden(ids, positions, cache, None)
        last = hidden[torch.arange(len(sequences), device=device), lengths - 1]
        layers: list[Any] = cache.layers
        return Prefilled(logits=self._logits(last), layers=[(x.keys, x.values) for x in layers])

    def decode(self, tokens: Sequence[int], cache: BatchCache) -> torch.Tensor:
        """Append one token to each row of `cache`; return the logits after it, [B, V]."""
        device = self.device
        hidden = self._hidden(
            torch.tensor(tokens, device=device)[:, None],
            cache.position_ids(device),
            cache.decoding(),
            cache.attention_mask(device),
        )
        cache.advance()
        return self._logits(hidden[:, 0])

    def _hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, cache: Any, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Last hidden states, [B, width, hidden]."""
        out = self.model.base_model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_name: cache},
        )
        return out.last_hidden_state

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head: LmHead = lm_head_of(self.model)
        logits = torch.nn.functional.linear(hidden, head.weight, head.bias).float()
        if head.scale != 1.0:
            logits = logits * head.scale
        if head.softcap is not None:
            logits = torch.tanh(logits / head.softcap) * head.softcap
        return logits


def load_model(config: RolloutServeConfig) -> CausalLm:
    """Load the model that `config` names, on the first GPU or the CPU.

    Raises:
        ConfigError: There is no such model, or this engine cannot run it.
    """
    name = config.rollout.model_name_or_path
    if not name:
        raise ConfigError(
            "rollout.model_name_or_path is not set",
            field="rollout.model_name_or_path",
            remedy="name the model to generate with, a folder or a hub id",
        )
    device = pick_device()
    disable_progress_bar()  # a bar of a second, in the middle of log lines
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, **load_arguments(config.ds, device))
    except (OSError, ValueError) as error:
        raise loading_error(error, name, "rollout.model_name_or_path") from error
    return CausalLm(model.to(device), max_length=config.data.max_len)


def _eos_token_ids(model: Any) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    if ids is None:
        return frozenset()
    return frozenset(ids) if isinstance(ids, list | tuple) else frozenset({ids})


def _check_architecture(config: Any, model: Any) -> None:
    """Only attention has keys and values that can be laid into rows and columns."""
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = {k for k in kinds if "attention" not in k or k.startswith("linear")}
    if unknown or getattr(model, "_is_stateful", False):
        raise ConfigError(
            f"the transformers engine cannot run {type(model).__name__}"
            + (f" ({', '.join(sorted(unknown))} layers)" if unknown else ""),
            field="rollout.engine",
            value="transformers",
            remedy="use rollout.engine vllm for this model",
        )
