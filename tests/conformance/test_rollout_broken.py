"""For each check of the rollout suite a server that is broken in the way it looks for."""

import dataclasses

import pytest
import torch
from quartet_rollout.engines.transformers.engine import TransformersEngine
from quartet_rollout.engines.transformers.model import CausalLm

from quartet.nn import lm_head_of
from quartet.testing.conformance import run_checks
from quartet.testing.conformance.rollout import CHECKS, RolloutSubject
from quartet.testing.fakes.rollout import FakeRollout
from quartet.testing.loopback import loopback
from quartet.types import (
    ServerInfo,
    TensorSpec,
    VersionSpan,
    WeightManifest,
)
from tests.conformance import broken_fakes
from tests.conformance.broken_fakes import map_completions
from tests.conformance.test_rollout import service_of

NAMES = ("w", "v")
INFO = ServerInfo(
    service="rollout",
    replica="rollout-fake",
    capabilities=("sleep", "isolated"),
    max_sequence_length=64,
    max_concurrent_calls=4,
)


def new_fake(seconds_per_token=0.0):
    specs = tuple(TensorSpec(name=name, dtype="float32", shape=(64,)) for name in NAMES)
    manifest = WeightManifest(tensors=specs)
    return FakeRollout(INFO, manifest, seconds_per_token=seconds_per_token)


def weights():
    return {name: torch.zeros(64) for name in NAMES}


async def outcome(service, name, **subject):
    """What one check says of a server."""
    async with loopback(service) as address:
        checks = [check for check in CHECKS if check.__name__ == name]
        given = RolloutSubject(address=address, is_exclusive=True, **subject)
        [result] = await run_checks(checks, given)
    return result


SLOW = 0.02
"""Seconds a token, where a check needs the middle of a completion."""

FAKES = [
    (broken_fakes.without_manifest, "says_what_it_is", 0),
    (broken_fakes.takes_any_prompt, "refuses_prompts_that_do_not_fit", 0),
    (broken_fakes.takes_any_token, "refuses_tokens_that_it_does_not_know", 0),
    (broken_fakes.takes_any_version, "refuses_older_weights", 0),
    (broken_fakes.works_on_every_repeat, "works_once_for_all_repeats", SLOW),
    (broken_fakes.takes_used_ids, "refuses_a_used_request_id", 0),
    (broken_fakes.crosses_answers, "serves_many_at_once", 0),
    (broken_fakes.breaks_under_load, "loses_no_call_beyond_its_capacity", 0),
    (broken_fakes.never_lets_go, "keeps_deadlines", SLOW * 2),
    (broken_fakes.never_lets_go, "stops_cancelled_calls", SLOW),
    (broken_fakes.changes_answers(broken_fakes.nameless), "answers_what_is_asked", 0),
    (broken_fakes.changes_answers(broken_fakes.gaps), "answers_what_is_asked", 0),
    (broken_fakes.changes_answers(broken_fakes.another_distribution), "names_the_distribution", 0),
    (broken_fakes.changes_answers(broken_fakes.equal_samples), "draws_different_samples", 0),
    (broken_fakes.changes_answers(broken_fakes.restless), "repeats_isolated_batches", 0),
    (broken_fakes.changes_answers(broken_fakes.tokens_cut), "ends_at_its_length", 0),
    (broken_fakes.changes_answers(broken_fakes.tokens_cut), "ends_where_the_context_ends", 0),
    (broken_fakes.never_pauses, "pauses_and_resumes", 0),
    (broken_fakes.cuts_what_it_should_keep, "keeps_what_runs_in_a_pause", SLOW),
    (broken_fakes.keeps_what_it_should_cut, "ends_what_runs_where_a_pause_aborts", SLOW * 2),
    (broken_fakes.pauses_without_a_drain, "drains_before_it_pauses", SLOW),
    (broken_fakes.never_sleeps, "sleeps_and_wakes", 0),
    (broken_fakes.sleeps_at_once, "finishes_calls_before_it_sleeps", SLOW),
    (broken_fakes.wakes_whole, "wakes_by_tags", 0),
    (broken_fakes.forgets_that_it_forgot, "forgets_its_weights_at_level_2", 0),
    (broken_fakes.wakes_at_a_push, "takes_a_push_before_its_caches", 0),
    (broken_fakes.commits_anything, "refuses_pushes_out_of_order", 0),
    (broken_fakes.keeps_old_weights, "serves_what_was_pushed", 0),
    (broken_fakes.serves_what_is_prepared, "forgets_a_push_that_was_only_prepared", 0),
    (broken_fakes.serves_what_was_aborted, "forgets_half_a_push", 0),
    (broken_fakes.takes_any_bytes, "refuses_bytes_that_differ", 0),
    (broken_fakes.takes_old_epochs, "refuses_old_epochs", 0),
    (broken_fakes.takes_other_models, "refuses_other_models", 0),
]


