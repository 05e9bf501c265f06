r"""The ledger: what became of every sample, kept in SQLite in the run's folder.

    issued -> generated -> scored -> trained
       \_________\_________\______-> dropped, with a reason

Each edge is one transaction over a batch of samples, and each checks the state it starts from, so a
sample can reach exactly one of the two ends. Steps, optimizer steps and the loop's own state (data
cursor, KL coefficient, best metric) are kept beside them: what a restarted trainer needs.

All statements run on one thread of the ledger's own, so the event loop never waits for the disk.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from quartet.errors import ConfigError, FatalError

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS samples (
    sample_id TEXT PRIMARY KEY,
    group_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    seed TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '',
    message TEXT NOT NULL DEFAULT '',
    replica TEXT NOT NULL DEFAULT '',
    first_policy_version INTEGER,
    last_policy_version INTEGER,
    num_tokens INTEGER,
    reward REAL,
    score REAL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS samples_by_step ON samples (step, state);
CREATE TABLE IF NOT EXISTS steps (
    step INTEGER PRIMARY KEY,
    state TEXT NOT NULL,
    policy_version INTEGER NOT NULL,
    plan TEXT NOT NULL,
    metrics TEXT,
    began REAL NOT NULL,
    ended REAL
);
CREATE TABLE IF NOT EXISTS optimizer_steps (
    request_id TEXT PRIMARY KEY,
    step INTEGER NOT NULL,
    role TEXT NOT NULL,
    number INTEGER NOT NULL,
    sample_ids TEXT NOT NULL,
    applied INTEGER
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS state (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
"""

T = TypeVar("T")


class SampleState(StrEnum):
    """Where a sample stands."""

    ISSUED = "issued"
    GENERATED = "generated"
    SCORED = "scored"
    TRAINED = "trained"
    DROPPED = "dropped"


_LIVE = (SampleState.ISSUED, SampleState.GENERATED, SampleState.SCORED)


@dataclass(frozen=True, kw_only=True, slots=True)
class IssuedSample:
    """A sample that is about to be generated."""

    sample_id: str
    group_id: str
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedSample:
    """What generation says of a sample."""

    sample_id: str
    replica: str
    first_policy_version: int
    last_policy_version: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedSample:
    """Why a sample will not be trained."""

    sample_id: str
    reason: str
    """Stable name, also the end of the metric `dropped/<reason>`."""
    message: str = ""


