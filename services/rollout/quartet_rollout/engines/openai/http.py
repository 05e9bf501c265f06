"""Calls of the server: JSON, and streams of completions. Its failures become Quartet's errors.

Every call has a connection of its own: closing it is how a request is given up, and no call meets
a connection that the server has just closed.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from quartet.errors import ConfigError, InfraError, QuartetError, RequestError

CONNECT_SECONDS = 10.0
CALL_SECONDS = 60.0
"""For what the server answers at once."""
_LONGEST_LINE = 16 << 20
_SHOWN = 300
"""Characters of a refusal that are shown."""


class Server:
    """One OpenAI-compatible server. Belongs to one event loop."""

    def __init__(
        self, url: str, calls: aiohttp.ClientSession, streams: aiohttp.ClientSession
    ) -> None:
        self.url = url
        """Without `/v1`."""
        self._calls = calls
        self._streams = streams

    @classmethod
    @asynccontextmanager
    async def reached(cls, url: str, *, key: str | None, max_streams: int) -> AsyncIterator[Server]:
        """Have sessions with a server for the block. Nothing is sent yet.

        Args:
            url: With or without `/v1`.
            key: Sent as a bearer token.
            max_streams: Completions under way at once; more wait, first come first served.

        Raises:
            ConfigError: It is no URL.
        """
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)

        def session(limit: int) -> aiohttp.ClientSession:
            connector = aiohttp.TCPConnector(limit=limit, force_close=True)
            return aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)

        root = check_url(url)
        async with session(0) as calls, session(max_streams) as streams:
            yield cls(root, calls, streams)

    async def get(self, path: str, *, seconds: float = CALL_SECONDS) -> Any:
        """The JSON at a path, or None where it is empty.

        Raises:
            QuartetError: See `post`.
        """
        return await self._call("GET", path, seconds)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        seconds: float = CALL_SECONDS,
    ) -> Any:
        """Post JSON, and get JSON back, or None where the answer is empty.

        Raises:
            InfraError: Nobody is there (SERVER_DOWN), no answer in time, or the server failed.
            RequestError: The server refuses the request, or has no such path (SERVER_HAS_NOT).
            ConfigError: It refuses the key.
        """
        return await self._call("POST", path, seconds, json=body, params=query)

    async def stream(self, path: str, body: Mapping[str, Any], take: Callable[[Any], None]) -> None:
        """Post JSON, and hand over each event of the answer. A cancelled caller ends the request.

        Raises:
            QuartetError: As `post`; also when the answer breaks off.
        """
        try:
            async with self._streams.post(self.url + path, json=body) as response:
                await self._check_status(path, response)
                if response.content_type != "text/event-stream":
                    raise InfraError(
                        f"{self.url}{path} answers {response.content_type}, not a stream of events",
                        reason="ANSWER_MALFORMED",
                    )
                async for event in _events(response.content):
                    take(event)
        except (aiohttp.ClientError, OSError) as error:
            raise self._down(error) from error

    async def _call(self, method: str, path: str, seconds: float, **arguments: Any) -> Any:
        # A hook has an address of its own.
        url = path if "://" in path else self.url + path
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with self._calls.request(method, url, timeout=timeout, **arguments) as response:
                await self._check_status(path, response)
                text = await response.text()
                return json.loads(text) if text.strip() else None
        except TimeoutError as error:
            raise InfraError(
                f"{url} did not answer within {seconds:g} s", reason="SERVER_LATE"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._down(error) from error
        except json.JSONDecodeError as error:
            raise InfraError(f"{url} answers no JSON", reason="ANSWER_MALFORMED") from error

    async def _check_status(self, path: str, response: aiohttp.ClientResponse) -> None:
        if response.status < 300:
            return
        raise _refusal(f"{self.url}{path}", response.status, _message(await response.text()))

    def _down(self, error: Exception) -> InfraError:
        return InfraError(
            f"the server at {self.url} cannot be reached: {error or type(error).__name__}",
            reason="SERVER_DOWN",
            remedy="see the server's log",
        )


def check_url(url: str) -> str:
    """The server's address without a path.

    Example:
        >>> check_url("http://127.0.0.1:8000/v1/")
        'http://127.0.0.1:8000'

    Raises:
        ConfigError: It is none.
    """
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ConfigError(
            f"rollout.server_url {url} is no address of a server",
            field="rollout.server_url",
            value=url,
            remedy="give http://host:port",
        )
    return url.strip().rstrip("/").removesuffix("/v1").rstrip("/")


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[Any]:
    """JSON of the server-sent events, up to [DONE]."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            raise InfraError("a line of the answer is too long", reason="ANSWER_MALFORMED")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            text = line.removeprefix(b"data:").strip()
            if text == b"[DONE]":
                return
            yield _checked(text)


def _checked(text: bytes) -> Any:
    try:
        event = json.loads(text)
    except json.JSONDecodeError as error:
        raise InfraError("an event of the answer is no JSON", reason="ANSWER_MALFORMED") from error
    if isinstance(event, dict) and event.get("error"):
        raise InfraError(
            f"the server failed: {_message(json.dumps(event))}", reason="ENGINE_FAILED"
        )
    return event


def _message(text: str) -> str:
    """The sentence in an error of the server's, in whichever way it wraps it."""
    try:
        found = json.loads(text)
    except ValueError:
        return text[:_SHOWN]
    error = found.get("error", found) if isinstance(found, dict) else found
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return str(message or text)[:_SHOWN]


def _refusal(url: str, status: int, message: str) -> QuartetError:
    said = f"{url} answers {status}: {message}"
    if status in (401, 403):
        return ConfigError(
            said,
            reason="SERVER_KEY_REFUSED",
            field="rollout.server_key",
            remedy="give the key that the server was started with, --rollout.server_key",
        )
    if status in (404, 405):
        return RequestError(said, reason="SERVER_HAS_NOT", field="rollout.server_url", value=url)
    if status == 429 or status >= 500:
        return InfraError(said, reason="ENGINE_FAILED")
    return RequestError(said, reason="SERVER_REFUSES")
