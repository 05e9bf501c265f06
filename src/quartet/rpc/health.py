"""grpc.health.v1 for one server.

The stock asyncio servicer loses watchers: when one of two watchers of a service goes away, the
other hears nothing any more. This one wakes every watcher at every change.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Says whether "" (the server) and the full service name serve. Both begin NOT_SERVING."""

    def __init__(self, service: str) -> None:
        self._states = {"": NOT_SERVING, service: NOT_SERVING}
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Set both names, and tell every watcher."""
        state = SERVING if serving else NOT_SERVING
        self._states = dict.fromkeys(self._states, state)
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """Answer the state now; NOT_FOUND for a name that is not served."""
        state = self._states.get(request.service)
        if state is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=state)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Answer the state now, and again at every change, until the caller goes away."""
        last = None
        while True:
            changed = self._changed
            state = self._states.get(request.service, _UNKNOWN)
            if state != last:
                yield health_pb2.HealthCheckResponse(status=state)
                last = state
            await changed.wait()
