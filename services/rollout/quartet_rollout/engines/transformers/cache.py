"""Keys and values of a running batch, whose rows come and go between two tokens.

Rows are padded on the left, so that all of them end in the same column and a new token is one
column for everybody:

    columns   0 . . start . . . . end        end: the next token goes here
    row 0     . . . . . a a a a a            start: first column that any row uses
    row 1     . . . b b b b b b b

A row that leaves is replaced by the last one. Columns that no row uses any more are skipped, and
given back when the buffers are full. What lies under the padding is always zero: attention
multiplies it by a weight of 0, and 0 times NaN would be NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_COLUMNS_AT_ONCE = 64  # buffers grow at least by this


class BatchCache:
    """The buffers of all layers and where each row begins in them.

    Attributes:
        lengths: tokens cached of each row.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._end = 0
        self._layers: list[_Buffers] = []

    def __len__(self) -> int:
        """Rows."""
        return len(self.lengths)

    @property
    def _start(self) -> int:
        return self._end - max(self.lengths, default=0)

    def add(
        self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], length: int, copies: int
    ) -> None:
        """Append `copies` rows that share one prefill.

        Args:
            layers: Keys and values of each layer, [heads, >= length, dim].
            length: Tokens to take, from the left.
            copies: Rows to append.
        """
        first = len(self.lengths)
        if not self._layers:
            self._layers = [_Buffers(keys, values) for keys, values in layers]
        self._reserve(first + copies, more_left=max(length - self._end, 0))
        for buffers, (keys, values) in zip(self._layers, layers, strict=True):
            rows = slice(first, first + copies)
            buffers.put(rows, self._end, keys[:, :length], values[:, :length])
        self.lengths.extend([length] * copies)

    def remove(self, row: int) -> None:
        """Drop a row; the last row takes its place."""
        last = len(self.lengths) - 1
        if row != last:
            for buffers in self._layers:
                buffers.move_row(last, row)
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        if not self.lengths:
            self._end = 0

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self.lengths = []
        self._layers = []
        self._end = 0

    def decoding(self) -> Cache:
        """The cache of one forward pass of one token a row; then call `advance`."""
        self._reserve(len(self.lengths))
        return Cache(layers=[_DecodeLayer(b, self) for b in self._layers])

    def advance(self) -> None:
        """Count the column that a forward pass has written."""
        self._end += 1
        self.lengths = [n + 1 for n in self.lengths]

    def attention_mask(self, device: torch.device) -> torch.Tensor:
        """[rows, width] int64 over the cached columns and the new one, 0 on padding."""
        width = self.width
        lengths = torch.tensor(self.lengths, device=device) + 1
        return (torch.arange(width, device=device) >= width - lengths[:, None]).long()

    def position_ids(self, device: torch.device) -> torch.Tensor:
        """[rows, 1] int64 places of the new token."""
        return torch.tensor(self.lengths, dtype=torch.int64, device=device)[:, None]

    @property
    def width(self) -> int:
        """Columns that attention sees in the next forward pass."""
        return self._end + 1 - self._start

    @property
    def columns(self) -> slice:
        """Where those lie in the buffers."""
        return slice(self._start, self._end + 1)

    def _reserve(self, rows: int, *, more_left: int = 0) -> None:
        """Make room for `rows` and one more column, after moving all by `more_left` columns."""
        if not self._layers:
            return
        have_rows, have_columns = self._layers[0].room
        shift = more_left
        if self._end + more_left + 1 > have_columns and more_left == 0 and self.lengths:
            shift = -self._start  # first give back the columns that nobody uses
        columns = self._end + shift + 1
        if rows <= have_rows and columns <= have_columns and shift == 0:
            return
        if rows > have_rows:
            have_rows = max(rows, 2 * have_rows)
        if columns > have_columns:
            have_columns = max(columns + _COLUMNS_AT_ONCE, 2 * have_columns)
        for buffers in self._layers:
            buffers.resize(have_rows, have_columns, shift, len(self.lengths))
        self._end += shift


class _Buffers:
    """Keys and values of one layer, [rows, heads, columns, dim]."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take head count, width, dtype and device from a prefill's [heads, tokens, dim]."""
        self.keys = keys.new_zeros((0, keys.shape[0], 0, keys.shape[2]))
        self.values = values.new_zeros((0, values.shape[0], 0, values.shape[2]))

    @property
    def room(self) -> tuple[int, int]:
        return self.keys.shape[0], self.keys.shape[2]

    def put(self, rows: slice, end: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        begin = end - keys.shape[1]
        for buffer, new in ((self.keys, keys), (self.values, values)):
            buffer[rows] = 0  # a row that failed may have left NaN here
            buffer[rows, :, begin:end] = new

    def move_row(self, source: int, target: int) -> None:
        self.keys[target] = self.keys[source]
        self.values[target] = self.values[source]

    def resize(self, rows: int, columns: int, shift: int, used: int) -> None:
        self.keys = _moved(self.keys, rows, columns, shift, used)
        self.values = _moved(self.values, rows, columns, shift, used)


def _moved(old: torch.Tensor, rows: int, columns: int, shift: int, used: int) -> torch.Tensor:
    new = old.new_zeros((rows, old.shape[1], columns, old.shape[3]))
    source = old[:used, :, max(-shift, 0) :]
    begin = max(shift, 0)
    width = min(source.shape[2], columns - begin)
    new[:used, :, begin : begin + width] = source[:, :, :width]
    return new


class _DecodeLayer(CacheLayerMixin):
    """One layer of one forward pass of one token a row: writes a column, shows all of them."""

    is_sliding = False

    def __init__(self, buffers: _Buffers, batch: BatchCache) -> None:
        super().__init__()
        self._buffers = buffers
        self._rows = len(batch)
        self._columns = batch.columns
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the buffers are there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [rows, heads, 1, dim] and return [rows, heads, width, dim]."""
        last = self._columns.stop - 1
        keys, values = self._buffers.keys, self._buffers.values
        keys[: self._rows, :, last] = key_states[:, :, 0]
        values[: self._rows, :, last] = value_states[:, :, 0]
        return keys[: self._rows, :, self._columns], values[: self._rows, :, self._columns]

    def get_seq_length(self) -> int:
        """Columns before the new one."""
        return self._columns.stop - self._columns.start - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width of the keys, and the column that they begin in."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20
