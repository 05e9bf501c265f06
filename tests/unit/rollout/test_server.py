"""The command: wrong settings end with one line and exit code 2; a service that serves, serves."""

import dataclasses

import pytest
from quartet_rollout.server import RolloutService, main

from quartet.clients import RolloutClient
from quartet.config import RolloutServeConfig
from quartet.config.sampling import RolloutEngineConfig
from quartet.data.tokenizer import fingerprint
from quartet.errors import RequestError, StateError
from quartet.obs import metrics
from quartet.testing.loopback import loopback
from quartet.types import (
    LogprobKind,
    PromptGroup,
    PushBackend,
    Rendezvous,
    ReplicaState,
    SamplingParams,
)
from quartet.types.requests import AbortWeightsRequest, PrepareWeightsRequest
from quartet.weights import manifest_of_model


def with_rollout(config, **changes):
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, **changes))


def group(**rest):
    return PromptGroup(group_id="g", prompt_token_ids=(5, 6), num_samples=2, **rest)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_name_or_path": None}, ["rollout.model_name_or_path"]),
        ({"engine": "vllm"}, ["vllm", "not installed", "transformers"]),
    ],
)
def test_wrong_settings_end_with_2_before_anything_starts(serve_config, capsys, changes, words):
    assert main(with_rollout(serve_config, **changes)) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert all(word in line for word in words)


def test_a_model_that_is_not_there_ends_with_2(capsys, tmp_path):
    missing = RolloutServeConfig(
        rollout=RolloutEngineConfig(model_name_or_path=str(tmp_path / "no"), engine="transformers")
    )
    assert main(missing) == 2
    assert str(tmp_path / "no") in capsys.readouterr().err


async def test_serves_over_grpc(serve_config, model, tiny_model_dir):
    before = metrics.GENERATED_TOKENS._value.get()
    async with loopback(RolloutService(serve_config)) as address, RolloutClient(address) as client:
        info = await client.get_info(include_manifest=True)
        result = await client.generate(
            request_id="a", groups=[group()], sampling=SamplingParams(max_new_tokens=5)
        )
        long = PromptGroup(group_id="long", prompt_token_ids=(5,) * 600)
        with pytest.raises(RequestError) as caught:
            await client.generate(request_id="b", groups=[long], sampling=SamplingParams())
    assert info.state is ReplicaState.SERVING
    assert info.engine == "transformers"
    assert info.manifest == manifest_of_model(model.model)
    assert dict(info.manifest.aliases) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert set(info.push_backends) == {PushBackend.GLOO, PushBackend.IPC, PushBackend.FILE}
    assert set(info.logprob_kinds) == set(LogprobKind)
    assert info.info.tokenizer_fingerprint == fingerprint(tiny_model_dir)
    assert info.info.max_sequence_length == 512
    assert result.replica == info.info.replica
    count = sum(len(c.token_ids) for c in result.groups[0].completions)
    assert metrics.GENERATED_TOKENS._value.get() - before == count > 0
    assert caught.value.info.reason == "PROMPT_TOO_LONG"
    assert caught.value.info.replica == info.info.replica


async def test_a_repeated_prepare_joins_once(serve_config, tmp_path):
    async with loopback(RolloutService(serve_config)) as address, RolloutClient(address) as client:
        info = await client.get_info(include_manifest=True)
        assert info.manifest is not None
        request = PrepareWeightsRequest(
            request_id="p",
            epoch=3,
            policy_version=1,
            manifest=info.manifest,
            backend=PushBackend.FILE,
            rendezvous=Rendezvous(folder=str(tmp_path)),
            rank=1,
            world_size=2,
            group_timeout=5.0,
        )
        first, again = await client.prepare_weights(request), await client.prepare_weights(request)
        with pytest.raises(StateError, match="epoch 3 is not newer than 3"):
            await client.prepare_weights(dataclasses.replace(request, request_id="q"))
        await client.abort_weights(AbortWeightsRequest(epoch=3))
    assert first == again
