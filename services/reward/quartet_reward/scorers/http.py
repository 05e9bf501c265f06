"""HTTP reward endpoints that speak the incumbent's dialect.

    POST {"query": [str], "prompts": [str], "labels": [any]}
    200  {"rewards": number or [number], "scores": ..., "extra_logs": {...}}

Several endpoints share the load. One that does not answer is left alone for a while.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from quartet.errors import ConfigError, DataError, FatalError, InfraError, QuartetError
from quartet.types import Failure, ScoreItem
from quartet_reward.answer import DEFAULT_MAX_ABS, read_answer
from quartet_reward.scorer import Job, Outcome, ScorerTraits

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 64
"""Requests under way at once, over all endpoints."""
MAX_ANSWER_BYTES = 16 << 20
CONNECT_TIMEOUT = 10.0
REST_SECONDS = 5.0
"""How long an endpoint that failed is left alone while others answer."""
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
_REFUSES_ALL = frozenset({301, 302, 303, 307, 308, 401, 403, 404, 405, 407})
"""The URL or the access is wrong. Redirects count: followed, a POST would become a GET."""


class _TransientError(Exception):
    """A failure that another try may mend."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(slots=True, eq=False)
class _Endpoint:
    url: str
    rests_until: float = 0.0

    @property
    def name(self) -> str:
        """The URL without password, for logs."""
        return without_password(self.url)


class HttpScorer:
    """Posts batches to endpoints, in turn."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout: float = 180.0,
        max_attempts: int = 5,
        batch_size: int = 1,
        start_timeout: float = 60.0,
        max_in_flight: int = MAX_IN_FLIGHT,
        first_pause: float = FIRST_PAUSE,
        max_abs: float = DEFAULT_MAX_ABS,
    ) -> None:
        """Say whom to ask.

        Args:
            urls: endpoints, `http(s)://[user:password@]host[:port]/path`.
            timeout: seconds a batch may take, all tries and pauses together.
            max_attempts: tries of a batch.
            batch_size: items of a request. The incumbent sends 1.
            start_timeout: seconds to wait at start until an endpoint accepts connections.
            max_in_flight: requests under way at once.
            first_pause: seconds before the second try, doubled for each further one, with jitter.
            max_abs: see `read_answer`.
        """
        self._endpoints = [_Endpoint(check_url(url)) for url in urls]
        self._turn = itertools.count()
        self._timeout = timeout
        self._max_attempts = max_attempts
        self._batch_size = batch_size
        self._start_timeout = start_timeout
        self._max_in_flight = max_in_flight
        self._first_pause = first_pause
        self._max_abs = max_abs
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> ScorerTraits:
        """Open the one session, and wait until at least one endpoint accepts connections.

        Raises:
            ConfigError: none did; the message names them all.
        """
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._max_in_flight),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
        )
        await self._wait_for_endpoints()
        return ScorerTraits(
            kind="http",
            model_name_or_path=",".join(endpoint.name for endpoint in self._endpoints),
            max_batches=self._max_in_flight,
            max_batch_items=self._batch_size,
        )

    async def prepare(
        self, items: Sequence[ScoreItem], tokenizer_fingerprint: str
    ) -> list[Job | Failure]:
        """An endpoint reads text: there is nothing to prepare."""
        return [Job(item=item) for item in items]

    async def score(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Post one batch.

        Raises:
            DataError: the endpoint refused the batch, or its answer is malformed.
            InfraError: no endpoint answered in time.
            FatalError: an endpoint refuses every request (a redirect, 401, 403, 404, 405, 407).
        """
        payload = {
            "query": [job.item.query for job in jobs],
            "prompts": [job.item.prompt for job in jobs],
            "labels": [job.item.label for job in jobs],
        }
        try:
            answer = await self._post_with_retries(payload)
            return read_answer(answer, len(jobs), max_abs=self._max_abs)
        except QuartetError as error:
            samples = ", ".join(job.item.sample_id for job in jobs)
            logger.warning("%s [sample %s]", error.message, samples)
            raise

    async def sleep(self) -> None:
        """Nothing to free."""

    async def wake(self) -> None:
        """Nothing to take back."""

    async def stop(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()

    async def _post_with_retries(self, payload: dict[str, Any]) -> Any:
        deadline = time.monotonic() + self._timeout
        for attempt in itertools.count(1):
            endpoint = self._next_endpoint()
            try:
                return await self._post(endpoint, payload, deadline - time.monotonic())
            except _TransientError as error:
                endpoint.rests_until = time.monotonic() + (error.retry_after or REST_SECONDS)
                pause = self._pause(attempt, error.retry_after)
                if attempt == self._max_attempts or time.monotonic() + pause > deadline:
                    raise InfraError(
                        f"no reward after {attempt} tries; the last: {error}",
                        reason="ENDPOINT_UNAVAILABLE",
                    ) from error
                logger.info("%s; trying again in %.1f s", error, pause)
            await asyncio.sleep(pause)

    def _next_endpoint(self) -> _Endpoint:
        """The next in turn that does not rest; when all do, the one whose rest ends first."""
        now = time.monotonic()
        for _ in self._endpoints:
            endpoint = self._endpoints[next(self._turn) % len(self._endpoints)]
            if endpoint.rests_until <= now:
                return endpoint
        return min(self._endpoints, key=lambda endpoint: endpoint.rests_until)

    def _pause(self, attempt: int, retry_after: float | None) -> float:
        """Seconds before the next try: none while another endpoint is up, else backoff."""
        if any(endpoint.rests_until <= time.monotonic() for endpoint in self._endpoints):
            return 0.0
        backoff = min(LONGEST_PAUSE, self._first_pause * 2 ** (attempt - 1))
        return max(retry_after or 0.0, backoff * random.uniform(0.5, 1.5))

    async def _post(self, endpoint: _Endpoint, payload: dict[str, Any], seconds: float) -> Any:
        assert self._session is not None, "start() first"
        try:
            async with (
                asyncio.timeout(max(seconds, 0)),
                self._session.post(endpoint.url, json=payload, allow_redirects=False) as response,
            ):
                _check_status(endpoint, response)
                body = await _read_body(endpoint, response)
        except TimeoutError as error:
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                raise _TransientError(f"{endpoint.name} does not accept connections") from error
            raise InfraError(
                f"{endpoint.name} did not answer in time ({self._timeout:g} s for all tries)",
                reason="TIME_LIMIT",
                remedy="make it faster, or raise --reward.timeout",
            ) from None
        except aiohttp.ClientError as error:
            raise _TransientError(f"{endpoint.name}: {error or type(error).__name__}") from error
        endpoint.rests_until = 0.0
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{endpoint.name} answered {body[:60]!r}, which is not JSON", reason="BAD_ANSWER"
            ) from error

    async def _wait_for_endpoints(self) -> None:
        deadline = time.monotonic() + self._start_timeout
        while True:
            reached = await asyncio.gather(*map(_accepts_connections, self._endpoints))
            if any(reached):
                break
            if time.monotonic() + 1.0 > deadline:
                names = ", ".join(endpoint.name for endpoint in self._endpoints)
                raise ConfigError(
                    f"nobody listens at {names} (waited {self._start_timeout:g} s)",
                    reason="ENDPOINT_UNAVAILABLE",
                    field="reward.remote_url",
                    remedy="start the endpoint, or correct --reward.remote_url",
                )
            await asyncio.sleep(0.5)
        for endpoint, is_up in zip(self._endpoints, reached, strict=True):
            if not is_up:
                logger.warning("nobody listens at %s yet: going on without it", endpoint.name)


