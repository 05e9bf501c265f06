"""The ref service over a real server."""

import asyncio

import numpy as np
import pytest
from quartet_ref.model import RefModel
from quartet_ref.server import RefService

from quartet.clients import RefClient
from quartet.config import RefServeConfig
from quartet.config.ds import LoadConfig
from quartet.config.launch import RefModelConfig
from quartet.data.tokenizer import fingerprint
from quartet.errors import RequestError, StateError
from quartet.obs.metrics import REGISTRY
from quartet.testing.loopback import loopback
from quartet.types import SequenceBatch


@pytest.fixture
async def client(tiny_model_dir):
    config = RefServeConfig(
        ref=RefModelConfig(model_name_or_path=str(tiny_model_dir)),
        ds=LoadConfig(param_dtype="fp32"),
    )
    service = RefService(RefModel(config), max_concurrent_calls=7)
    async with loopback(service) as address, RefClient(address) as client:
        yield client


def chunks_of(count, seed=0):
    random = np.random.default_rng(seed)
    return [
        SequenceBatch.of([random.integers(3, 384, n).tolist() for n in random.integers(1, 20, 4)])
        for _ in range(count)
    ]


async def test_what_it_says_of_itself(client, tiny_model_dir):
    info = (await client.get_info()).info
    assert (info.service, info.max_concurrent_calls) == ("ref", 7)
    assert info.replica.startswith("ref-")
    assert info.tokenizer_fingerprint == fingerprint(tiny_model_dir)
    assert info.max_sequence_length == 512
    assert info.digest


async def test_each_chunk_has_its_answer_in_order(client):
    chunks = chunks_of(6)
    together = await client.compute_logprobs(chunks)
    alone = [(await client.compute_logprobs([chunk]))[0] for chunk in chunks]
    for chunk, logprobs, other in zip(chunks, together, alone, strict=True):
        assert logprobs.shape == (chunk.num_tokens,)
        assert (logprobs[chunk.offsets[:-1]] == 0).all()
        assert (logprobs <= 0).all()
        np.testing.assert_allclose(logprobs, other, atol=1e-6)


async def test_many_callers_at_once(client):
    calls = [chunks_of(3, seed) for seed in range(8)]
    together = await asyncio.gather(*(client.compute_logprobs(chunks) for chunks in calls))
    for chunks, answers in zip(calls, together, strict=True):
        for logprobs, expected in zip(answers, await client.compute_logprobs(chunks), strict=True):
            np.testing.assert_allclose(logprobs, expected, atol=1e-6)


async def test_the_micro_batch_does_not_change_the_numbers(client):
    chunks = chunks_of(3)
    whole = await client.compute_logprobs(chunks, temperature=0.7)
    cut = await client.compute_logprobs(chunks, temperature=0.7, max_tokens_per_micro_batch=1)
    np.testing.assert_allclose(np.concatenate(cut), np.concatenate(whole), atol=2e-6)


async def test_errors_name_the_sample_and_the_replica(client):
    batch = SequenceBatch.of([[5, 6], [5, 999]], sample_ids=("good", "bad"))
    with pytest.raises(RequestError) as caught:
        await client.compute_logprobs([batch])
    assert caught.value.info.sample_id == "bad"
    assert caught.value.info.replica == (await client.get_info()).info.replica
    with pytest.raises(RequestError, match="temperature"):
        await client.compute_logprobs(chunks_of(1), temperature=0.0)
    assert len(await client.compute_logprobs(chunks_of(1))) == 1


async def test_sleep_and_wake(client):
    before = await client.compute_logprobs(chunks_of(1))
    await client.sleep()
    with pytest.raises(StateError, match="asleep"):
        await client.compute_logprobs(chunks_of(1))
    await client.wake()
    np.testing.assert_array_equal((await client.compute_logprobs(chunks_of(1)))[0], before[0])


async def test_tokens_are_counted(client):
    name = "quartet_ref_evaluated_tokens_total"
    before = REGISTRY.get_sample_value(name)
    [chunk] = chunks_of(1)
    await client.compute_logprobs([chunk])
    assert REGISTRY.get_sample_value(name) == before + chunk.num_tokens
