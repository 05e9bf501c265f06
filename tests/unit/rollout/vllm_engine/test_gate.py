"""Who may be in the engine."""

import asyncio

from quartet_rollout.engines.vllm.gate import Gate


class Caller:
    """A call that enters, and stays until it is told to leave."""

    def __init__(self, gate, *, alone=False):
        self.is_inside = False
        self._leave = asyncio.Event()
        self.task = asyncio.ensure_future(self._call(gate, alone))

    async def _call(self, gate, alone):
        async with gate.enter(alone=alone):
            self.is_inside = True
            await self._leave.wait()
        self.is_inside = False

    async def leave(self):
        self._leave.set()
        await self.task


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_many_are_inside_and_one_alone_waits_for_all():
    gate = Gate()
    first, second = Caller(gate), Caller(gate)
    await settled()
    alone = Caller(gate, alone=True)
    await settled()
    late = Caller(gate)
    await settled()
    assert [c.is_inside for c in (first, second, alone, late)] == [True, True, False, False]
    await first.leave()
    await second.leave()
    await settled()
    assert (alone.is_inside, late.is_inside) == (True, False)
    await alone.leave()
    await settled()
    assert late.is_inside
    await late.leave()


async def test_whoever_gives_up_waiting_holds_up_nobody():
    gate = Gate()
    inside = Caller(gate)
    await settled()
    alone = Caller(gate, alone=True)
    await settled()
    alone.task.cancel()
    await settled()
    late = Caller(gate)
    await settled()
    assert late.is_inside
    await inside.leave()
    await late.leave()


async def test_a_closed_gate_lets_nobody_in_and_says_when_it_is_empty():
    gate = Gate()
    inside = Caller(gate)
    await settled()
    gate.close()
    late, empty = Caller(gate), asyncio.ensure_future(gate.empty())
    await settled()
    assert not late.is_inside
    assert not empty.done()
    await inside.leave()
    await settled()
    assert empty.done()
    assert not late.is_inside
    gate.open()
    await settled()
    assert late.is_inside
    await late.leave()


async def test_opening_ends_the_wait_for_an_empty_room():
    gate = Gate()
    inside = Caller(gate)
    await settled()
    gate.close()
    empty = asyncio.ensure_future(gate.empty())
    await settled()
    gate.open()
    await settled()
    assert empty.done()
    assert inside.is_inside
    await inside.leave()
