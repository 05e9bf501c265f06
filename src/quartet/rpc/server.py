"""Serves one room: bind, load, serve, drain, leave.

A room hands `run` a Service. The port is bound and announced before the model is loaded, so that
whoever waits can watch; health says NOT_SERVING until `start` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Protocol, runtime_checkable

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from quartet.config.rpc import MetricsConfig, RpcConfig
from quartet.errors import ConfigError, QuartetError
from quartet.obs import log, metrics
from quartet.rpc import interceptors, lifetime, policy
from quartet.rpc.health import SERVICE_NAME as HEALTH_NAME
from quartet.rpc.health import HealthServicer

_logger = logging.getLogger(__name__)

_WILDCARDS = ("0.0.0.0", "::", "[::]")
# Time beyond the drain that a service has to let go of what it holds.
_STOP_SECONDS = 10.0


class Service(Protocol):
    """What a room gives to its server."""

    name: str
    """The room: rollout, reward, ref or learner."""
    replica: str
    """Name of this server among its replicas, as GetInfo says it; new for every process."""

    def register(self, server: grpc.aio.Server) -> str:
        """Add the servicer; return the full gRPC service name."""
        ...

    async def start(self) -> None:
        """Load whatever is needed to answer. May take minutes, must not block the loop."""
        ...

    async def stop(self) -> None:
        """Let go of everything. Called once, also when `start` failed or was cancelled."""
        ...


@runtime_checkable
class Mortal(Protocol):
    """A Service that can find itself unable to serve again: its process ends, with code 1."""

    async def failed(self) -> QuartetError:
        """Wait until that is so; the error says why."""
        ...


class Server:
    """One gRPC server around one Service. Made and used on one running loop."""

    def __init__(self, service: Service, rpc: RpcConfig) -> None:
        rpc.check()
        self.service = service
        self.address = ""
        self._rpc = rpc
        self._admission = interceptors.Admission(rpc.max_concurrent_calls)
        stages = [
            interceptors.log_context(service.name, service.replica),
            interceptors.count,
            interceptors.map_errors(service.replica),
            self._admission.stage,
        ]
        self._server = grpc.aio.server(
            interceptors=[interceptors.StagesInterceptor(stages)], options=policy.server_options()
        )
        self.full_name = service.register(self._server)
        self._health = HealthServicer(self.full_name)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (self.full_name, HEALTH_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def bind(self) -> str:
        """Bind and begin to answer, with health NOT_SERVING. Returns the address to call.

        Raises:
            ConfigError: the address cannot be bound.
        """
        unix = self._rpc.host.startswith("unix:")
        wanted = self._rpc.host if unix else f"{_bracketed(self._rpc.host)}:{self._rpc.port}"
        try:
            port = self._server.add_insecure_port(wanted)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {wanted}: it is taken, or not an address of this machine",
                field="rpc.port",
                value=wanted,
                remedy="give another --rpc.port, or 0 for any free one",
            ) from error
        await self._server.start()
        host = "127.0.0.1" if self._rpc.host in _WILDCARDS else self._rpc.host
        self.address = wanted if unix else f"{_bracketed(host)}:{port}"
        return self.address

    def set_serving(self, serving: bool) -> None:
        """Set health of "" and of the service."""
        self._health.set_serving(serving)

    async def drain(self) -> None:
        """Say NOT_SERVING, refuse new calls, wait for those under way, then cut them off."""
        self._health.set_serving(False)
        await self._admission.drain(self._rpc.drain_seconds)
        # Only watchers of health and stragglers are left: gRPC's own grace would wait for them.
        await self._server.stop(None)


def run(service: Service, rpc: RpcConfig, metrics_config: MetricsConfig) -> int:
    """Serve until SIGTERM or SIGINT. Blocks; returns the exit code of the process.

    Returns:
        0 after an orderly end, 1 when the service could not start, go on or stop, 2 for wrong
        settings.
    """
    log.configure(service.name)
    if rpc.ready_file:
        # One left behind by an earlier process would send its reader to nobody.
        Path(rpc.ready_file).unlink(missing_ok=True)
    try:
        return asyncio.run(_run(service, rpc, metrics_config))
    except ConfigError as error:
        print(f"quartet {service.name}: {error}", file=sys.stderr)
        return error.exit_code


async def _run(service: Service, rpc: RpcConfig, metrics_config: MetricsConfig) -> int:
    """Serve from bind to stop; returns the exit code."""
    server = Server(service, rpc)
    if rpc.die_with_parent:
        lifetime.die_with_parent(rpc.drain_seconds + _STOP_SECONDS)
    stop = asyncio.Event()
    lifetime.stop_on_signals(stop)
    metrics_address = metrics.start_exporter(metrics_config.port, metrics_config.host)
    address = await server.bind()
    log.bind(replica=service.replica)
    if rpc.insecure:
        _logger.warning("serving plain text on %s: anybody who reaches it can call", address)
    if rpc.ready_file:
        write_ready_file(Path(rpc.ready_file), address, metrics_address)
    if metrics_address:
        _logger.info("metrics on http://%s/metrics", metrics_address)
    _logger.info("listening on %s, loading", address)
    code = await _start(service, stop)
    if code is None:
        server.set_serving(True)
        _logger.info("serving on %s", address)
        code = await _serve(service, stop)
    await server.drain()
    if not await _stop(service):
        code = 1
    if code in (0, 1):
        # A thread of the service may still be loading or stuck. Nobody can stop it, and an
        # ordinary exit would wait for it.
        lifetime.leave(code)
    _logger.info("stopped")
    return code or 0


async def _serve(service: Service, stop: asyncio.Event) -> int | None:
    """Wait for the end. None when told to stop, 1 when the service cannot go on."""
    if not isinstance(service, Mortal):
        await stop.wait()
        return None
    stopping = asyncio.ensure_future(stop.wait())
    failing = asyncio.ensure_future(service.failed())
    await asyncio.wait((stopping, failing), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not failing.done():
        failing.cancel()
        return None
    _logger.error("the service cannot go on: %s", failing.result())
    return 1


async def _start(service: Service, stop: asyncio.Event) -> int | None:
    """Load, unless told to stop first. None when it serves, else the exit code."""
    loading = asyncio.ensure_future(service.start())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not loading.done():
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await loading
        return 0
    error = loading.exception()
    if error is None:
        return None
    if isinstance(error, QuartetError):
        # Meant for a person: the sentence is enough.
        print(f"quartet {service.name}: {error}", file=sys.stderr)
    else:
        _logger.error("the service could not start", exc_info=error)
        print(f"quartet {service.name}: {type(error).__name__}: {error}", file=sys.stderr)
    return error.exit_code if isinstance(error, ConfigError) else 1


async def _stop(service: Service) -> bool:
    """Stop the service within a bounded time. False when it failed or did not finish."""
    try:
        await asyncio.wait_for(service.stop(), _STOP_SECONDS)
    except TimeoutError:
        _logger.error("the service did not stop within %s s", _STOP_SECONDS)
        return False
    except Exception:
        _logger.exception("the service failed to stop")
        return False
    return True


def write_ready_file(path: Path, address: str, metrics_address: str | None) -> None:
    """Say where this process serves. The file appears whole: a reader never sees half of it."""
    content = {"address": address, "metrics_address": metrics_address, "pid": os.getpid()}
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(content))
    aside.replace(path)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
