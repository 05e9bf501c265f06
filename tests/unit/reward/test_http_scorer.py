"""HTTP endpoints that do all the things that endpoints do."""

import asyncio
import contextlib
import time

import pytest
from aiohttp import web
from quartet_reward.batcher import Batcher
from quartet_reward.scorers.http import HttpScorer, check_url, without_password

from quartet.errors import ConfigError
from quartet.types import Failure, Reward, ScoreItem


def make_items(count, prefix="s"):
    return [
        ScoreItem(sample_id=f"{prefix}{i}", prompt="p", query="p" + "x" * i, label={"n": i})
        for i in range(count)
    ]


class Endpoint:
    """A server that answers by a script: one entry a request, the last one for ever.

    An entry is a status, a JSON answer, raw bytes, seconds to wait, or "drop" to hang up.
    """

    def __init__(self, *script):
        self.script = list(script) or ["lengths"]
        self.requests = []
        self.in_flight = self.most_in_flight = 0

    @contextlib.asynccontextmanager
    async def serve(self, port=0):
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/get_reward", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/get_reward"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _answer(self, request):
        payload = await request.json()
        self.requests.append(payload)
        entry = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._play(entry, payload, request)
        finally:
            self.in_flight -= 1

    async def _play(self, entry, payload, request):
        if entry == "lengths":
            return web.json_response({"rewards": [len(query) for query in payload["query"]]})
        if entry == "drop":
            request.transport.close()
            return web.Response()
        if isinstance(entry, tuple):
            status, headers = entry
            return web.Response(status=status, headers=headers)
        if isinstance(entry, int):
            return web.Response(status=entry)
        if isinstance(entry, float):
            await asyncio.sleep(entry)
            return web.json_response({"rewards": [0.0] * len(payload["query"])})
        if isinstance(entry, bytes):
            return web.Response(body=entry, content_type="application/json")
        return web.json_response(entry)


@contextlib.asynccontextmanager
async def scoring(urls, **options):
    scorer = HttpScorer(urls, **{"timeout": 5, "first_pause": 0.01, "start_timeout": 2, **options})
    try:
        traits = await scorer.start()
        batcher = Batcher(
            scorer.score, max_batches=traits.max_batches, max_items=traits.max_batch_items
        )

        async def score(items):
            return await batcher.submit(await scorer.prepare(items, ""))

        yield score
    finally:
        await scorer.stop()


async def score_once(*script, items=1, **options):
    async with Endpoint(*script).serve() as endpoint, scoring([endpoint.url], **options) as score:
        return await score(make_items(items)), endpoint


async def test_the_incumbents_dialect():
    answer = {"rewards": [0.5], "scores": [1], "extra_logs": {"dummy_scores": [0.5]}}
    outcomes, endpoint = await score_once(answer)
    assert outcomes == [Reward(reward=0.5, score=1.0, extra_logs={"dummy_scores": 0.5})]
    assert endpoint.requests == [{"query": ["p"], "prompts": ["p"], "labels": [{"n": 0}]}]


async def test_a_lone_number_is_an_answer_for_one():
    outcomes, _ = await score_once({"rewards": 2})
    assert outcomes == [Reward(reward=2.0, score=2.0)]


@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("servers", [1, 2, 3])
async def test_each_item_once_in_order_over_any_number_of_endpoints(batch_size, count, servers):
    async with contextlib.AsyncExitStack() as stack:
        endpoints = [await stack.enter_async_context(Endpoint().serve()) for _ in range(servers)]
        urls = [endpoint.url for endpoint in endpoints]
        score = await stack.enter_async_context(scoring(urls, batch_size=batch_size))
        outcomes = await score(make_items(count))
    assert [o.reward for o in outcomes] == [1.0 + i for i in range(count)]
    posted = [q for e in endpoints for r in e.requests for q in r["query"]]
    assert sorted(map(len, posted)) == [1 + i for i in range(count)]
    assert all(r["query"] for e in endpoints for r in e.requests), "an empty shard was sent"


@pytest.mark.parametrize(
    "script", [[500], [503], [(429, {"Retry-After": "0.01"})], [429], ["drop"], [500, 502, "drop"]]
)
async def test_what_may_pass_is_tried_again(script):
    outcomes, endpoint = await score_once(*script, {"rewards": [1.0]})
    assert outcomes == [Reward(reward=1.0, score=1.0)]
    assert len(endpoint.requests) == len(script) + 1


async def test_it_waits_as_long_as_it_is_asked_to():
    began = time.monotonic()
    await score_once((429, {"Retry-After": "0.3"}), {"rewards": [1.0]})
    assert time.monotonic() - began >= 0.3