@pytest.mark.parametrize(("break_it", "name", "seconds"), FAKES)
async def test_broken_fakes_are_caught(break_it, name, seconds, monkeypatch):
    fake = new_fake(seconds)
    break_it(fake, monkeypatch)
    result = await outcome(fake, name, weights=weights)
    assert result.outcome == "failed", result.message
    assert result.advice


def never_stops_at_its_end(room, monkeypatch):
    generate = room.generate

    async def ignores(request):
        sampling = dataclasses.replace(request.sampling, ignore_eos=True)
        return await generate(dataclasses.replace(request, sampling=sampling))

    room.generate = ignores


def keeps_a_head_of_its_own(room, monkeypatch):
    """As an engine whose head is packed for its kernels, when nobody packs it again."""
    packed = []
    find = lm_head_of

    def finds(model):
        head = find(model)
        if not packed:
            packed.append(head.weight.clone())
        return dataclasses.replace(head, weight=packed[0])

    monkeypatch.setattr("quartet_rollout.engines.transformers.model.lm_head_of", finds)


def answers_from_a_cache(room, monkeypatch):
    """As an engine that keeps what the old weights made of a prompt."""
    generate, kept = room.generate, {}

    async def remembers(request):
        key = (request.groups, request.sampling)
        if key not in kept:
            kept[key] = await generate(request)
        return map_completions(kept[key], dated(room.policy_version))

    room.generate = remembers


def names_the_last_version_only(room, monkeypatch):
    generate = room.generate

    async def names(request):
        result = await generate(request)
        return map_completions(result, dated(room.policy_version))

    room.generate = names


def dated(version):
    def change(c):
        span = VersionSpan(policy_version=version, start=0, end=len(c.token_ids))
        return dataclasses.replace(c, versions=(span,))

    return change


def is_a_push_behind(room, monkeypatch):
    load, held = TransformersEngine.load_weights, []

    async def lags(self, tensors, policy_version):
        held.append({name: tensor.clone() for name, tensor in tensors})
        return await load(self, held[max(0, len(held) - 2)].items(), policy_version)

    monkeypatch.setattr(TransformersEngine, "load_weights", lags)


def goes_on_without_weights(room, monkeypatch):
    restore = CausalLm.restore

    def restores(self):
        restore(self)
        for parameter in self.model.parameters():
            parameter.data.fill_(0.01)  # whatever was in that memory

    async def lets_go(engine):
        if not room._asleep:
            await engine.resume()

    monkeypatch.setattr(CausalLm, "restore", restores)
    room._let_go = lets_go


ENGINES = [
    (never_stops_at_its_end, "stops_at_its_own_end_token"),
    (keeps_a_head_of_its_own, "takes_embeddings_and_head"),
    (answers_from_a_cache, "forgets_caches_at_a_push"),
    (names_the_last_version_only, "names_the_version_of_each_token"),
    (is_a_push_behind, "never_mixes_versions"),
    (goes_on_without_weights, "computes_nothing_without_weights"),
]


@pytest.mark.parametrize(("break_it", "name"), ENGINES)
async def test_broken_engines_are_caught(break_it, name, tiny_model_dir, monkeypatch):
    service = service_of(tiny_model_dir, max_num_sequences=4)
    break_it(service.room, monkeypatch)
    result = await outcome(service, name, reference=str(tiny_model_dir))
    assert result.outcome == "failed", result.message
    assert "put back" not in result.message


def test_every_check_has_a_server_that_it_catches():
    elsewhere = {  # test_rollout.py
        "matches_the_reference_in_logprobs",
        "stops_at_stop_tokens",
        "repeats_seeds",
        "answers_a_repeat_with_the_first_answer",
        "matches_the_reference_greedily",
        "refuses_what_is_no_request",
        "says_that_it_serves",
    }
    here = {name for _, name, *_ in (*FAKES, *ENGINES)}
    assert {check.__name__ for check in CHECKS} == here | elsewhere
