"""The weights as everybody else knows them: names, types and values of the model without adapters.

Engines, checkpoints of other libraries and the reference know `model.layers.0.mlp.up_proj.weight`.
Under adapters that tensor is W + scale * B A of three trained or frozen ones. It is computed, in
fp32, when it is asked for; nothing that is trained is ever changed. Quantised tensors are expanded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quartet.types import TensorSpec, WeightManifest
from quartet.weights.digest import PushDigest, bucket_digest
from quartet.weights.tensors import dtype_name
from quartet_learner.lora import ADAPTER, adapted_layers
from quartet_learner.quantize import dequantized, quantised_form

_FACTOR = ".lora_"
_BASE = ".base_layer."

NOTHING: Mapping[str, Tensor] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """What is added to one weight: scale * B A."""

    a: nn.Parameter
    """[rank, in]."""
    b: nn.Parameter
    """[out, rank]."""
    names: tuple[str, str]
    """Of A and B, among the model's parameters."""
    scale: float
    """alpha / rank."""
    transposed: bool
    """True where the weight lies in memory as [in, out]."""

    def delta(self, instead: Mapping[str, Tensor]) -> Tensor:
        """fp32 [out, in], or [in, out]; tensors of `instead` take the factors' place by name."""
        a, b = (
            instead.get(name, factor).detach().to(factor.device, torch.float32)
            for name, factor in zip(self.names, (self.a, self.b), strict=True)
        )
        product = b @ a
        return (product.T if self.transposed else product) * self.scale


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedTensor:
    """One tensor of the model as it is without adapters."""

    name: str
    """As engines and transformers know it."""
    parameter: nn.Parameter
    """Where the values are, or W under an adapter."""
    adapter: Adapter | None

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """All that `value` reads; they must be whole (see weights.whole)."""
        if self.adapter is None:
            return (self.parameter,)
        return self.parameter, self.adapter.a, self.adapter.b

    @property
    def spec(self) -> TensorSpec:
        """Name, type and full shape, also where ZeRO-3 has partitioned it or it is quantised."""
        shape, dtype = quantised_form(self.parameter) or (
            getattr(self.parameter, "ds_shape", self.parameter.shape),
            self.parameter.dtype,
        )
        return TensorSpec(name=self.name, dtype=dtype_name(dtype), shape=tuple(shape))

    def value(self, instead: Mapping[str, Tensor] = NOTHING) -> Tensor:
        """The tensor; the parameter's own memory unless something had to be computed.

        Args:
            instead: tensors by parameter name that take the place of trained ones.
        """
        known = instead.get(self.name)
        if known is not None:
            return known.to(self.parameter.device, self.parameter.dtype)
        whole = dequantized(self.parameter)
        if self.adapter is None:
            return whole
        return (whole.float() + self.adapter.delta(instead)).to(whole.dtype)


def served_tensors(hf: nn.Module) -> list[ServedTensor]:
    """All tensors in the model's order, with one entry for each name of a tied one."""
    adapters = {id(layer.base_layer.weight): _adapter(n, layer) for n, layer in adapted_layers(hf)}
    return [
        ServedTensor(
            name=plain_name(name), parameter=parameter, adapter=adapters.get(id(parameter))
        )
        for name, parameter in hf.named_parameters(remove_duplicate=False)
        if _FACTOR not in name
    ]


def unique(tensors: list[ServedTensor]) -> list[ServedTensor]:
    """Without the further names of tied tensors."""
    first: dict[int, ServedTensor] = {}
    for tensor in tensors:
        first.setdefault(id(tensor.parameter), tensor)
    return list(first.values())


def plain_name(name: str) -> str:
    """A parameter's or buffer's name without what peft puts into it."""
    return name.replace(_BASE, ".")


def served_manifest(hf: nn.Module) -> WeightManifest:
    """The push that engines expect: the same with adapters and without."""
    tensors = served_tensors(hf)
    owners = {id(tensor.parameter): tensor.name for tensor in unique(tensors)}
    return WeightManifest(
        tensors=tuple(tensor.spec for tensor in unique(tensors)),
        aliases={
            t.name: owners[id(t.parameter)] for t in tensors if owners[id(t.parameter)] != t.name
        },
    )


def loaded_digest(hf: nn.Module) -> str:
    """Digest of the weights as loaded: the same with adapters, which add nothing yet."""
    digest = PushDigest()
    for tensor in unique(served_tensors(hf)):
        digest.update(bucket_digest(tensor.parameter))
    return digest.hexdigest()


def _adapter(name: str, layer: Any) -> Adapter:
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    return Adapter(
        a=a,
        b=b,
        names=(f"{name}.lora_A.{ADAPTER}.weight", f"{name}.lora_B.{ADAPTER}.weight"),
        scale=float(layer.scaling[ADAPTER]),
        transposed=bool(layer.fan_in_fan_out),
    )
