"""Requests under way, and what ends them early. Belongs to one event loop.

A request is ended by closing its connection, which every server understands. What has arrived of
its completion is kept, and the rest is asked for again later: so each request is answered by one
version of the weights, and each token has the version that made it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from quartet.errors import InfraError
from quartet_rollout.engines.openai.http import Server
from quartet_rollout.engines.openai.sample import Reading, ServedSample


class Flights:
    """Completes samples, as long as it is let."""

    def __init__(self, server: Server, model: str) -> None:
        self._server = server
        self._model = model
        self._samples: set[ServedSample] = set()
        self._requests: set[asyncio.Task[None]] = set()
        self._is_open = True
        self._keeps_answers = False
        self._is_torn = False
        self._changed = asyncio.Event()
        self.policy_version = 0
        """What the server has. Changes only while nothing is under way."""

    async def complete(
        self, samples: Sequence[ServedSample], on_done: Callable[[ServedSample], None]
    ) -> None:
        """Run all samples; the first failure, or the caller's going away, stops the others."""
        tasks = [asyncio.ensure_future(self._run(sample, on_done)) for sample in samples]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def hold(self, *, keep_answers: bool = False) -> None:
        """Begin no request any more. Those under way go on.

        Args:
            keep_answers: Hand out no sample either, until requests may begin again.
        """
        self._is_open = False
        self._keeps_answers = self._keeps_answers or keep_answers

    async def interrupt(self) -> None:
        """End the requests under way; their samples go on when requests may begin again."""
        requests = list(self._requests)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)

    def give_up(self) -> None:
        """Let each sample end with the tokens that it has. Interrupt first."""
        for sample in self._samples:
            sample.is_given_up = True
        self._keeps_answers = False
        self._change()

    def go_on(self) -> None:
        """Let requests begin again."""
        self._is_open = True
        self._keeps_answers = False
        self._change()

    def tear(self, *, is_torn: bool) -> None:
        """Say whether the weights are half old and half new: then nothing is asked for."""
        self._is_torn = is_torn
        self._change()

    async def _run(self, sample: ServedSample, on_done: Callable[[ServedSample], None]) -> None:
        self._samples.add(sample)
        try:
            while not sample.is_done:
                await self._turn(sample)
                if not sample.is_done:
                    await self._ask(sample)
            while self._keeps_answers:
                await self._changed.wait()
        finally:
            self._samples.discard(sample)
        on_done(sample)

    async def _turn(self, sample: ServedSample) -> None:
        """Wait until a request may begin. What was given up meanwhile ends here."""
        while True:
            if sample.is_given_up:
                sample.give_up()
            if sample.is_done:
                return
            if self._is_torn:
                raise InfraError("the weights are not whole", reason="WEIGHTS_TORN")
            if self._is_open:
                return
            await self._changed.wait()

    async def _ask(self, sample: ServedSample) -> None:
        reading, version = Reading(), self.policy_version

        def take(event: object) -> None:
            reading.take(event)
            sample.saw_output(time.monotonic())

        request = asyncio.ensure_future(
            self._server.stream("/v1/completions", sample.body(self._model), take)
        )
        self._requests.add(request)
        try:
            await asyncio.wait({request})
        finally:
            self._requests.discard(request)
            if not request.done():  # the caller went away
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)
        if request.cancelled():
            sample.take_part(reading.answer(version))
            return
        request.result()
        if reading.finish_reason is None:
            raise InfraError(
                f"the server at {self._server.url} broke a completion off",
                reason="SERVER_DOWN",
                remedy="see the server's log",
            )
        sample.take(reading.answer(version))

    def _change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
