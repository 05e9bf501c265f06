"""Batches and the scheduler, stepped by hand: time is counted in tokens, not in seconds."""

import itertools

import pytest
import torch
from quartet_rollout.engines.transformers.batch import Batch
from quartet_rollout.engines.transformers.loop import Job, Scheduler

from quartet.types import FinishReason, LogprobKind, PauseMode

PROMPTS = [(5, 6, 7, 8), (9,), tuple(range(20, 60)), (300, 301, 302), (11, 12)]


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture
def scheduler(model):
    return Scheduler(model, max_rows=4, replica="replica-a")


def job(*samples, isolated=False):
    return Job(samples=samples, isolated=isolated)


def run(scheduler, most=500):
    for steps in range(most):
        if scheduler.is_idle:
            return steps
        scheduler.step()
    raise AssertionError(f"not done after {most} steps")


def test_greedy_is_what_transformers_generates(model, sequence, greedy):
    samples = [sequence(p, 24, temperature=0.0) for p in PROMPTS]
    batch = Batch(model, max_rows=3)
    batch.add(samples)
    while len(batch):
        batch.step(0)
    for sample in samples:
        assert sample.tokens == greedy(sample.prompt, 24)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", list(LogprobKind))
def test_logprobs_are_those_of_a_full_forward(model, sequence, reference, sampling, kind):
    samples = [sequence(p, 16, seed=i, kind=kind, **sampling) for i, p in enumerate(PROMPTS)]
    batch = Batch(model, max_rows=4)
    batch.add(samples)
    while len(batch):
        batch.step(0)
    for sample in samples:
        logits = reference([*sample.prompt, *sample.tokens])[len(sample.prompt) - 1 : -1]
        if kind is LogprobKind.PROCESSED:
            logits = torch.stack([warped(row, **sampling) for row in logits])
        picked = torch.tensor(sample.tokens)[:, None]
        wanted = logits.log_softmax(-1).gather(-1, picked).squeeze(-1)
        torch.testing.assert_close(torch.tensor(sample.logprobs), wanted, atol=1e-4, rtol=0)


def warped(logits, temperature=1.0, top_p=1.0, top_k=None):
    """transformers' own processors."""
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    scores = logits[None] / temperature
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores[0]


def test_a_sample_does_not_depend_on_its_neighbours(model, sequence):
    def tokens_of(position, max_rows, others):
        samples = [sequence(p, 12, seed=100 + i) for i, p in enumerate(others)]
        mine = sequence((5, 6, 7, 8), 12, seed=7)
        samples.insert(position, mine)
        batch = Batch(model, max_rows=max_rows)
        batch.add(samples)
        while len(batch):
            batch.step(0)
        return mine.tokens, mine.logprobs

    alone, logprobs = tokens_of(0, 1, [])
    for position, rows, others in [(0, 8, PROMPTS), (3, 8, PROMPTS), (2, 2, PROMPTS[::-1])]:
        tokens, other_logprobs = tokens_of(position, rows, others)
        assert tokens == alone
        assert torch.allclose(torch.tensor(other_logprobs), torch.tensor(logprobs), atol=1e-5)


def test_samples_of_one_prompt_differ_by_their_seed_and_share_a_prefill(model, sequence):
    calls = []
    prefill = model.prefill
    model.prefill = lambda sequences: calls.append(len(sequences)) or prefill(sequences)
    samples = [sequence(count=8, seed=s) for s in (1, 2, 3, 2)]
    batch = Batch(model, max_rows=8)
    batch.add(samples)
    while len(batch):
        batch.step(0)
    assert calls == [1]
    assert samples[1].tokens == samples[3].tokens
    assert len({tuple(s.tokens) for s in samples}) == 3


def test_a_short_completion_does_not_wait_for_a_long_one(scheduler, sequence):
    long = sequence(count=100, stop=frozenset())
    scheduler.add(job(long))
    for _ in range(10):
        scheduler.step()
    short = job(sequence(count=3, stop=frozenset()))
    scheduler.add(short)
    for _ in range(3):
        assert not short.done.done()
        scheduler.step()
    assert short.done.done()
    assert len(long.tokens) == 13


