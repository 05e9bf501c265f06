"""From flags to vLLM's engine arguments."""

import dataclasses

import pytest
from quartet_rollout.engines.vllm.arguments import FIXED, OWN, engine_arguments, parse_extra
from quartet_rollout.engines.vllm.facts import read_facts

from quartet.config import RolloutServeConfig
from quartet.config.sampling import VllmEngineFields
from quartet.errors import ConfigError
from quartet.nn.digest import model_digest
from quartet.weights import manifest_of_model

KNOWN = {"block_size", "max_num_batched_tokens", "logprobs_mode", "kv_cache_memory_bytes", "model"}


@pytest.fixture(scope="module")
def facts(tiny_model_dir):
    return read_facts(str(tiny_model_dir), dtype="float32", trust_remote_code=False)


def arguments(config, facts, *, has_gpu=False, **vllm):
    config = dataclasses.replace(config, vllm=VllmEngineFields(**vllm))
    return engine_arguments(config, facts, has_gpu=has_gpu, known=KNOWN)


def test_facts_are_those_of_the_loaded_model(facts, model):
    assert facts.manifest == manifest_of_model(model.model)
    assert facts.digest == model_digest(model.model)
    assert facts.eos_token_ids == model.eos_token_ids
    assert facts.vocabulary == model.vocabulary
    config = model.model.config
    assert facts.cache_bytes_per_token == (
        2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    )


def test_facts_of_nothing_are_a_config_error():
    with pytest.raises(ConfigError, match="/no/model"):
        read_facts("/no/model", dtype="float32", trust_remote_code=False)


def test_a_cpu_gets_a_cache_of_its_own_size_and_no_graphs(serve_config, facts):
    made = arguments(serve_config, facts)
    assert made["enforce_eager"] is True
    assert made["kv_cache_memory_bytes"] == 128 << 20
    assert "gpu_memory_utilization" not in made
    assert made["enable_chunked_prefill"] is False
    assert made["dtype"] == "float32"
    assert made["max_model_len"] == 512
    assert made["logprobs_mode"] == "processed_logprobs"


def test_a_gpu_gets_what_the_flags_say(serve_config, facts):
    made = arguments(
        serve_config,
        facts,
        has_gpu=True,
        gpu_memory_utilization=0.5,
        enable_sleep=True,
        tensor_parallel_size=2,
        enable_prefix_caching=True,
    )
    assert made["gpu_memory_utilization"] == 0.5
    assert made["enable_sleep_mode"] is True
    assert made["tensor_parallel_size"] == 2
    assert made["enable_prefix_caching"] is True
    assert made["enforce_eager"] is False
    assert "kv_cache_memory_bytes" not in made
    assert "enable_chunked_prefill" not in made


def test_samples_of_a_prompt_can_share_it_without_a_flag(serve_config, facts):
    """None leaves it to vLLM, which knows the models that cannot; False would forbid it."""
    assert arguments(serve_config, facts)["enable_prefix_caching"] is None


def test_extra_arguments_win(serve_config: RolloutServeConfig, facts):
    extra = ("kv_cache_memory_bytes=1000", "logprobs_mode=raw_logprobs", "block-size=32")
    made = arguments(serve_config, facts, extra=extra)
    assert made["kv_cache_memory_bytes"] == 1000
    assert made["logprobs_mode"] == "raw_logprobs"
    assert made["block_size"] == 32


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("block_size", "key=value"),
        ("blok_size=3", "did you mean block_size"),
        ("zzz=3", "no engine argument zzz"),
        ("model=x", "--rollout.model_name_or_path"),
        ("worker_extension_cls=x", "depends on"),
        ("block_size=[", "no YAML"),
    ],
)
def test_wrong_extra_arguments_are_refused_by_name(entry, words):
    with pytest.raises(ConfigError) as caught:
        parse_extra([entry], KNOWN)
    assert caught.value.info.field == "vllm.extra"
    assert words in str(caught.value) + caught.value.info.remedy


def test_no_argument_is_both_free_and_fixed():
    assert not OWN.keys() & FIXED
