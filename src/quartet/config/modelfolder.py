"""What the folder of a model says about it, read without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"
"""Where a model in Hugging Face format describes itself."""


def max_positions(folder: Path) -> int | None:
    """Longest sequence that the model's positions allow; None where its file names no limit."""
    try:
        settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # Not for this question to complain about.
        return None
    if not isinstance(settings, dict):
        return None
    inner: Any = settings.get("text_config")
    for part in (inner, settings):
        limit = part.get("max_position_embeddings") if isinstance(part, dict) else None
        if isinstance(limit, int) and limit > 0:
            return limit
    return None