def test_a_freed_row_is_taken_in_the_same_step(scheduler, sequence):
    first = [job(sequence(count=2, stop=frozenset())) for _ in range(4)]
    late = job(sequence(count=2, stop=frozenset()))
    for j in (*first, late):
        scheduler.add(j)
    scheduler.step()
    assert scheduler.num_waiting == 1
    scheduler.step()
    assert all(j.done.done() for j in first)
    assert run(scheduler) == 2


def test_a_cancelled_job_frees_its_rows_at_once(scheduler, sequence):
    long = job(*[sequence(count=400, stop=frozenset()) for _ in range(4)])
    waiting = job(sequence(count=1, stop=frozenset()))
    scheduler.add(long)
    scheduler.add(waiting)
    scheduler.step()
    assert scheduler.num_waiting == 1
    scheduler.cancel(long)
    assert scheduler.num_in_flight == 1
    scheduler.step()
    assert waiting.done.done()
    assert scheduler.is_idle


def test_stop_rules(scheduler, sequence):
    free = sequence(count=30, stop=frozenset(), seed=3)
    scheduler.add(job(free))
    run(scheduler)
    assert (free.finish_reason, len(free.tokens)) == (FinishReason.LENGTH, 30)
    stop = next(t for i, t in enumerate(free.tokens) if i >= 5 and t not in free.tokens[:i])
    place = free.tokens.index(stop)
    stopped = sequence(count=30, stop=frozenset({stop}), seed=3)
    scheduler.add(job(stopped))
    run(scheduler)
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.tokens == free.tokens[: place + 1]
    later = sequence(count=30, stop=frozenset({stop}), seed=3, min_new_tokens=place + 1)
    scheduler.add(job(later))
    run(scheduler)
    assert stop not in later.tokens[: place + 1]
    assert len(later.tokens) > place


def test_new_weights_between_two_tokens(scheduler, sequence, reference):
    """Each token is that of the weights named in its span, with keys and values of those alone."""
    model = scheduler.model
    samples = [sequence(p, 20, seed=i, stop=frozenset()) for i, p in enumerate(PROMPTS)]
    scheduler.add(job(*samples))
    old = {name: p.clone() for name, p in model.model.named_parameters()}
    for _ in range(7):
        scheduler.step()
    running = sum(bool(s.tokens) for s in samples)
    for parameter in model.model.parameters():
        parameter.mul_(0.5)
    scheduler.policy_version = 3
    assert scheduler.forget_cache() == running == 4
    run(scheduler)
    for sample in samples:
        spans = [(v.policy_version, v.start, v.end) for v in sample.versions]
        assert spans in ([(0, 0, 7), (3, 7, 20)], [(3, 0, 20)])
        for version, start, end in spans:
            with torch.inference_mode():
                for name, p in model.model.named_parameters():
                    p.copy_(old[name] * (0.5 if version else 1.0))
            tokens = [*sample.prompt, *sample.tokens]
            logprobs = reference(tokens, model).log_softmax(-1)
            for place in range(start, end):
                at = len(sample.prompt) + place
                wanted = float(logprobs[at - 1, tokens[at]])
                assert abs(sample.logprobs[place] - wanted) < 1e-4


def test_a_row_that_is_not_finite_fails_alone(scheduler, sequence):
    """Token 42 has a poisoned embedding; whoever reads it fails, the others are untouched."""
    embedding = scheduler.model.model.get_input_embeddings().weight
    clean = sequence((5, 6, 7), 10, seed=1)
    alone = sequence((5, 6, 7), 10, seed=1)
    head = embedding.clone()
    scheduler.model.model.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
    scheduler.add(job(alone))
    run(scheduler)
    embedding[42] = torch.nan
    bad = sequence((5, 42, 7), 10, name="bad")
    scheduler.add(job(bad, clean))
    run(scheduler)
    failure = bad.completion().failure
    assert failure is not None
    assert (failure.reason, failure.error_class) == ("LOGITS_NOT_FINITE", "DATA")
    assert "bad" in failure.message
    assert failure.replica == "replica-a"
    assert len(bad.completion().token_ids) == 0
    assert clean.tokens == alone.tokens


