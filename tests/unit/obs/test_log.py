"""One line an event, with who says it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from quartet.errors import ConfigError
from quartet.obs import log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process's logging and names as they were."""
    monkeypatch.delenv("QUARTET_LOG_FORMAT", raising=False)
    monkeypatch.delenv("QUARTET_LOG_LEVEL", raising=False)
    root, ours = logging.getLogger(), logging.getLogger("quartet")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    log.bind(**dict.fromkeys(log.FIELDS, ""))


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    log.configure("rollout", stream=stream)
    log.bind(replica="rollout-1", request_id="r", policy_version=3)
    logging.getLogger("quartet.x").warning("loaded %d tensors, é", 5)
    (line,) = lines(stream)
    assert str(line.pop("ts")).endswith("+00:00")
    assert line == {
        "level": "WARNING",
        "logger": "quartet.x",
        "room": "rollout",
        "replica": "rollout-1",
        "request_id": "r",
        "policy_version": 3,
        "msg": "loaded 5 tensors, é",
    }


def test_plain_on_a_terminal() -> None:
    stream = Terminal()
    log.configure("reward", stream=stream)
    log.bind(request_id="r")
    logger = logging.getLogger("quartet.x")
    logger.info("one")
    logger.error("two")
    first, second = (line.split(" ", 1)[1] for line in stream.getvalue().splitlines())
    assert first == "reward [request_id r] one"
    assert second == "ERROR reward [request_id r] two"


@pytest.mark.parametrize("style", ["plain", "json"])
def test_traceback(style: str) -> None:
    stream = io.StringIO()
    log.configure("ref", style=style, stream=stream)
    try:
        raise KeyError("k")
    except KeyError:
        logging.getLogger("quartet.x").exception("failed")
    assert "KeyError: 'k'" in stream.getvalue()
    if style == "json":
        assert "Traceback" in str(lines(stream)[0]["exc"])


def test_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setenv("QUARTET_LOG_FORMAT", "json")
    monkeypatch.setenv("QUARTET_LOG_LEVEL", "error")
    log.configure("ref", stream=stream)
    logging.getLogger("quartet.x").warning("left out")
    logging.getLogger("quartet.x").error("shown")
    assert [line["msg"] for line in lines(stream)] == ["shown"]


@pytest.mark.parametrize("name", ["QUARTET_LOG_FORMAT", "QUARTET_LOG_LEVEL"])
def test_a_wrong_environment_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "loud")
    with pytest.raises(ConfigError, match=f"{name} is 'loud'"):
        log.configure("ref", stream=io.StringIO())


def test_libraries_are_quiet_below_warning() -> None:
    stream = io.StringIO()
    log.configure("ref", stream=stream)
    logging.getLogger("library").info("left out")
    logging.getLogger("library").warning("shown")
    assert [line["msg"] for line in lines(stream)] == ["shown"]


def test_configured_twice_logs_once() -> None:
    first, second = io.StringIO(), io.StringIO()
    log.configure("ref", stream=first)
    log.configure("ref", stream=second)
    logging.getLogger("quartet.x").info("one")
    assert first.getvalue() == ""
    assert len(lines(second)) == 1


async def test_tasks_keep_their_own_names() -> None:
    async def work(name: str) -> object:
        log.bind(request_id=name)
        await asyncio.sleep(0)
        return log.bound().get("request_id")

    assert await asyncio.gather(work("a"), work("b")) == ["a", "b"]
    assert "request_id" not in log.bound()


def test_empty_text_takes_a_name_away_and_zero_does_not() -> None:
    log.bind(request_id="r", policy_version=0)
    log.bind(request_id="")
    assert log.bound() == {"policy_version": 0}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(TypeError, match="not sample"):
        log.bind(sample="x")