class Ledger:
    """One run's ledger. Every method is atomic; a broken rule raises FatalError."""

    def __init__(self, path: Path) -> None:
        """Open or create the ledger at `path`.

        Raises:
            ConfigError: the file is no ledger, or one of another schema.
        """
        self.path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        self._db = self._thread.submit(_open, path).result()

    async def close(self) -> None:
        """Finish what is queued and close the file. May be called twice."""
        if self._db is not None:
            db, self._db = self._db, None
            await asyncio.wrap_future(self._thread.submit(db.close))
            self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` as one transaction on the ledger's thread."""
        db = self._db
        if db is None:
            raise FatalError("the ledger is closed", reason="LEDGER_CLOSED")

        def transaction() -> T:
            with db:
                db.execute("BEGIN IMMEDIATE")
                return work(db)

        return await asyncio.wrap_future(self._thread.submit(transaction))

    # Steps

    async def begin_step(self, step: int, *, policy_version: int, plan: Mapping[str, Any]) -> None:
        """Record that step `step` begins: its prompts, seeds and the version that will sample."""
        row = (step, "running", policy_version, json.dumps(plan), time.time())
        await self._run(
            lambda db: db.execute(
                "INSERT INTO steps (step, state, policy_version, plan, began)"
                " VALUES (?, ?, ?, ?, ?)",
                row,
            )
        )

    async def end_step(
        self, step: int, *, metrics: Mapping[str, float], state: Mapping[str, Any]
    ) -> None:
        """Close step `step` with its metrics, and save the loop's state in the same transaction.

        Raises:
            FatalError: a sample of this step is neither trained nor dropped.
        """

        def work(db: sqlite3.Connection) -> None:
            open_samples = db.execute(
                "SELECT sample_id FROM samples WHERE step = ? AND state IN (?, ?, ?)",
                (step, *_LIVE),
            ).fetchall()
            if open_samples:
                raise FatalError(
                    f"step {step} ends with {len(open_samples)} samples neither trained nor "
                    f"dropped, the first is {open_samples[0][0]}",
                    reason="LEDGER_OPEN_SAMPLES",
                )
            db.execute(
                "UPDATE steps SET state = 'done', metrics = ?, ended = ? WHERE step = ?",
                (json.dumps(metrics), time.time(), step),
            )
            _put_state(db, state)

        await self._run(work)

    async def rewind(self, step: int) -> None:
        """Forget everything after `step`: the run goes on from a checkpoint made there."""

        def work(db: sqlite3.Connection) -> None:
            for table in ("samples", "steps", "optimizer_steps"):
                db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))

        await self._run(work)

    async def last_step(self) -> int:
        """Number of the last finished step; -1 when there is none."""
        row = await self._run(
            lambda db: db.execute("SELECT MAX(step) FROM steps WHERE state = 'done'").fetchone()
        )
        return -1 if row[0] is None else int(row[0])

    # Samples

    async def issue(self, step: int, samples: Iterable[IssuedSample]) -> None:
        """Record samples that are about to be generated."""
        rows = [(s.sample_id, s.group_id, step, str(s.seed), SampleState.ISSUED) for s in samples]
        await self._run(
            lambda db: db.executemany(
                "INSERT INTO samples (sample_id, group_id, step, seed, state)"
                " VALUES (?, ?, ?, ?, ?)",
                rows,
            )
        )

    async def generated(self, samples: Sequence[GeneratedSample]) -> None:
        """Move samples from issued to generated."""
        rows = [
            (s.replica, s.first_policy_version, s.last_policy_version, s.num_tokens, s.sample_id)
            for s in samples
        ]
        await self._advance(
            "UPDATE samples SET state = 'generated', replica = ?, first_policy_version = ?,"
            " last_policy_version = ?, num_tokens = ? WHERE sample_id = ? AND state = 'issued'",
            rows,
            SampleState.GENERATED,
        )

    async def scored(self, rewards: Mapping[str, tuple[float, float]]) -> None:
        """Move samples from generated to scored; the values are (reward, score)."""
        rows = [(reward, score, sample_id) for sample_id, (reward, score) in rewards.items()]
        await self._advance(
            "UPDATE samples SET state = 'scored', reward = ?, score = ?"
            " WHERE sample_id = ? AND state = 'generated'",
            rows,
            SampleState.SCORED,
        )

    async def trained(self, sample_ids: Sequence[str]) -> None:
        """Move samples from scored to trained."""
        await self._advance(
            "UPDATE samples SET state = 'trained' WHERE sample_id = ? AND state = 'scored'",
            [(sample_id,) for sample_id in sample_ids],
            SampleState.TRAINED,
        )

    async def dropped(self, samples: Sequence[DroppedSample]) -> None:
        """Move samples from any live state to dropped."""
        rows = [(s.reason, s.message, s.sample_id) for s in samples]
        await self._advance(
            "UPDATE samples SET state = 'dropped', reason = ?, message = ? WHERE sample_id = ?"
            " AND state IN ('issued', 'generated', 'scored')",
            rows,
            SampleState.DROPPED,
        )

    async def move(self, step: int, sample_ids: Sequence[str]) -> None:
        """Have samples belong to step `step`: they were made ahead, and are for a later one."""
        await self._run(
            lambda db: db.executemany(
                "UPDATE samples SET step = ? WHERE sample_id = ?",
                [(step, sample_id) for sample_id in sample_ids],
            )
        )

    async def _advance(
        self, statement: str, rows: Sequence[tuple[Any, ...]], target: SampleState
    ) -> None:
        """Run one guarded update a sample; all of them, or none."""

        def work(db: sqlite3.Connection) -> None:
            for row in rows:
                if db.execute(statement, row).rowcount != 1:
                    raise _illegal(db, str(row[-1]), target)

        if rows:
            await self._run(work)

    async def counts(self, step: int | None = None) -> dict[str, int]:
        """Number of samples by state, in one step or in the whole run."""
        where, args = ("", ()) if step is None else (" WHERE step = ?", (step,))
        rows = await self._run(
            lambda db: db.execute(
                f"SELECT state, COUNT(*) FROM samples{where} GROUP BY state", args
            ).fetchall()
        )
        return dict(rows)

    async def drop_reasons(self, step: int | None = None) -> dict[str, int]:
        """Number of dropped samples by reason, in one step or in the whole run."""
        where, args = ("", ()) if step is None else (" AND step = ?", (step,))
        rows = await self._run(
            lambda db: db.execute(
                "SELECT reason, COUNT(*) FROM samples WHERE state = 'dropped'"
                f"{where} GROUP BY reason ORDER BY reason",
                args,
            ).fetchall()
        )
        return dict(rows)

    # Optimizer steps

    async def begin_optimizer_step(
        self, *, request_id: str, step: int, role: str, number: int, sample_ids: Sequence[str]
    ) -> None:
        """Record what an optimizer step trains on, before it is sent."""
        row = (request_id, step, role, number, json.dumps(list(sample_ids)))
        await self._run(
            lambda db: db.execute(
                "INSERT INTO optimizer_steps (request_id, step, role, number, sample_ids)"
                " VALUES (?, ?, ?, ?, ?)",
                row,
            )
        )

    async def end_optimizer_step(self, request_id: str, *, applied: bool) -> None:
        """Record the learner's answer."""
        await self._run(
            lambda db: db.execute(
                "UPDATE optimizer_steps SET applied = ? WHERE request_id = ?",
                (int(applied), request_id),
            )
        )

    # State of the loop

    async def save_state(self, values: Mapping[str, Any]) -> None:
        """Store JSON values by key."""
        await self._run(lambda db: _put_state(db, values))

    async def load_state(self) -> dict[str, Any]:
        """All stored values."""
        rows = await self._run(lambda db: db.execute("SELECT key, value FROM state").fetchall())
        return {key: json.loads(value) for key, value in rows}


def _open(path: Path) -> sqlite3.Connection | None:
    """Open the file, set its pragmas and create or check its schema."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        # isolation_level None: transactions are begun by hand, in `_run`.
        db = sqlite3.connect(path, isolation_level=None)
        db.execute("PRAGMA journal_mode = WAL")
        # With WAL, NORMAL loses at most the last transactions in a power cut, never the file.
        db.execute("PRAGMA synchronous = NORMAL")
        found = int(db.execute("PRAGMA user_version").fetchone()[0])
        if found not in (0, SCHEMA_VERSION):
            raise ConfigError(
                f"{path} is a ledger of schema {found}, this version reads {SCHEMA_VERSION}",
                field="run.dir",
                value=str(path.parent),
                remedy="use another folder",
            )
        db.executescript(_SCHEMA)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    except sqlite3.DatabaseError as error:
        raise ConfigError(
            f"{path} cannot be used as a ledger: {error}",
            field="run.dir",
            value=str(path.parent),
            remedy="use another folder",
        ) from error
    return db


def _put_state(db: sqlite3.Connection, values: Mapping[str, Any]) -> None:
    db.executemany(
        "INSERT INTO state (key, value) VALUES (?, ?)"
        " ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        [(key, json.dumps(value)) for key, value in values.items()],
    )


def _illegal(db: sqlite3.Connection, sample_id: str, target: SampleState) -> FatalError:
    row = db.execute("SELECT state FROM samples WHERE sample_id = ?", (sample_id,)).fetchone()
    found = row[0] if row else "unknown"
    return FatalError(
        f"sample {sample_id} cannot become {target}: it is {found}",
        reason="LEDGER_ILLEGAL_EDGE",
        sample_id=sample_id,
    )
