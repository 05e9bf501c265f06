"""The service with this engine passes the rollout suite, as far as a table is a model."""

import pytest
from quartet_rollout.server import RolloutService

from quartet.testing.conformance import run_checks
from quartet.testing.conformance.rollout import CHECKS, RolloutSubject
from quartet.testing.loopback import loopback
from tests.unit.rollout.openai_engine.asking import config_of
from tests.unit.rollout.openai_engine.fake_server import FakeServer


@pytest.mark.parametrize("dev", [True, False])
async def test_the_suite(dev, tiny_model_dir):
    async with FakeServer(dev=dev, max_length=512, pace=0.005).serve() as server:
        service = RolloutService(config_of(tiny_model_dir, server))
        async with loopback(service) as address:
            results = await run_checks(CHECKS, RolloutSubject(address=address, is_exclusive=True))
    assert {r.name: r.message for r in results if r.outcome == "failed"} == {}
    passed = {r.name for r in results if r.outcome == "passed"}
    assert {"repeats_seeds", "stops_at_stop_tokens", "pauses_and_resumes"} <= passed
