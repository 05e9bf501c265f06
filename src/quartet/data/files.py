"""Local files as lists of rows. Read natively: no cache is written, no schema is forced."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from quartet.errors import ConfigError

Row = dict[str, Any]


def read_file(path: Path, *, limit: int) -> list[Row]:
    """The first `limit` rows of a data file.

    Raises:
        ConfigError: the file cannot be read or parsed; the message names the place.
    """
    try:
        return list(islice(_READERS[path.suffix](path), limit))
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"cannot read the data set {str(path)!r}: {first_line}",
            reason="DATASET_UNREADABLE",
            value=str(path),
        ) from error


def is_data_file(path: Path) -> bool:
    """Whether the extension is one that `read_file` knows."""
    return path.suffix in _READERS


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _object(_parse(line, path, number), path, f"line {number}")


def _json(path: Path) -> Iterator[Row]:
    """A list of objects, or one object a line."""
    text = path.read_text(encoding="utf-8")
    if not text.lstrip().startswith("["):
        yield from _json_lines(path)
        return
    for index, value in enumerate(_parse(text, path, 1)):
        yield _object(value, path, f"item {index}")


def _parse(text: str, path: Path, line: int) -> Any:
    """Parse JSON, and name file and line when it is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = line + error.doc[: error.pos].rstrip().count("\n")
        raise ValueError(f"line {place} is not JSON ({error.msg}, column {error.colno})") from error


def _object(value: Any, path: Path, place: str) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is not an object with columns but a {type(value).__name__}")
    return value


def _csv(path: Path) -> Iterator[Row]:
    import pyarrow.csv

    yield from _arrow_rows(pyarrow.csv.open_csv(path))


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        yield from _arrow_rows(file.iter_batches())


def _arrow(path: Path) -> Iterator[Row]:
    """Either form of Arrow's file: a stream (as `datasets` writes it), or with a footer."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        try:
            reader = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            file = pyarrow.ipc.open_file(source)
            yield from _arrow_rows(file.get_batch(i) for i in range(file.num_record_batches))
        else:
            yield from _arrow_rows(reader)


def _arrow_rows(batches: Any) -> Iterator[Row]:
    for batch in batches:
        yield from batch.to_pylist()


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
