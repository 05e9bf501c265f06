"""The model under training: a transformers model and the head that its losses need."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quartet.errors import ConfigError
from quartet.nn import ModelInputs, selective_logprobs
from quartet.nn.attention import attention_arguments, use_causal_attention
from quartet.nn.loading import attention_kernels, loading_error, pick_device
from quartet.nn.logprobs import LmHead, lm_head_of
from quartet.types import Head
from quartet_learner.attention import packed_arguments
from quartet_learner.lora import add_adapters, base_digest
from quartet_learner.losses import balance_by_sequence
from quartet_learner.quantize import loading_options
from quartet_learner.ring import Ring
from quartet_learner.served import served_tensors, unique
from quartet_learner.settings import LearnerSettings


class ScoringHead(nn.Module):
    """Log-probabilities from hidden states, with the weights of a language model's head.

    It owns no weights: it holds the same parameters as the head of transformers, which is not
    called, because that would make a [N, vocabulary] tensor. They are registered here so that
    ZeRO-3 brings them in before and in the backward pass of this module.
    """

    def __init__(self, head: LmHead) -> None:
        super().__init__()
        self.weight = head.weight
        self.bias = head.bias
        self.scale = head.scale
        self.softcap = head.softcap

    def forward(
        self, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """[M] log-probabilities of `targets` and [M] entropies or None (see quartet.nn)."""
        head = LmHead(weight=self.weight, bias=self.bias, scale=self.scale, softcap=self.softcap)
        return selective_logprobs(
            hidden, head, targets, temperature=temperature, with_entropy=with_entropy
        )


class TrainedModel(nn.Module):
    """What DeepSpeed trains. `hf` is the transformers model, with the names that others know."""

    def __init__(self, hf: Any, head: Head) -> None:
        super().__init__()
        self.hf = hf
        self.kind = head
        self.adapter_config: Any = None
        """peft's LoraConfig where the model has adapters."""
        self.base: str | None = None
        """Tells the weights under the adapters from others, unless they are quantised."""
        self.ring: Ring | None = None
        """Ranks that share each packed row with this one."""
        self.scorer = ScoringHead(lm_head_of(hf)) if head is Head.LM else None

    def forward(
        self,
        inputs: ModelInputs,
        rows: Tensor,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
        owners: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Outputs of the head at the places `rows`.

        Args:
            inputs: the sequences.
            rows: [M] int64 places in the flattened [rows * width] hidden states.
            targets: [M] int64, head lm: the tokens whose log-probabilities are asked for.
            temperature: head lm: divisor of the logits.
            with_entropy: head lm: entropies as well.
            owners: [N] int64 the sequence of each token: the router's balance loss as well.

        Returns:
            [M] fp32 log-probabilities, or [M] outputs of the scalar head; [M] entropies or None;
            [B] fp32 balance loss of each sequence, or None.
        """
        ring = self.ring
        if ring is not None:
            piece = ring.cut(inputs, rows)
            inputs, rows = piece.inputs, piece.rows
            if targets is not None and self.scorer is not None:
                targets = targets[piece.owners == ring.rank]
        options = packed_arguments(inputs, self.hf.config._attn_implementation)
        options |= attention_arguments(self.hf, inputs)
        if owners is not None:
            options["output_router_logits"] = True
        out = self.hf.base_model(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
            use_cache=False,
            **options,
        )
        balance = None
        if owners is not None:
            logits = out.router_logits
            if ring is not None:
                logits = [ring.join_tokens(layer.flatten(0, -2)) for layer in logits]
            balance = balance_by_sequence(
                logits, inputs.places, owners, int(owners[-1]) + 1, self.experts_taken
            )
        hidden = out.last_hidden_state.flatten(0, 1).index_select(0, rows)
        if self.scorer is not None:
            if targets is None:
                raise ValueError("head lm needs targets")
            outputs, entropy = self.scorer(hidden, targets, temperature, with_entropy)
        else:
            outputs, entropy = self.hf.score(hidden).squeeze(-1), None
        if ring is not None:
            outputs = ring.join(outputs)
            entropy = None if entropy is None else ring.join(entropy)
        return outputs, entropy, balance

    @property
    def experts_taken(self) -> int:
        """Experts that the router sends a token to; 0 for a model without a router."""
        if "router_logits" not in (getattr(self.hf.base_model, "_can_record_outputs", None) or {}):
            return 0
        config = self.hf.config.get_text_config()
        return int(getattr(config, "num_experts_per_tok", 0) or 0)

    @property
    def vocabulary(self) -> int:
        """Token ids below this are known."""
        return int(self.hf.config.get_text_config().vocab_size)

    @property
    def max_length(self) -> int:
        """Longest sequence the positions allow; 0 where the model has no limit."""
        limit = getattr(self.hf.config.get_text_config(), "max_position_embeddings", None)
        return int(limit or 0)

    def num_parameters(self) -> int:
        """Trainable parameters; full sizes also where ZeRO-3 has partitioned them."""
        return sum(
            int(getattr(p, "ds_numel", p.numel())) for p in self.parameters() if p.requires_grad
        )

    def trained_share(self) -> str:
        """One line: how many numbers are trained, and how many the model has."""
        trained = self.num_parameters()
        whole = sum(math.prod(tensor.spec.shape) for tensor in unique(served_tensors(self.hf)))
        how = "all weights" if self.adapter_config is None else f"adapters ({self._adapters()})"
        return f"training {how}: {trained:,} parameters, {trained / whole:.2%} of {whole:,}"

    @property
    def adapter_scale(self) -> float | None:
        """Factor of what adapters add to a weight; None for a model without."""
        config = self.adapter_config
        return None if config is None else config.lora_alpha / config.r

    def _adapters(self) -> str:
        config = self.adapter_config
        return f"rank {config.r} on {', '.join(sorted(config.target_modules))}"

    def normalization(self) -> tuple[float, float]:
        """Mean and std stored in the model's config.json, or 0 and 1."""
        config = self.hf.config
        return float(getattr(config, "mean", 0.0)), float(getattr(config, "std", 1.0))


def load_model(settings: LearnerSettings) -> tuple[TrainedModel, bool]:
    """Load the model from its folder or the hub.

    Returns:
        The model on the CPU, and whether its scalar head is new and waits for `init_head`.

    Raises:
        ConfigError: there is no such model, or it cannot have the head.
    """
    from transformers import AutoConfig

    config = _from_pretrained(AutoConfig, settings)
    lm = settings.head is Head.LM
    prefix = _head_prefix(config, settings)
    hf = _load_lm(settings) if lm else _load_scalar(settings, config, prefix)
    use_causal_attention(hf)
    new_head = False
    if not lm:
        hf.config.value_head_prefix = prefix
        new_head = settings.new_head or not _read_head(hf, settings, prefix)
    adapter_config = add_adapters(hf, settings) if settings.lora_rank > 0 else None
    if settings.gradient_checkpointing:
        hf.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={
                "use_reentrant": settings.gradient_checkpointing_reentrant
            }
        )
        if settings.gradient_checkpointing_reentrant:
            hf.enable_input_require_grads()
    hf.config.use_cache = False
    model = TrainedModel(hf, settings.head)
    model.adapter_config = adapter_config
    if adapter_config is not None and not settings.load_in_4bit:
        model.base = base_digest(hf)
    return model, new_head


