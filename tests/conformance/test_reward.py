"""Every scorer passes the reward suite over a real server, and the suite finds broken servers."""

import contextlib
import dataclasses

import pytest
from aiohttp import web
from quartet_reward.scorer import Job, ScorerTraits
from quartet_reward.scorers import VERIFIERS
from quartet_reward.scorers.function import FunctionScorer
from quartet_reward.scorers.http import HttpScorer
from quartet_reward.scorers.model import ModelScorer
from quartet_reward.server import RewardService

from quartet.config.ds import HeadLoadConfig
from quartet.testing.conformance import run_checks
from quartet.testing.conformance.reward import (
    CHECKS,
    RewardSubject,
    default_items,
    says_what_it_is,
)
from quartet.testing.fakes import FakeReward
from quartet.testing.loopback import loopback
from quartet.types import Failure, Reward, ScoreItem, ServerInfo

FAILING = ScoreItem(sample_id="failing", prompt="", query="", label="fail")
SLOW = ScoreItem(sample_id="slow", prompt="", query="", label="slow")

REWARD_FILE = """
import time

def reward_func(queries, prompts, labels, **kwargs):
    if "fail" in labels:
        raise ValueError("told to fail")
    if "slow" in labels:
        time.sleep(3)
    return {"rewards": [float(len(query)) for query in queries]}
"""


SKIPPED = {
    "fake": {"types_its_failures", "keeps_deadlines", "sleeps_and_wakes"},
    "function": set(),
    "http": {"keeps_deadlines"},
    "math": {"keeps_deadlines"},
    "model": {"types_its_failures", "keeps_deadlines"},
}
"""Checks that a kind gives no item for."""


