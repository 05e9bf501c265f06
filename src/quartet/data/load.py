"""From what the user wrote behind `--data.dataset` to rows.

Forms, in this order: a file (.jsonl .json .csv .parquet .arrow); a folder that `datasets` saved, or
of data files; a name on the hub. Each also as `place@folder`, and several with commas. Local files
need neither the network nor the `datasets` package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quartet.config.data import EvalConfig, OfflineDataFields, PromptDataConfig
from quartet.data.files import is_data_file, read_file
from quartet.errors import ConfigError

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Which rows to read, and the flag to name when something is wrong with it."""

    names: str
    """Data sets, several with commas."""
    field: str
    """The flag that gave the names."""
    probs: str | None = None
    """Shares in the mix, with commas; None: one after the other."""
    split: str = "train"
    """Split, of data sets that have splits; a file is taken whole."""
    max_samples: int = 1_000_000
    """Most rows of each data set, and of the mix."""


def train_source(data: OfflineDataFields | PromptDataConfig) -> Source:
    """The data set to train on.

    Raises:
        ConfigError: none is given.
    """
    if isinstance(data, PromptDataConfig):
        names, probs, split = data.prompt_dataset, data.prompt_probs, data.prompt_split
        flag = "data.prompt_dataset"
    else:
        names, probs, split = data.dataset, data.dataset_probs, data.dataset_split
        flag = "data.dataset"
    if not names:
        raise ConfigError(
            f"--{flag} is not set",
            reason="DATASET_MISSING",
            field=flag,
            remedy="name a file, a folder or a data set of the hub",
        )
    return Source(names=names, field=flag, probs=probs, split=split, max_samples=data.max_samples)


