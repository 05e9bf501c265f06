"""The ledger keeps its one promise: each sample ends in exactly one way."""

import random
import sqlite3

import pytest

from quartet.errors import ConfigError, FatalError
from quartet.trainer.ledger import (
    DroppedSample,
    GeneratedSample,
    IssuedSample,
    Ledger,
)


@pytest.fixture
async def ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    yield ledger
    await ledger.close()


def issued(*names):
    return [IssuedSample(sample_id=n, group_id=n[0], seed=2**64 - 1) for n in names]


def generated(*names):
    return [
        GeneratedSample(
            sample_id=n, replica="r0", first_policy_version=3, last_policy_version=4, num_tokens=7
        )
        for n in names
    ]


async def test_sample_goes_through_all_states(ledger):
    await ledger.begin_step(0, policy_version=0, plan={"prompts": ["a"]})
    await ledger.issue(0, issued("a0", "a1"))
    await ledger.generated(generated("a0", "a1"))
    await ledger.scored({"a0": (1.0, 0.5), "a1": (2.0, 2.0)})
    await ledger.trained(["a0"])
    await ledger.dropped([DroppedSample(sample_id="a1", reason="filtered")])
    assert await ledger.counts() == {"trained": 1, "dropped": 1}
    assert await ledger.drop_reasons(0) == {"filtered": 1}
    await ledger.end_step(0, metrics={"reward": 1.5}, state={"cursor": 1})
    assert await ledger.last_step() == 0
    assert await ledger.load_state() == {"cursor": 1}


async def test_values_are_kept(ledger):
    await ledger.issue(0, issued("a0"))
    await ledger.generated(generated("a0"))
    await ledger.scored({"a0": (1.5, 0.5)})
    with sqlite3.connect(ledger.path) as db:
        row = db.execute(
            "SELECT seed, replica, first_policy_version, last_policy_version, num_tokens,"
            " reward, score FROM samples"
        ).fetchone()
    assert row == (str(2**64 - 1), "r0", 3, 4, 7, 1.5, 0.5)


@pytest.mark.parametrize("edge", ["scored", "trained"])
async def test_states_cannot_be_skipped(ledger, edge):
    await ledger.issue(0, issued("a0"))
    call = ledger.scored({"a0": (1.0, 1.0)}) if edge == "scored" else ledger.trained(["a0"])
    with pytest.raises(FatalError, match="it is issued"):
        await call


async def test_ends_are_final(ledger):
    await ledger.issue(0, issued("a0"))
    await ledger.dropped([DroppedSample(sample_id="a0", reason="x")])
    with pytest.raises(FatalError, match="it is dropped"):
        await ledger.dropped([DroppedSample(sample_id="a0", reason="y")])
    with pytest.raises(FatalError, match="it is dropped"):
        await ledger.generated(generated("a0"))


async def test_batch_is_all_or_nothing(ledger):
    await ledger.issue(0, issued("a0", "a1"))
    with pytest.raises(FatalError, match="zz"):
        await ledger.generated(generated("a0", "zz"))
    assert await ledger.counts() == {"issued": 2}


async def test_step_does_not_end_with_open_samples(ledger):
    await ledger.begin_step(0, policy_version=0, plan={})
    await ledger.issue(0, issued("a0"))
    with pytest.raises(FatalError, match="a0"):
        await ledger.end_step(0, metrics={}, state={"cursor": 5})
    assert await ledger.last_step() == -1
    assert await ledger.load_state() == {}


async def test_issuing_twice_is_refused(ledger):
    await ledger.issue(0, issued("a0"))
    with pytest.raises(sqlite3.IntegrityError):
        await ledger.issue(1, issued("a0"))


async def test_survives_reopening(ledger):
    await ledger.issue(0, issued("a0"))
    await ledger.save_state({"kl_coef": 0.25})
    await ledger.save_state({"kl_coef": 0.5, "best": None})
    await ledger.begin_optimizer_step(
        request_id="q", step=0, role="learner", number=1, sample_ids=["a0"]
    )
    await ledger.end_optimizer_step("q", applied=False)
    await ledger.close()
    again = Ledger(ledger.path)
    assert await again.counts() == {"issued": 1}
    assert await again.load_state() == {"kl_coef": 0.5, "best": None}
    await again.close()
    with pytest.raises(FatalError, match="closed"):
        await again.counts()


def test_foreign_file_is_a_config_error(tmp_path):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(ConfigError, match="cannot be used"):
        Ledger(path)


def test_other_schema_is_a_config_error(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigError, match="schema 99"):
        Ledger(path)


async def test_random_walks_end_exactly_once(ledger):
    """Whatever order of edges is tried, no sample passes through two ends."""
    rng = random.Random(7)
    names = [f"s{i}" for i in range(20)]
    await ledger.issue(0, issued(*names))
    ends = dict.fromkeys(names, 0)
    for _ in range(400):
        name = rng.choice(names)
        edge = rng.randrange(4)
        try:
            if edge == 0:
                await ledger.generated(generated(name))
            elif edge == 1:
                await ledger.scored({name: (0.0, 0.0)})
            elif edge == 2:
                await ledger.trained([name])
                ends[name] += 1
            elif rng.random() < 0.2:
                await ledger.dropped([DroppedSample(sample_id=name, reason="r")])
                ends[name] += 1
        except FatalError:
            continue
    assert set(ends.values()) <= {0, 1}
    counts = await ledger.counts()
    assert counts["trained"] + counts["dropped"] == sum(ends.values()) > 10