@contextlib.asynccontextmanager
async def function_subject(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(REWARD_FILE)
    async with loopback(RewardService(FunctionScorer(path, num_workers=2))) as address:
        yield RewardSubject(address=address, failing=FAILING, slow=SLOW, is_exclusive=True)


@contextlib.asynccontextmanager
async def math_subject():
    unlabelled = ScoreItem(sample_id="failing", prompt="", query="5", label="")
    async with loopback(RewardService(FunctionScorer(VERIFIERS["math"]))) as address:
        yield RewardSubject(address=address, failing=unlabelled, is_exclusive=True)


@contextlib.asynccontextmanager
async def http_subject():
    async def answer(request):
        payload = await request.json()
        if "fail" in payload["labels"]:
            return web.json_response({"rewards": ["?"]})
        return web.json_response({"rewards": [len(query) for query in payload["query"]]})

    app = web.Application(client_max_size=16 << 20)
    app.router.add_post("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    try:
        scorer = HttpScorer([f"http://127.0.0.1:{port}/"])
        async with loopback(RewardService(scorer)) as address:
            yield RewardSubject(address=address, failing=FAILING, is_exclusive=True)
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def model_subject(folder):
    scorer = ModelScorer(str(folder), HeadLoadConfig(param_dtype="fp32"))
    async with loopback(RewardService(scorer)) as address:
        yield RewardSubject(address=address, is_exclusive=True)


@contextlib.asynccontextmanager
async def fake_subject():
    fake = FakeReward(info=ServerInfo(service="reward", replica="fake-1"))
    async with loopback(fake) as address:
        yield RewardSubject(address=address, is_exclusive=True)


@pytest.mark.parametrize("kind", ["fake", "function", "math", "http", "model"])
async def test_scorers_pass(kind, tmp_path, tiny_reward_model_dir):
    subjects = {
        "fake": fake_subject,
        "function": lambda: function_subject(tmp_path),
        "math": math_subject,
        "http": http_subject,
        "model": lambda: model_subject(tiny_reward_model_dir),
    }
    async with subjects[kind]() as subject:
        results = await run_checks(CHECKS, subject)
    assert [r for r in results if r.outcome == "failed"] == []
    skipped = {r.name for r in results if r.outcome == "skipped"}
    assert skipped == SKIPPED[kind]


class PlainScorer:
    """Rewards the length of the text. Tests break it in one place each."""

    traits = ScorerTraits(kind="plain", max_batch_items=8)

    async def start(self):
        return self.traits

    async def prepare(self, items, tokenizer_fingerprint):
        return [Job(item=item) for item in items]

    async def score(self, jobs):
        return [self.outcome(job.item) for job in jobs]

    def outcome(self, item):
        if item.label == "fail":
            return Failure(error_class="DATA", reason="TOLD_TO", message="told to fail")
        return Reward(reward=float(len(item.query)), score=0.0)

    async def sleep(self):
        return None

    async def wake(self):
        return None

    async def stop(self):
        return None


class ZeroForFailures(PlainScorer):
    def outcome(self, item):
        outcome = super().outcome(item)
        return Reward(reward=0.0, score=0.0) if isinstance(outcome, Failure) else outcome


class OddReasons(PlainScorer):
    def outcome(self, item):
        outcome = super().outcome(item)
        if isinstance(outcome, Failure):
            return dataclasses.replace(outcome, reason="went wrong")
        return outcome


class MixedUp(PlainScorer):
    async def score(self, jobs):
        return [self.outcome(job.item) for job in reversed(jobs)]


class AlwaysFails(PlainScorer):
    def outcome(self, item):
        return Failure(error_class="DATA", reason="NO", message="no")


@pytest.mark.parametrize(
    ("scorer", "caught_by"),
    [
        (PlainScorer(), set()),
        (ZeroForFailures(), {"types_its_failures"}),
        (OddReasons(), {"types_its_failures"}),
        (MixedUp(), {"keeps_the_order"}),
        (AlwaysFails(), {"scores_one", "types_its_failures", "sleeps_and_wakes"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PlainScorer) else "",
)
async def test_broken_scorers_are_caught(scorer, caught_by):
    async with loopback(RewardService(scorer)) as address:
        subject = RewardSubject(address=address, failing=FAILING, is_exclusive=True)
        results = await run_checks(CHECKS, subject)
    assert {r.name for r in results if r.outcome == "failed"} == caught_by
    assert all(r.message for r in results if r.outcome == "failed")


@pytest.mark.parametrize(
    ("break_it", "caught_by"),
    [
        ("look_at_the_id_alone", "answers_a_repeat_with_the_first_answer"),
        ("forget_answers", "answers_a_repeat_with_the_first_answer"),
        ("never_sleep", "sleeps_and_wakes"),
        ("unsigned", "scores_one"),
    ],
)
async def test_broken_servers_are_caught(break_it, caught_by, monkeypatch):
    service = RewardService(PlainScorer())
    room = service._room
    if break_it == "forget_answers":

        async def run(self, request_id, digest, work):
            return await work()

        monkeypatch.setattr("quartet.rpc.idempotency.IdempotencyCache.run", run)
    elif break_it == "look_at_the_id_alone":
        monkeypatch.setattr("quartet.rpc.idempotency.RequestDigest.value", lambda self: b"")
    elif break_it == "never_sleep":

        async def sleep():
            return None

        room.sleep = sleep
    else:
        score = room.score

        async def unsigned(request):
            return dataclasses.replace(await score(request), replica="")

        room.score = unsigned
    async with loopback(service) as address:
        subject = RewardSubject(address=address, failing=FAILING, is_exclusive=True)
        results = await run_checks(CHECKS, subject)
    assert caught_by in {r.name for r in results if r.outcome == "failed"}


async def test_a_server_that_is_not_there():
    results = await run_checks([says_what_it_is], RewardSubject(address="127.0.0.1:1"))
    assert [r.outcome for r in results] == ["failed"]
    assert "127.0.0.1:1" in results[0].message


def test_default_items_have_distinct_names_and_texts():
    items = default_items()
    assert len({item.sample_id for item in items}) == len({item.query for item in items}) >= 2
