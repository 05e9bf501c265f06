"""One answer for one request_id."""

from __future__ import annotations

import asyncio
import gc

import pytest

from quartet.api.learner.v1.learner_service_pb2 import ExportModelRequest
from quartet.errors import RequestError
from quartet.rpc.idempotency import IdempotencyCache, RequestDigest

SAME = RequestDigest(ExportModelRequest(folder="f"))
OTHER = RequestDigest(ExportModelRequest(folder="g"))


class Work:
    """Counts how often it is done; waits for `gate`; fails while `error` is set."""

    def __init__(self) -> None:
        self.done = 0
        self.begun = 0
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self) -> int:
        self.begun += 1
        await self.gate.wait()
        if self.error:
            raise self.error
        self.done += 1
        return self.done


async def begin(cache: IdempotencyCache[int], work: Work, name: str = "a") -> asyncio.Task[int]:
    task = asyncio.ensure_future(cache.run(name, SAME, work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_repeat_gets_the_first_answer() -> None:
    cache, work = IdempotencyCache[int](), Work()
    assert [await cache.run("a", SAME, work) for _ in range(3)] == [1, 1, 1]
    assert await cache.run("b", SAME, work) == 2


async def test_concurrent_repeats_join() -> None:
    cache, work = IdempotencyCache[int](), Work()
    work.gate.clear()
    tasks = [await begin(cache, work) for _ in range(3)]
    work.gate.set()
    assert await asyncio.gather(*tasks) == [1, 1, 1]
    assert work.begun == 1


async def test_failures_are_not_kept() -> None:
    cache, work = IdempotencyCache[int](), Work()
    work.error = ValueError("x")
    work.gate.clear()
    tasks = [await begin(cache, work) for _ in range(2)]
    work.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results == [work.error, work.error]
    work.error = None
    assert await cache.run("a", SAME, work) == 1


async def test_least_recently_used_goes_first() -> None:
    cache, work = IdempotencyCache[int](max_entries=2), Work()
    for name in ("a", "b", "a", "c"):
        await cache.run(name, SAME, work)
    assert len(cache) == 2
    assert await cache.run("a", SAME, work) == 1
    assert await cache.run("b", SAME, work) == 4


async def test_one_caller_that_leaves_does_not_take_the_others_answer() -> None:
    cache, work = IdempotencyCache[int](), Work()
    work.gate.clear()
    first, second = await begin(cache, work), await begin(cache, work)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    work.gate.set()
    assert await second == 1
    assert work.begun == 1


async def test_work_stops_with_its_last_caller_and_a_repeat_begins_anew() -> None:
    cache, work = IdempotencyCache[int](), Work()
    work.gate.clear()
    only = await begin(cache, work)
    only.cancel()
    await asyncio.gather(only, return_exceptions=True)
    work.gate.set()
    assert await cache.run("a", SAME, work) == 1
    assert (work.begun, work.done) == (2, 1)


async def test_work_that_must_not_stop_goes_on_and_its_answer_is_kept() -> None:
    cache, work = IdempotencyCache[int](stop_with_callers=False), Work()
    work.gate.clear()
    only = await begin(cache, work)
    only.cancel()
    await asyncio.gather(only, return_exceptions=True)
    work.gate.set()
    assert await cache.run("a", SAME, work) == 1
    assert work.begun == 1


async def test_a_failure_that_nobody_waits_for_is_logged_as_what_it_is(caplog) -> None:
    cache, work = IdempotencyCache[int](stop_with_callers=False), Work()
    work.error = ValueError("no space")
    work.gate.clear()
    only = await begin(cache, work)
    only.cancel()
    await asyncio.gather(only, return_exceptions=True)
    work.gate.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()
    assert [(r.name, r.levelname) for r in caplog.records] == [
        ("quartet.rpc.idempotency", "WARNING")
    ]
    assert "no space" in caplog.text


async def refuses(cache: IdempotencyCache[int], work: Work) -> None:
    with pytest.raises(RequestError) as caught:
        await cache.run("a", OTHER, work)
    info = caught.value.info
    assert (info.reason, info.field, info.value) == ("REQUEST_ID_REUSED", "request_id", "a")


async def test_another_request_gets_no_answer_of_the_first() -> None:
    cache, work = IdempotencyCache[int](), Work()
    work.gate.clear()
    first = await begin(cache, work)
    await refuses(cache, work)
    work.gate.set()
    assert await first == 1
    await refuses(cache, work)
    assert await cache.run("a", SAME, work) == 1
    assert work.begun == 1


async def test_an_id_whose_request_failed_is_free() -> None:
    cache, work = IdempotencyCache[int](), Work()
    work.error = ValueError("x")
    with pytest.raises(ValueError, match="x"):
        await cache.run("a", SAME, work)
    work.error = None
    assert await cache.run("a", OTHER, work) == 1


def test_a_digest_is_of_all_messages_and_their_borders() -> None:
    names = ("a", "b", "ab", "")
    values = {n: ExportModelRequest(folder=n) for n in names}
    requests = [["a", "b"], ["b", "a"], ["ab"], ["a"], ["", "a", "b"], []]
    digests = {RequestDigest(*(values[n] for n in request)).value() for request in requests}
    assert len(digests) == len(requests)


def test_the_order_of_a_map_is_no_difference() -> None:
    names = [f"name{i}" for i in range(50)]
    ways = [dict.fromkeys(order, 1.0) for order in (names, names[::-1])]
    digests = {RequestDigest(ExportModelRequest(config_values=way)).value() for way in ways}
    assert len(digests) == 1


def test_a_cache_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_entries"):
        IdempotencyCache(0)
