"""Tokenizers without torch, and the fingerprint by which services agree on one.

A tokenizer is loaded straight from its `tokenizer.json`. `transformers.AutoTokenizer` would import
torch (seconds, and hundreds of MB) to find a class name; it is the fallback for models that ship
no `tokenizer.json`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quartet.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def load_tokenizer(
    name_or_path: str | Path,
    *,
    chat_template: str | None = None,
    use_fast: bool = True,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model folder or hub id.

    A tokenizer without a padding token pads with its end token: padding never reaches a loss.

    Args:
        name_or_path: A folder, or a hub id.
        chat_template: Jinja text that replaces the tokenizer's own template.
        use_fast: False asks transformers for the slow Python tokenizer.
        trust_remote_code: Let transformers run code that comes with the model.

    Raises:
        ConfigError: there is no tokenizer at that place, or it has no end token.
    """
    folder = _local_folder(str(name_or_path)) if use_fast and not trust_remote_code else None
    try:
        if folder is not None and (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(
                name_or_path, use_fast=use_fast, trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _no_tokenizer(name_or_path, error) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer of {str(name_or_path)!r} has no end token",
            reason="TOKENIZER_WITHOUT_EOS",
            field="model_name_or_path",
            remedy='set "eos_token" in its tokenizer_config.json',
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def fingerprint(name_or_path: str | Path) -> str:
    """SHA-256 of what decides the meaning of token ids: vocabulary, merges and added tokens.

    Chat template, padding side and other settings do not count: two services that differ in them
    still understand each other's ids.

    Raises:
        ConfigError: there is no tokenizer at that place.
    """
    folder = _local_folder(str(name_or_path))
    file = folder / "tokenizer.json" if folder is not None else None
    if file is not None and file.is_file():
        return _digest(json.loads(file.read_text(encoding="utf-8")))
    return fingerprint_of(load_tokenizer(name_or_path))


def fingerprint_of(tokenizer: PreTrainedTokenizerFast) -> str:
    """`fingerprint` of a loaded tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return _digest(json.loads(backend.to_str()))
    # A slow tokenizer: its vocabulary is all it can show.
    return _digest({"model": {"type": "slow", "vocab": tokenizer.get_vocab()}})


def _digest(tokenizer: dict[str, Any]) -> str:
    """Hash a parsed tokenizer.json in a form that saving and loading does not change."""
    model = tokenizer["model"]
    vocab = model.get("vocab", {})
    items = sorted(vocab.items()) if isinstance(vocab, dict) else vocab
    # Older files write a merge as "a b", newer ones as ["a", "b"].
    merges = [m.split(" ", 1) if isinstance(m, str) else m for m in model.get("merges") or ()]
    added = sorted((t["id"], t["content"]) for t in tokenizer.get("added_tokens") or ())
    parts = [model.get("type") or "", items, merges, added]
    canonical = json.dumps(parts, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _local_folder(name_or_path: str) -> Path | None:
    """The folder itself, or the cached copy of a hub id's tokenizer files; None without either."""
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name_or_path.startswith((".", "~")) or name_or_path.count("/") > 1:
        raise _no_tokenizer(name_or_path, "there is no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name_or_path, allow_patterns=list(_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise _no_tokenizer(name_or_path, error) from error


def _no_tokenizer(name_or_path: str | Path, why: object) -> ConfigError:
    first_line = str(why).strip().splitlines()[0] if str(why).strip() else type(why).__name__
    return ConfigError(
        f"cannot load a tokenizer from {str(name_or_path)!r}: {first_line}",
        reason="TOKENIZER_NOT_FOUND",
        field="model_name_or_path",
        value=str(name_or_path),
        remedy="give a folder with tokenizer.json, or a hub id that this machine can reach",
    )
