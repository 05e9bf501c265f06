"""The model that a rollout server is compared with, and the comparisons. Knows no gRPC."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quartet.testing.conformance import Skipped, require
from quartet.types import Completion, WeightManifest
from quartet.weights import total_bytes

if TYPE_CHECKING:
    import torch

    from quartet.testing.conformance.rollout_calls import RolloutSubject

Reference = Callable[[Sequence[int], Sequence[int]], NDArray[np.float64]]
"""(prompt, completion) -> [T, V] logits that predict each token of the completion."""

Weights = Mapping[str, "torch.Tensor"]
"""Tensors by the name that a push gives them."""

_BUCKETS = 4
"""Buckets that a push is cut into, when its tensors allow it: some may then arrive and some not."""
_LARGEST_BUCKET = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ServedModel:
    """The weights that a server was started with, and what they make of tokens."""

    manifest: WeightManifest
    """What a push must bring, cut into a few buckets."""
    weights: Weights
    """In the data types of the manifest."""
    module: Any = None
    """The model in transformers, in fp32; None where nothing is known but the weights."""

    def changed(
        self, seed: int, *, share: float = 0.1, names: Sequence[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """The weights with noise on them.

        Args:
            seed: Of the noise.
            share: Size of the noise, relative to the tensor's own spread.
            names: Tensors to change; None changes all.
        """
        import torch

        noise = torch.Generator().manual_seed(seed)
        made = dict(self.weights)
        for name in self.weights if names is None else names:
            old = self.weights[name].float()
            spread = float(old.std(unbiased=False)) or float(old.abs().mean()) or 1.0
            new = old + share * spread * torch.randn(old.shape, generator=noise)
            made[name] = new.to(self.weights[name].dtype)
        return made

    def embeddings(self) -> tuple[str, str]:
        """Names of the input embeddings and of the head's weight; equal when they are tied."""
        if self.module is None:
            raise Skipped("the model is not known, and so neither are its embeddings")
        names = {id(p): n for n, p in self.module.named_parameters(remove_duplicate=False)}
        owner = self.manifest.aliases
        found: list[str] = []
        for layer in (self.module.get_input_embeddings(), self.module.get_output_embeddings()):
            if layer is None:
                raise Skipped("the model says nothing of its embeddings")
            name = names[id(layer.weight)]
            found.append(owner.get(name, name))
        return found[0], found[1]

    def logprobs(
        self, weights: Weights, prompt: Sequence[int], tokens: Sequence[int]
    ) -> NDArray[np.float64]:
        """[T] log-probabilities of a completion under some weights, at temperature 1."""
        rows = log_softmax(self.logits(weights, prompt, tokens))
        return rows[np.arange(len(tokens)), list(tokens)]

    def logits(
        self, weights: Weights, prompt: Sequence[int], tokens: Sequence[int]
    ) -> NDArray[np.float64]:
        """[T, V] logits that predict each token of a completion, under some weights."""
        import torch

        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            out = torch.func.functional_call(
                self.module,
                {name: tensor.float() for name, tensor in weights.items()},
                kwargs={"input_ids": ids},
            )
        return out.logits[0, len(prompt) - 1 : -1].double().numpy()


def model_of(subject: RolloutSubject, manifest: WeightManifest) -> ServedModel:
    """What the server was started with.

    Raises:
        Skipped: Neither a model nor weights are given, or they are not those of the manifest.
    """
    if subject.weights is None and not subject.reference:
        raise Skipped("no model is given, whose weights it serves")
    module = load_module(subject.reference) if subject.reference else None
    found: Any = dict(module.named_parameters()) if module is not None else {}
    if subject.weights is not None:
        found |= subject.weights()
    given: dict[str, torch.Tensor] = {}
    for spec in manifest.tensors:
        tensor = found.get(spec.name)
        if tensor is None or tuple(tensor.shape) != spec.shape:
            raise Skipped(f"it wants {spec.name} {list(spec.shape)}, which the model has not")
        given[spec.name] = _cast(tensor, spec.dtype)
    size = min(max(total_bytes(manifest) // _BUCKETS, 1), _LARGEST_BUCKET)
    return ServedModel(manifest=replace(manifest, bucket_bytes=size), weights=given, module=module)


def reference_of(subject: RolloutSubject) -> Reference:
    """The model that it serves; raises Skipped when none is given."""
    if not subject.reference:
        raise Skipped("no model is given to compare with")
    module = load_module(subject.reference)

    def logits(prompt: Sequence[int], completion: Sequence[int]) -> NDArray[np.float64]:
        import torch

        ids = torch.tensor([[*prompt, *completion]])
        with torch.no_grad():
            rows = module(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        return rows.double().numpy()

    return logits


@lru_cache(maxsize=1)
def load_module(folder: str) -> Any:
    """A model to compare with, in fp32 on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def end_tokens_of(subject: RolloutSubject) -> tuple[int, ...]:
    """The end tokens that the model itself names."""
    module = load_module(subject.reference)
    ids = getattr(module.generation_config, "eos_token_id", None)
    if ids is None:
        ids = module.config.get_text_config().eos_token_id
    if ids is None:
        raise Skipped("its model names no end token")
    return tuple(ids) if isinstance(ids, list | tuple) else (ids,)


def require_logprobs(
    model: ServedModel,
    weights_of: Mapping[int, Weights],
    prompt: Sequence[int],
    completion: Completion,
    *,
    tolerance: float,
) -> None:
    """Fail unless each token's log-probability is that of the version which is named for it."""
    tokens = completion.token_ids.tolist()
    for span in completion.versions:
        version = span.policy_version
        require(
            version in weights_of,
            f"tokens are said to be of version {version}; there were only {sorted(weights_of)}",
        )
        wanted = model.logprobs(weights_of[version], prompt, tokens)[span.start : span.end]
        worst = float(np.abs(completion.logprobs[span.start : span.end] - wanted).max())
        require(
            worst <= tolerance,
            f"tokens {span.start} to {span.end} are said to be of version {version}, and their "
            f"log-probabilities are off by {worst:.2g} from that version's",
        )


def require_greedy(logits: NDArray[np.float64], tokens: Sequence[int], *, tolerance: float) -> None:
    """Fail unless each token is the most likely one, [T, V] logits, or as likely to rounding."""
    chosen = logits[np.arange(len(tokens)), list(tokens)]
    short = float((logits.max(-1) - chosen).max())
    require(short < tolerance, f"a greedy token is {short:.4f} below the best")


def cut(logits: NDArray[np.float64], top_p: float, top_k: int) -> NDArray[np.float64]:
    """[V] logits with -inf on what top-k, then top-p, drops; at least one token stays."""
    order = np.argsort(-logits, kind="stable")
    kept = order if top_k < 1 else order[:top_k]
    p = np.exp(logits[kept] - logits[kept].max())
    p /= p.sum()
    before = np.concatenate([[0.0], np.cumsum(p)[:-1]])
    kept = kept[before < top_p]
    out = np.full_like(logits, -np.inf)
    out[kept] = logits[kept]
    return out


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the last axis; -inf stays -inf."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    from quartet.weights.tensors import torch_dtype

    return tensor.detach().to(torch_dtype(dtype))
