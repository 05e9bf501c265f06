"""`POST /get_reward` and `GET /healthz`, for clients that speak OpenRLHF's HTTP protocol.

    {"query": [str], "prompts": [str], "labels": [any]}
    -> {"rewards": [float], "scores": [float], "extra_logs": {name: [float]}}

The protocol has no place for the failure of one item, so a call with such an item fails as a whole,
with a status that tells whether another try can help: 422 for content, 503 for machinery. Calls go
through the same batcher as gRPC's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, Field, ValidationError, model_validator

from quartet.errors import ConfigError, QuartetError
from quartet.types import Failure, Reward, ScoreItem, ScoreRequest
from quartet_reward.room import RewardRoom

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
"""A larger request is refused before it is read to its end."""


class Query(BaseModel):
    """What a client posts; the three lists belong together item by item."""

    query: list[str]
    """Prompt and completion as one text."""
    prompts: list[str] = Field(default_factory=list)
    labels: list[Any] = Field(default_factory=list)

    @model_validator(mode="after")
    def _same_lengths(self) -> Query:
        for name, values in (("prompts", self.prompts), ("labels", self.labels)):
            if values and len(values) != len(self.query):
                raise ValueError(f"{name} has {len(values)} items, query has {len(self.query)}")
        return self

    def items(self) -> tuple[ScoreItem, ...]:
        """As the room wants them."""
        call = uuid.uuid4().hex
        return tuple(
            ScoreItem(
                sample_id=f"http-{call}/{index}",
                prompt=self.prompts[index] if self.prompts else "",
                query=text,
                label=self.labels[index] if self.labels else "",
            )
            for index, text in enumerate(self.query)
        )


class HttpFront:
    """An HTTP door to a reward room, beside the gRPC one."""

    def __init__(self, room: RewardRoom, *, host: str, port: int) -> None:
        """Serve `room` at `host`; port 0 takes any free one."""
        self._host, self._port = host, port
        self._server = _Server(
            uvicorn.Config(application(room), lifespan="off", log_config=None, access_log=False)
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen; returns host:port.

        Raises:
            ConfigError: the address cannot be bound.
        """
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        bound = socket.socket(family)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((self._host, self._port))
        except OSError as error:
            bound.close()
            raise ConfigError(
                f"http.port {self._port} on {self._host} cannot be bound: {error.strerror}",
                field="http.port",
                value=str(self._port),
                remedy="give another port, or 0 for any free one",
            ) from error
        bound.listen()
        address = f"{self._host}:{bound.getsockname()[1]}"
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]))
        log.info("POST http://%s/get_reward answers like gRPC", address)
        return address

    async def stop(self) -> None:
        """Finish the calls under way and close."""
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._serving = None


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def application(room: RewardRoom) -> FastAPI:
    """The two routes."""
    app = FastAPI(title="Quartet reward service", docs_url=None, redoc_url=None)

    @app.post("/get_reward")
    async def get_reward(request: Request) -> dict[str, Any]:
        query = _parse(await _body(request))
        items = query.items()
        if not items:
            return {"rewards": [], "scores": [], "extra_logs": {}}
        try:
            batch = await room.score(ScoreRequest(request_id=items[0].sample_id, items=items))
        except QuartetError as error:
            raise HTTPException(_status(error.error_class), detail=error.message) from error
        return _answer([result.outcome for result in batch.results])

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        if not room.is_serving:
            raise HTTPException(503, detail="NOT_SERVING")
        return {"status": "SERVING"}

    return app


async def _body(request: Request) -> bytes:
    """The whole body, but no more than is allowed."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise HTTPException(413, detail=f"more than {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _parse(body: bytes) -> Query:
    try:
        return Query.model_validate_json(body)
    except ValidationError as error:
        detail = [
            {"field": ".".join(map(str, e["loc"])) or "body", "problem": e["msg"]}
            for e in error.errors()
        ]
        raise HTTPException(422, detail=detail) from error


def _answer(outcomes: Sequence[Reward | Failure]) -> dict[str, Any]:
    """All rewards, or the error of all items that have none."""
    failures = [(i, o) for i, o in enumerate(outcomes) if isinstance(o, Failure)]
    if failures:
        raise HTTPException(
            max(_status(failure.error_class) for _, failure in failures),
            detail=[
                {"index": index, "reason": failure.reason, "message": failure.message}
                for index, failure in failures
            ],
        )
    rewards = [outcome for outcome in outcomes if isinstance(outcome, Reward)]
    # A list must have one number an item: a log that some items lack cannot be told.
    common = set.intersection(*(set(reward.extra_logs) for reward in rewards))
    return {
        "rewards": [reward.reward for reward in rewards],
        "scores": [reward.score for reward in rewards],
        "extra_logs": {name: [r.extra_logs[name] for r in rewards] for name in sorted(common)},
    }


def _status(error_class: str) -> int:
    """422: the same content fails again. 503: another try, or another replica, may do better."""
    return 422 if error_class in ("DATA", "REQUEST") else 503
