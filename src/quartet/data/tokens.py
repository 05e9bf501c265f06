"""From text with spans to token ids with a loss mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")
Spans = Sequence[tuple[int, int]]

_CHUNK = 256


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token ids of a text, without special tokens that the text does not hold."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_with_mask(
    tokenizer: PreTrainedTokenizerFast, text: str, spans: Spans, *, max_len: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_], bool]:
    """Tokens of a text, which of them lie in a span, and whether the text was cut.

    The text is tokenised once, whole. A token is in a span when it holds a character of it, so a
    token that spans the border between prompt and answer is learnt. The end token is appended, and
    learnt, where the text does not end with it; a text that is cut has no end, and gets none.

    Args:
        tokenizer: A fast tokenizer: the offsets of its tokens are needed.
        text: Prompt and answers.
        spans: [start, end) of the answers, in characters.
        max_len: Most tokens; the rest is cut on the right.

    Returns:
        [T] int32 ids, [T] bool mask (never True on the first token), and whether it was cut.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = np.array(encoded["input_ids"], dtype=np.int32)
    offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    mask = np.zeros(len(ids), dtype=bool)
    for start, end in spans:
        mask |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    eos = tokenizer.eos_token_id
    if len(ids) and ids[-1] != eos:
        ids = np.append(ids, np.array([eos], dtype=np.int32))
        mask = np.append(mask, bool(spans) and spans[-1][1] >= len(text))
    cut = len(ids) > max_len
    ids, mask = ids[:max_len], mask[:max_len]
    mask[:1] = False
    return ids, mask, cut


def map_rows(
    make: Callable[[Mapping[str, Any]], T], rows: Sequence[Mapping[str, Any]], *, num_workers: int
) -> Iterator[T]:
    """Apply `make` to every row, in order; in processes of their own when `num_workers` > 0.

    Args:
        make: A picklable callable.
        rows: The rows.
        num_workers: Processes; 0 works in this one.
    """
    if num_workers <= 0 or len(rows) <= _CHUNK:
        yield from map(make, rows)
        return
    # spawn: a fork would copy locks of gRPC threads in whatever state they are.
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        chunks = [range(i, min(i + _CHUNK, len(rows))) for i in range(0, len(rows), _CHUNK)]
        work = ([dict(rows[i]) for i in chunk] for chunk in chunks)
        for results in pool.map(_map_chunk, repeat(make), work):
            yield from results


def _map_chunk(make: Callable[[Mapping[str, Any]], T], rows: list[dict[str, Any]]) -> list[T]:
    return [make(row) for row in rows]
