"""The reference model, against transformers' own forward pass."""

import asyncio
import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quartet_ref.model import RefModel, micro_batches
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quartet.config import RefServeConfig
from quartet.config.data import TokenizerFields
from quartet.config.ds import LoadConfig
from quartet.config.launch import RefModelConfig
from quartet.data.tokenizer import fingerprint
from quartet.errors import ConfigError, DataError, RequestError, StateError
from quartet.types import ComputeLogprobsRequest, SequenceBatch

SEQUENCES = [[5, 6, 7, 8], [9], [300, 20, 11, 12, 13, 14, 15], [40, 41], [60, 5, 60, 5, 60]]


def config_of(folder, *, packed=False, max_len=2048, offload=False):
    return RefServeConfig(
        ref=RefModelConfig(model_name_or_path=str(folder), offload=offload),
        ds=LoadConfig(param_dtype="fp32", packing_samples=packed),
        data=TokenizerFields(max_len=max_len),
    )


@pytest.fixture
async def start():
    """Start a model with the options of `config_of`."""
    models = []

    async def start(folder, **options):
        model = RefModel(config_of(folder, **options))
        models.append(model)
        await model.start()
        return model

    yield start
    for model in models:
        await model.stop()


def request_of(sequences=SEQUENCES, **options):
    names = [f"s{i}" for i in range(len(sequences))]
    batch = SequenceBatch.of(sequences, names)
    return ComputeLogprobsRequest(chunk_id="c", sequences=batch, **options)


@pytest.fixture(scope="module")
def expected(tiny_model_dir):
    """Log-probabilities in float64, one sequence at a time, from the whole softmax."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float64)

    def logprobs(temperature):
        flat = []
        for ids in SEQUENCES:
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0] / temperature
            table = logits.log_softmax(-1)
            flat += [0.0, *(float(table[t - 1, ids[t]]) for t in range(1, len(ids)))]
        return np.array(flat)

    return logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("budget", [None, 8, 1])
async def test_logprobs(start, tiny_model_dir, expected, temperature, packed, budget):
    model = await start(tiny_model_dir, packed=packed)
    request = request_of(temperature=temperature, max_tokens_per_micro_batch=budget)
    logprobs = await model.compute(request)
    assert logprobs.dtype == np.float32
    np.testing.assert_allclose(logprobs, expected(temperature), atol=2e-5)


async def test_what_it_says_of_itself(start, tiny_model_dir, tmp_path):
    model = await start(tiny_model_dir)
    assert model.max_sequence_length == 512
    assert model.tokenizer_fingerprint == fingerprint(tiny_model_dir)
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model_dir, bare, ignore=shutil.ignore_patterns("*token*", "chat*"))
    same = await start(bare, max_len=100)
    assert same.max_sequence_length == 100
    assert same.tokenizer_fingerprint == ""
    assert same.digest == model.digest != ""


async def test_the_digest_is_that_of_the_weights(start, tiny_model_dir, tmp_path):
    model = await start(tiny_model_dir)
    other = tmp_path / "other"
    shutil.copytree(tiny_model_dir, other)
    weights = load_file(other / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1e-3
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert (await start(other)).digest != model.digest


async def test_a_sequence_that_is_too_long_is_refused_by_name(start, tiny_model_dir):
    model = await start(tiny_model_dir, max_len=6)
    with pytest.raises(RequestError, match=r"7 tokens.*takes 6") as caught:
        await model.compute(request_of())
    assert caught.value.info.sample_id == "s2"
    assert caught.value.info.reason == "SEQUENCE_TOO_LONG"


@pytest.mark.parametrize("token", [-1, 384, 2**31 - 1])
async def test_an_unknown_token_is_refused_by_name(start, tiny_model_dir, token):
    model = await start(tiny_model_dir)
    with pytest.raises(RequestError) as caught:
        await model.compute(request_of([[1, 2], [3, token, 4]]))
    assert caught.value.info.sample_id == "s1"
    assert caught.value.info.value == str(token)


async def test_a_logprob_that_is_not_finite_is_an_error(start, tiny_model_dir, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model_dir, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][300] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((broken / "config.json").read_text())
    assert config["tie_word_embeddings"]
    model = await start(broken)
    with pytest.raises(DataError) as caught:
        await model.compute(request_of())
    assert caught.value.info.reason == "NOT_FINITE"
    assert caught.value.info.sample_id == "s0"  # the tied head poisons every softmax


async def test_sleep_refuses_and_wake_gives_the_same_numbers(start, tiny_model_dir):
    model = await start(tiny_model_dir)
    before = await model.compute(request_of())
    await model.sleep()
    with pytest.raises(StateError, match="asleep"):
        await model.compute(request_of())
    await model.wake()
    np.testing.assert_array_equal(await model.compute(request_of()), before)


async def test_offload_gives_the_same_numbers(start, tiny_model_dir):
    plain, offloaded = await start(tiny_model_dir), await start(tiny_model_dir, offload=True)
    np.testing.assert_array_equal(
        await plain.compute(request_of()), await offloaded.compute(request_of())
    )


async def test_concurrent_callers_take_turns(start, tiny_model_dir):
    """A caller with one pass does not wait for all passes of a caller that came first."""
    model = await start(tiny_model_dir)
    order = []

    async def call(name, passes):
        request = request_of([[5, 6, 7]] * passes, max_tokens_per_micro_batch=3)
        await model.compute(request)
        order.append(name)

    await asyncio.gather(call("long", 20), call("short", 1))
    assert order == ["short", "long"]


async def test_no_model_and_a_missing_model(start, tmp_path):
    with pytest.raises(ConfigError, match="no model to load"):
        RefModel(RefServeConfig())
    with pytest.raises(ConfigError, match="nowhere") as caught:
        await start(tmp_path / "nowhere")
    assert "\n" not in str(caught.value)


@given(
    lengths=st.lists(st.integers(1, 50), max_size=40),
    budget=st.integers(1, 120),
    packed=st.booleans(),
)
def test_micro_batches_hold_every_sequence_once_and_the_budget(lengths, budget, packed):
    batches = list(micro_batches(lengths, budget, packed=packed))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        sizes = [lengths[i] for i in batch]
        tokens = sum(sizes) if packed else max(sizes) * len(sizes)
        assert tokens <= budget or len(batch) == 1
