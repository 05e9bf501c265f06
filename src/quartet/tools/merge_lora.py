"""`quartet tools merge-lora`: an adapter and its base model become one model.

Reads adapters in peft's format, from here or anywhere. A scalar head comes from the adapter, which
trained it, and stands under the name that the base model's config gives it; what the adapter's
model_config.json says (mean and std of a reward model) goes into the config of the result. Weights
are merged in fp32 and written in the type that is asked for.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quartet.errors import ConfigError

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MODEL_CONFIG = "model_config.json"
HEAD = "score.weight"


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="quartet tools merge-lora", description=__doc__)
    parser.add_argument("adapter", type=Path, help="folder with adapter_config.json")
    parser.add_argument("base", help="folder or hub name of the model that it was trained on")
    parser.add_argument("output", type=Path, help="folder to write; must not exist")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: the base model's")
    args = parser.parse_args(argv)
    merge(args.adapter, args.base, args.output, args.dtype)
    sys.stdout.write(f"{args.output}: merged\n")
    return 0


def merge(adapter: Path, base: str, output: Path, dtype: str | None = None) -> None:
    """Write the merged model to `output`, whole or not at all.

    Args:
        adapter: folder in peft's format.
        base: folder or hub name of the base model; its tokenizer goes along.
        output: new folder.
        dtype: a key of DTYPES; None takes the base model's.

    Raises:
        ConfigError: a folder is not what it should be, or adapter and base do not fit.
    """
    kind = _kind(adapter)
    if output.exists():
        raise ConfigError(
            f"{output} exists", field="output", value=str(output), remedy="name a new folder"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        folder = Path(scratch) / "model"
        try:
            model = _merged(adapter, base, kind, dtype)
        except ImportError as error:
            raise ConfigError(
                f"merging needs the package {error.name or error}",
                field="adapter",
                value=str(adapter),
                remedy="pip install 'quartet-rlhf[learner]'",
            ) from error
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"cannot put the adapter onto {base}: {first}",
                field="adapter",
                value=str(adapter),
                remedy="give the model that the adapter was trained on",
            ) from error
        _write(model, adapter, base, folder)
        folder.rename(output)


def _kind(adapter: Path) -> str:
    """The task type of an adapter, as peft names it."""
    file = adapter / ADAPTER_CONFIG
    if not file.is_file():
        raise ConfigError(
            f"there is no {ADAPTER_CONFIG} in {adapter}",
            field="adapter",
            value=str(adapter),
            remedy="give the folder adapter/ of an export, or one that peft saved",
        )
    return str(json.loads(file.read_text(encoding="utf-8")).get("task_type") or "CAUSAL_LM")


def _merged(adapter: Path, base: str, kind: str, dtype: str | None) -> Any:
    """The base model with the adapter in its weights."""
    import torch
    from peft import PeftModel
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(base)
    wanted = getattr(torch, DTYPES[dtype]) if dtype else getattr(config, "dtype", None)
    auto: Any = AutoModelForCausalLM
    if kind == "SEQ_CLS":
        auto, config.num_labels = AutoModelForSequenceClassification, _labels(adapter)
    model, loaded = auto.from_pretrained(
        base, config=config, dtype=torch.float32, output_loading_info=True
    )
    if missing := sorted(set(loaded["missing_keys"]) - {HEAD}):
        raise ValueError(f"it has no {missing[0]}")
    adapted = PeftModel.from_pretrained(model, str(adapter))
    _check_complete(adapted, adapter)
    return adapted.merge_and_unload().to(wanted or torch.float32)


def _check_complete(adapted: Any, adapter: Path) -> None:
    """See that each layer got its adapter and each adapter its layer: peft lets both pass.

    Raises:
        ValueError: the base is another model than that of the adapter.
    """
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    file = adapter / ADAPTER_WEIGHTS
    if not file.is_file():
        return
    with safe_open(file, framework="pt") as stored:
        given = set(stored.keys())
    taken = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    if alone := sorted(name for name in given ^ taken if ".lora_" in name):
        who = "the adapter" if alone[0] in given else "the model"
        raise ValueError(f"only {who} has a place for {alone[0]}")


def _labels(adapter: Path) -> int:
    """Outputs of the head that an adapter brings along; 1 where it brings none."""
    from safetensors import safe_open

    file = adapter / ADAPTER_WEIGHTS
    if not file.is_file():
        return 1
    with safe_open(file, framework="pt") as stored:
        heads = [name for name in stored.keys() if name.endswith(HEAD)]  # noqa: SIM118
        return int(stored.get_slice(heads[0]).get_shape()[0]) if heads else 1


def _write(model: Any, adapter: Path, base: str, folder: Path) -> None:
    """Save model, config and tokenizer, with the head under the name that the config says."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    extra = adapter / MODEL_CONFIG
    if extra.is_file():
        for name, value in json.loads(extra.read_text(encoding="utf-8")).items():
            setattr(model.config, name, value)
    # In one file, so that the head can be renamed where it is.
    model.save_pretrained(folder, max_shard_size="1TB")
    prefix = getattr(model.config, "value_head_prefix", None) or "score"
    file = folder / "model.safetensors"
    if prefix != "score" and hasattr(model, "score"):
        tensors = load_file(file)
        tensors[f"{prefix}.weight"] = tensors.pop(HEAD)
        save_file(tensors, file, metadata={"format": "pt"})
    try:
        AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    except (OSError, ValueError):
        sys.stderr.write(f"{base} has no tokenizer: none is written\n")