def init_head(model: TrainedModel, seed: int) -> None:
    """Draw the scalar head's weights from N(0, 1 / (hidden + 1)), the same on every rank."""
    weight: Tensor = model.hf.score.weight
    generator = torch.Generator().manual_seed(seed)
    std = 1.0 / (weight.shape[1] + 1)
    drawn = torch.randn(weight.shape, generator=generator) * std
    with torch.no_grad():
        weight.copy_(drawn.to(weight.dtype))


def _load_lm(settings: LearnerSettings) -> Any:
    from transformers import AutoModelForCausalLM

    return _from_pretrained(AutoModelForCausalLM, settings, **_model_options(settings))


def _load_scalar(settings: LearnerSettings, config: Any, prefix: str) -> Any:
    """Load the model under a head of one output, named `score` in memory."""
    from transformers import AutoModelForSequenceClassification

    config.num_labels = 1
    hf = _from_pretrained(
        AutoModelForSequenceClassification, settings, config=config, **_model_options(settings)
    )
    if not isinstance(getattr(hf, "score", None), nn.Linear):
        raise ConfigError(
            f"{type(hf).__name__} has no linear head `score`",
            field="learner.model_name_or_path",
            value=settings.model_name_or_path,
            remedy=f"use a decoder model for head {settings.head} ({prefix})",
        )
    return hf


def _model_options(settings: LearnerSettings) -> dict[str, Any]:
    options: dict[str, Any] = {
        "dtype": getattr(torch, settings.param_dtype),
        "attn_implementation": attention_kernels(settings.attn_implementation, pick_device()),
        **loading_options(settings),
    }
    if settings.experts_implementation is not None:
        options["experts_implementation"] = settings.experts_implementation
    return options


def _from_pretrained(auto_class: Any, settings: LearnerSettings, **options: Any) -> Any:
    try:
        return auto_class.from_pretrained(
            settings.model_name_or_path, trust_remote_code=settings.trust_remote_code, **options
        )
    except (OSError, ValueError, ImportError) as error:
        raise loading_error(
            error, settings.model_name_or_path, "learner.model_name_or_path"
        ) from error


def _head_prefix(config: Any, settings: LearnerSettings) -> str:
    return str(getattr(config, "value_head_prefix", None) or settings.value_head_prefix)


def _read_head(hf: Any, settings: LearnerSettings, prefix: str) -> bool:
    """Fill the head from the folder's `<prefix>.weight`; False when there is none that fits."""
    name = f"{prefix}.weight"
    file = _file_with(Path(settings.model_name_or_path), name)
    if file is None:
        return False
    from safetensors import safe_open

    with safe_open(file, framework="pt") as stored:
        weight = stored.get_tensor(name)
    if weight.shape != hf.score.weight.shape:
        return False
    with torch.no_grad():
        hf.score.weight.copy_(weight.to(hf.score.weight.dtype))
    return True


def _file_with(folder: Path, name: str) -> Path | None:
    """The safetensors file of a folder that holds the tensor `name`."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shard = json.loads(index.read_text())["weight_map"].get(name)
        return folder / shard if shard else None
    file = folder / "model.safetensors"
    if not file.is_file():
        return None
    with safe_open(file, framework="pt") as stored:
        return file if name in stored.keys() else None  # noqa: SIM118 - not a mapping