def test_isolated_jobs_repeat_bit_for_bit_whoever_else_is_there(model, sequence):
    def generate(crowd):
        scheduler = Scheduler(model, max_rows=4)
        for i in range(crowd):
            scheduler.add(job(sequence(PROMPTS[i % 5], 40, seed=1000 + i, stop=frozenset())))
        for _ in range(crowd):
            scheduler.step()
        samples = [sequence(p, 25, seed=i) for i, p in enumerate(PROMPTS * 2)]
        wanted = job(*samples, isolated=True)
        scheduler.add(wanted)
        run(scheduler)
        return [(s.tokens, s.logprobs) for s in samples]

    assert generate(0) == generate(3) == generate(9)


def test_isolated_jobs_run_one_at_a_time_beside_the_shared_batch(scheduler, sequence):
    jobs = [job(sequence(count=3, stop=frozenset()), isolated=True) for _ in range(2)]
    shared = job(sequence(count=6, stop=frozenset()))
    for j in (*jobs, shared):
        scheduler.add(j)
    done_at = {}
    for step in itertools.count(1):
        scheduler.step()
        for name, j in [("first", jobs[0]), ("second", jobs[1]), ("shared", shared)]:
            if j.done.done():
                done_at.setdefault(name, step)
        if len(done_at) == 3:
            break
    assert done_at == {"first": 3, "second": 6, "shared": 6}


def test_pause_and_keep_holds_and_goes_on_as_if_nothing_was(scheduler, sequence):
    undisturbed = sequence(count=12, seed=4)
    scheduler.add(job(undisturbed))
    run(scheduler)
    sample = sequence(count=12, seed=4)
    scheduler.add(job(sample))
    scheduler.step()
    assert scheduler.pause(PauseMode.KEEP).result(0) == 1
    assert scheduler.is_idle
    assert scheduler.resume() == 1
    run(scheduler)
    assert sample.tokens == undisturbed.tokens


def test_pause_and_abort_ends_what_runs_and_keeps_what_waits(scheduler, sequence):
    running = [sequence(count=50, stop=frozenset()) for _ in range(4)]
    waiting = sequence(count=2, stop=frozenset())
    first, second = job(*running), job(waiting)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.step()
    assert scheduler.pause(PauseMode.ABORT).result(0) == 1
    assert first.done.done()
    completion = running[0].completion()
    assert completion.finish_reason is FinishReason.ABORTED
    assert len(completion.token_ids) == len(completion.logprobs) == 1
    assert not second.done.done()
    scheduler.resume()
    run(scheduler)
    assert second.done.done()


def test_pause_and_drain_answers_when_what_runs_is_done(scheduler, sequence):
    running = job(*[sequence(count=5, stop=frozenset()) for _ in range(4)])
    waiting = job(sequence(count=2, stop=frozenset()))
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.step()
    held = scheduler.pause(PauseMode.DRAIN)
    assert run(scheduler) == 4
    assert held.result(0) == 1
    assert running.done.done()
    assert not waiting.done.done()
    scheduler.resume()
    run(scheduler)
    assert waiting.done.done()


def test_more_samples_than_rows_all_get_done(scheduler, sequence):
    samples = [sequence(PROMPTS[i % 5], 1 + i % 7, seed=i, stop=frozenset()) for i in range(30)]
    scheduler.add(job(*samples))
    run(scheduler)
    assert [len(s.tokens) for s in samples] == [1 + i % 7 for i in range(30)]


def test_the_context_ends_a_completion(model, sequence):
    scheduler = Scheduler(model, max_rows=2)
    prompt = tuple(range(model.max_length - 3))
    sample = sequence(tuple(t % 300 for t in prompt), 3, stop=frozenset())
    scheduler.add(job(sample))
    run(scheduler)
    assert sample.finish_reason is FinishReason.LENGTH