def check_url(url: str) -> str:
    """Return a URL that can be posted to.

    Raises:
        ConfigError: it is none.
    """
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"reward.remote_url: {url!r} is no http(s) URL",
            field="reward.remote_url",
            value=url,
            remedy="give http://host:port/path (several with commas), or a .py file",
        )
    return url.strip()


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))


def _check_status(endpoint: _Endpoint, response: aiohttp.ClientResponse) -> None:
    status = response.status
    if status < 300:
        return
    message = f"{endpoint.name} answered {status} {response.reason or ''}".rstrip()
    if status == 429 or status >= 500:
        raise _TransientError(message, _retry_after(response))
    if status in _REFUSES_ALL:
        raise FatalError(
            message, reason="ENDPOINT_REFUSES", remedy="check --reward.remote_url and its access"
        )
    raise DataError(message, reason="HTTP_STATUS")


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    """Seconds that the endpoint asks for; None when it does not say (or gives a date)."""
    try:
        return max(0.0, float(response.headers.get("Retry-After", "")))
    except ValueError:
        return None


async def _read_body(endpoint: _Endpoint, response: aiohttp.ClientResponse) -> bytes:
    body = b""
    async for chunk in response.content.iter_chunked(65536):
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise DataError(
                f"{endpoint.name} answered more than {MAX_ANSWER_BYTES} bytes", reason="BAD_ANSWER"
            )
    return body


async def _accepts_connections(endpoint: _Endpoint) -> bool:
    parts = urlsplit(endpoint.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    return True