@pytest.mark.parametrize(
    ("entry", "error_class", "reason"),
    [
        (400, "DATA", "HTTP_STATUS"),
        (422, "DATA", "HTTP_STATUS"),
        (401, "FATAL", "ENDPOINT_REFUSES"),
        (404, "FATAL", "ENDPOINT_REFUSES"),
        ((302, {"Location": "/elsewhere"}), "FATAL", "ENDPOINT_REFUSES"),
        (b"<html>oops</html>", "DATA", "BAD_ANSWER"),
        (b"", "DATA", "BAD_ANSWER"),
        ([1.0], "DATA", "BAD_ANSWER"),
        ({"score": [1.0]}, "DATA", "BAD_ANSWER"),
        ({"rewards": []}, "DATA", "WRONG_LENGTH"),
        ({"rewards": [1.0, 2.0]}, "DATA", "WRONG_LENGTH"),
        ({"rewards": ["high"]}, "DATA", "NOT_A_NUMBER"),
        ({"rewards": [None]}, "DATA", "NOT_A_NUMBER"),
        (b'{"rewards": [NaN]}', "DATA", "NOT_FINITE"),
        (b'{"rewards": [Infinity]}', "DATA", "NOT_FINITE"),
        (b'{"rewards": [1e400]}', "DATA", "NOT_FINITE"),
        ({"rewards": [1e30]}, "DATA", "OUT_OF_RANGE"),
    ],
)
async def test_what_will_not_pass_is_a_typed_failure_after_one_try(entry, error_class, reason):
    [outcome], endpoint = await score_once(entry)
    assert isinstance(outcome, Failure)
    assert (outcome.error_class, outcome.reason) == (error_class, reason)
    assert "\n" not in outcome.message
    assert len(endpoint.requests) == 1


async def test_tries_end():
    [outcome], endpoint = await score_once(500, max_attempts=3)
    assert (outcome.error_class, outcome.reason) == ("INFRA", "ENDPOINT_UNAVAILABLE")
    assert "after 3 tries" in outcome.message
    assert "answered 500" in outcome.message
    assert endpoint.url in outcome.message
    assert len(endpoint.requests) == 3


async def test_one_deadline_holds_all_tries_and_pauses():
    began = time.monotonic()
    [outcome], _ = await score_once(500, timeout=0.5, max_attempts=1000, first_pause=0.05)
    assert outcome.reason == "ENDPOINT_UNAVAILABLE"
    assert time.monotonic() - began < 2


async def test_a_slow_endpoint_is_given_up():
    began = time.monotonic()
    [outcome], _ = await score_once(30.0, timeout=0.3)
    assert (outcome.error_class, outcome.reason) == ("INFRA", "TIME_LIMIT")
    assert time.monotonic() - began < 5


async def test_an_answer_without_end_is_cut_off():
    [outcome], _ = await score_once(b" " * (17 << 20))
    assert outcome.reason == "BAD_ANSWER"
    assert "more than" in outcome.message


async def test_one_bad_item_of_a_batch_fails_alone():
    bad_batch = {"rewards": [1.0]}
    outcomes, _ = await score_once(
        bad_batch, {"rewards": [1.0]}, {"rewards": ["?"]}, {"rewards": [3.0]}, items=3, batch_size=3
    )
    assert [o.reward if isinstance(o, Reward) else o.reason for o in outcomes] == [
        1.0,
        "NOT_A_NUMBER",
        3.0,
    ]


async def test_a_dead_endpoint_costs_nothing_while_another_lives():
    async with Endpoint().serve() as dead:
        gone = dead.url
    async with Endpoint().serve() as alive, scoring([gone, alive.url]) as score:
        outcomes = await score(make_items(20))
    assert [o.reward for o in outcomes] == [1.0 + i for i in range(20)]


async def test_an_endpoint_that_asks_for_time_is_left_alone_while_another_lives():
    async with (
        Endpoint((429, {"Retry-After": "60"})).serve() as busy,
        Endpoint().serve() as alive,
        scoring([busy.url, alive.url], max_in_flight=1) as score,
    ):
        outcomes = await score(make_items(10))
    assert [o.reward for o in outcomes] == [1.0 + i for i in range(10)]
    assert len(busy.requests) == 1


async def test_an_endpoint_that_dies_in_mid_run_and_comes_back():
    first, second = Endpoint(), Endpoint()
    async with contextlib.AsyncExitStack() as later:
        async with contextlib.AsyncExitStack() as now:
            await now.enter_async_context(first.serve())
            score = await later.enter_async_context(scoring([first.url], max_attempts=1000))
            assert isinstance((await score(make_items(1)))[0], Reward)
        waiting = asyncio.create_task(score(make_items(1)))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await later.enter_async_context(second.serve(first.port))
        assert isinstance((await waiting)[0], Reward)


async def test_the_number_of_requests_at_once_is_bounded():
    outcomes, endpoint = await score_once(0.01, items=50, max_in_flight=4)
    assert len(outcomes) == 50
    assert endpoint.most_in_flight == 4


async def test_nobody_listens_at_start():
    async with Endpoint().serve() as endpoint:
        gone = endpoint.url
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"nobody listens at http://127.* \(waited 0\.2 s\)"):
        async with scoring([gone], start_timeout=0.2):
            raise AssertionError("it started")
    assert time.monotonic() - began < 5


async def test_it_waits_at_start_for_an_endpoint_that_comes_later():
    first = Endpoint()
    async with first.serve():
        port = first.port
    later = Endpoint()

    async def start_later():
        await asyncio.sleep(0.2)
        await stack.enter_async_context(later.serve(port))

    async with contextlib.AsyncExitStack() as stack:
        starting = asyncio.create_task(start_later())
        async with scoring([first.url], start_timeout=10) as score:
            await starting
            assert isinstance((await score(make_items(1)))[0], Reward)


@pytest.mark.parametrize("url", ["localhost:5000", "ftp://x/y", "http://", "reward", "http:///x"])
def test_what_is_no_url(url):
    with pytest.raises(ConfigError, match=r"is no http\(s\) URL"):
        check_url(url)


def test_passwords_are_not_shown():
    assert without_password("https://user:secret@host:1/x?y=1") == "https://***@host:1/x?y=1"
    assert without_password("http://host/x") == "http://host/x"