def eval_source(config: EvalConfig, *, max_samples: int = 1_000_000) -> Source | None:
    """The data set to evaluate on; None when there is none."""
    if not config.dataset:
        return None
    return Source(
        names=config.dataset, field="eval.dataset", split=config.split, max_samples=max_samples
    )


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with columns; a mix keeps the name of each row's own data set."""

    name: str
    rows: Sequence[Row]
    columns: tuple[str, ...]
    datasources: list[str]
    """The data set that each row came from."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def require(self, column: str, flag: str) -> None:
        """Check that a column exists.

        Raises:
            ConfigError: it does not; the message names those that do.
        """
        if column not in self.columns:
            raise ConfigError(
                f"the data set {self.name!r} has no column {column!r}; "
                f"its columns are {', '.join(map(repr, self.columns))}",
                reason="COLUMN_MISSING",
                field=flag,
                value=column,
                remedy=f"set --{flag} to one of them",
            )


def load_table(source: Source, *, seed: int) -> Table:
    """Read all data sets of a source, and mix them.

    Args:
        source: What to read.
        seed: Seed of the mix, where there are shares.

    Raises:
        ConfigError: a data set is not there, cannot be read, or is empty; shares do not fit.
    """
    tables = [_load_one(name, source) for name in _split_names(source)]
    mix = tables[0] if len(tables) == 1 else _mix(tables, source, seed)
    if len(mix) <= source.max_samples:
        return mix
    limit = source.max_samples
    rows = mix.rows[:limit] if isinstance(mix.rows, list) else _Subset(mix.rows, range(limit))
    return Table(mix.name, rows, mix.columns, mix.datasources[:limit])


def _split_names(source: Source) -> list[str]:
    if Path(source.names).expanduser().exists():  # a path may hold a comma
        return [source.names]
    names = [name.strip() for name in source.names.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--{source.field} names no data set", field=source.field)
    return names


def _load_one(name: str, source: Source) -> Table:
    place, _, folder = name.rpartition("@") if not Path(name).expanduser().exists() else ("",) * 3
    place = place or name
    data_dir = folder if place != name else None
    path = Path(place).expanduser()
    if path.suffix == ".py":
        raise _bad(source, name, "it is a script, and scripts are not run", "export it to .jsonl")
    if is_data_file(path):
        if not path.is_file():
            raise _bad(source, name, "there is no such file", f"looked in {path.parent.resolve()}")
        rows: Any = read_file(path, limit=source.max_samples)
        columns = tuple(dict.fromkeys(key for row in rows for key in row))
    else:
        rows, columns = _load_with_datasets(name, path, data_dir, source)
    if len(rows) == 0:
        raise _bad(source, name, "it has no rows", "")
    return Table(name, rows, columns, [name] * len(rows))


def _load_with_datasets(
    name: str, path: Path, data_dir: str | None, source: Source
) -> tuple[Any, tuple[str, ...]]:
    """Read a folder or a hub id with the `datasets` package."""
    if not path.is_dir() and (path.is_absolute() or name.startswith((".", "~"))):
        raise _bad(source, name, "there is no such file or folder", "")
    try:
        import datasets
    except ImportError as error:
        remedy = "pip install 'quartet-rlhf[trainer]', or give a .jsonl file"
        raise _bad(source, name, "the package `datasets` is not installed", remedy) from error
    try:
        if path.is_dir() and data_dir is None and _was_saved(path):
            data = datasets.load_from_disk(str(path))
        else:
            data = datasets.load_dataset(str(path) if path.is_dir() else name, data_dir=data_dir)
    except Exception as error:  # the package raises whatever its file systems raise
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _bad(source, name, first_line, "give a file, a folder or a hub id") from error
    if isinstance(data, dict):
        if source.split not in data:
            splits = ", ".join(map(str, data))
            raise _bad(source, name, f"it has no split {source.split!r} but {splits}", "")
        data = data[source.split]
    return data, tuple(data.column_names)


def _was_saved(folder: Path) -> bool:
    return (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists()


def _bad(source: Source, name: str, why: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"cannot load the data set {name!r}: {why}",
        reason="DATASET_NOT_LOADED",
        field=source.field,
        value=name,
        remedy=remedy,
    )


def _mix(tables: Sequence[Table], source: Source, seed: int) -> Table:
    """One after the other, or by shares. Rows keep their own columns."""
    sizes = [len(table) for table in tables]
    if source.probs is None:
        picks = [(t, row) for t, size in enumerate(sizes) for row in range(size)]
    else:
        picks = _interleave(sizes, _shares(source, len(tables)), seed, source.max_samples)
    return Table(
        name=source.names,
        rows=[tables[t].rows[row] for t, row in picks],
        columns=tuple(dict.fromkeys(column for table in tables for column in table.columns)),
        datasources=[tables[t].name for t, _ in picks],
    )


def _shares(source: Source, count: int) -> np.ndarray:
    """Parse the shares, scaled to a sum of 1."""
    try:
        shares = np.array([float(part) for part in str(source.probs).split(",")])
    except ValueError:
        shares = np.array([np.nan])
    if len(shares) != count or not (np.isfinite(shares).all() and (shares > 0).all()):
        flag = source.field.replace(
            "dataset", "probs" if "prompt" in source.field else "dataset_probs"
        )
        raise ConfigError(
            f"the shares {source.probs!r} do not fit {count} data sets",
            reason="SHARES_INVALID",
            field=flag,
            value=str(source.probs),
            remedy=f"give {count} numbers above 0 with commas",
        )
    return shares / shares.sum()


def _interleave(
    sizes: Sequence[int], shares: np.ndarray, seed: int, limit: int
) -> list[tuple[int, int]]:
    """Draw data sets by share until each was seen whole once; the shorter ones start over."""
    random = np.random.default_rng(seed)
    position, unseen = [0] * len(sizes), set(range(len(sizes)))
    picks: list[tuple[int, int]] = []
    while unseen and len(picks) < limit:
        for t in random.choice(len(sizes), size=1024, p=shares):
            picks.append((int(t), position[t] % sizes[t]))
            position[t] += 1
            if position[t] == sizes[t]:
                unseen.discard(int(t))
                if not unseen:
                    break
    return picks[:limit]


@dataclass(frozen=True, slots=True)
class _Subset(Sequence[Row]):
    """Some rows of a data set that reads them from disk one by one."""

    rows: Sequence[Row]
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[self.indices[index]]
