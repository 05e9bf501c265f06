"""A lane batches what waits, and loses nothing."""

import asyncio

import pytest

from quartet.trainer.lane import Lane


class Service:
    """Doubles numbers when it is told to go on."""

    def __init__(self):
        self.calls = []
        self.gate = asyncio.Event()

    async def __call__(self, items):
        self.calls.append(list(items))
        await self.gate.wait()
        if "bad" in items:
            raise ValueError("bad item")
        return [item * 2 for item in items]


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_waiting_items_share_the_next_call():
    service = Service()
    async with Lane(service) as lane:
        tasks = [asyncio.create_task(lane.submit(1))]
        await settle()
        tasks += [asyncio.create_task(lane.submit(n)) for n in (2, 3, 4)]
        await settle()
        assert lane.queued == 3
        service.gate.set()
        assert await asyncio.gather(*tasks) == [2, 4, 6, 8]
    assert service.calls == [[1], [2, 3, 4]]


async def test_weight_bounds_a_call_and_a_heavy_item_goes_alone():
    service = Service()
    async with Lane(service, weight=lambda n: n, max_weight=5) as lane:
        tasks = [asyncio.create_task(lane.submit(n)) for n in (1, 2, 3, 9, 1)]
        service.gate.set()
        assert await asyncio.gather(*tasks) == [2, 4, 6, 18, 2]
    assert service.calls == [[1, 2], [3], [9], [1]]


async def test_width_bounds_calls_in_flight():
    service = Service()
    async with Lane(service, width=2, max_weight=1) as lane:
        tasks = [asyncio.create_task(lane.submit(n)) for n in range(5)]
        await settle()
        assert len(service.calls) == 2
        service.gate.set()
        await asyncio.gather(*tasks)


async def test_failure_reaches_those_it_concerns_and_the_lane_goes_on():
    service = Service()
    service.gate.set()
    async with Lane(service, max_weight=1) as lane:
        bad = asyncio.create_task(lane.submit("bad"))
        good = asyncio.create_task(lane.submit(4))
        with pytest.raises(ValueError, match="bad item"):
            await bad
        assert await good == 8


async def test_leaving_gives_up_what_is_under_way():
    service = Service()
    async with Lane(service) as lane:
        task = asyncio.create_task(lane.submit(1))
        await settle()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_caller_that_gave_up_does_not_disturb_others():
    service = Service()
    async with Lane(service) as lane:
        first = asyncio.create_task(lane.submit(1))
        await settle()
        gone, stays = asyncio.create_task(lane.submit(2)), asyncio.create_task(lane.submit(3))
        await settle()
        gone.cancel()
        service.gate.set()
        assert await first == 2
        assert await stays == 6


async def test_item_that_comes_as_the_last_call_ends_is_answered():
    async def call(items):
        return items

    async with Lane(call) as lane:
        # After k turns of the loop, for every k around the end of the first call.
        for turns in range(8):
            first = asyncio.create_task(lane.submit(1))
            for _ in range(turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(5):
                assert await lane.submit(2) == 2
                assert await first == 1
