"""Faults of safety and of operation: what leaks, what is trusted, what is lost when a run fails."""

import ast
import json
import logging

import pytest

from quartet import codec
from quartet.clients import RewardClient
from quartet.config import PpoConfig, RewardServeConfig
from quartet.config.files import to_yaml
from quartet.config.load import build, load
from quartet.config.machine import Machine
from quartet.config.placement import gpus_needed, places
from quartet.config.plan import render_plan
from quartet.errors import ConfigError, FatalError
from quartet.testing.fakes import FakeReward
from quartet.testing.loopback import loopback
from quartet.trainer.run import Job, conduct
from quartet.trainer.services import local_services
from quartet.types import (
    GenerateRequest,
    LogprobKind,
    PromptGroup,
    SamplingParams,
    ScoreItem,
)
from tests.faults.sources import calls, imported

CPU = Machine()
EIGHT = Machine(num_gpus=8, has_vllm=True, has_flash_attention=True)
LINE = {
    "actor.model_name_or_path": "org/policy",
    "reward.model_name_or_path": "org/reward",
    "data.prompt_dataset": "org/prompts",
}


def test_fault_37_all_ways_of_sharing_gpus_at_once_give_a_plan():
    """Asked to share everything and pairs as well, every role has a place on the same GPUs."""
    shared = {
        "train.colocate_all": True,
        "train.colocate_actor_ref": True,
        "train.colocate_critic_reward": True,
        "vllm.num_engines": 8,
    }
    config = build(PpoConfig, LINE | shared, {})
    found = places(config, EIGHT)
    assert {place.role for place in found} == {"learner", "critic", "ref", "reward", "rollout"}
    assert all(set(place.gpus) <= set(range(8)) and place.gpus for place in found)
    assert gpus_needed(config, EIGHT) == 8


def test_fault_52_what_was_logged_is_kept_when_a_run_fails(tmp_path, capsys):
    """Sinks are closed and the summary is written on the way out, whatever the way."""
    config = build(PpoConfig, {"run.dir": str(tmp_path), "run.name": "failing"}, {})

    async def body(run):
        run.sinks.log("train", 1, {"reward": 0.25})
        run.summary["steps"] = 1
        raise FatalError("the model is gone", reason="GONE")

    assert conduct(config, lambda progress: Job(services=[], body=body)) == 1
    (row,) = (tmp_path / "failing/metrics.jsonl").read_text().splitlines()
    assert json.loads(row)["reward"] == 0.25
    summary = json.loads((tmp_path / "failing/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 1)
    assert "the model is gone" in summary["error"]
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: the model is gone")


async def test_fault_55_texts_of_calls_are_not_logged(caplog):
    """Prompts and completions are somebody's data: a server's log names calls, not contents."""
    item = ScoreItem(sample_id="s0", prompt="my secret diary", query="my secret diary says")
    reward = FakeReward()
    with caplog.at_level(logging.DEBUG):
        async with loopback(reward) as address:
            client = RewardClient(address)
            await client.score(request_id="r1", items=[item])
            reward.script.fail("Score", ValueError("out of order"))
            with pytest.raises(FatalError):
                await client.score(request_id="r2", items=[item])
            await client.close()
    assert "out of order" in caplog.text
    assert "secret diary" not in caplog.text


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_fault_55_a_server_listens_to_its_own_machine_unless_told(host):
    config = build(RewardServeConfig, {}, {})
    config.rpc.check()
    assert config.rpc.host in ("127.0.0.1", "localhost")
    with pytest.raises(ConfigError, match=r"rpc\.insecure"):
        build(RewardServeConfig, {"rpc.host": host}, {}).rpc.check()


UNSAFE = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def test_fault_56_nothing_that_runs_code_when_it_is_read():
    """No source imports a format that executes what it reads: the wire is protobuf and bytes."""
    found = [(path, module) for path, module in imported() if module.split(".")[0] in UNSAFE]
    assert found == []


def test_fault_57_code_of_models_is_run_only_where_the_flag_says_so():
    """`trust_remote_code` is off by default, and nowhere written as True."""
    assert build(PpoConfig, {}, {}).ds.trust_remote_code is False
    given = [
        (path, line, ast.unparse(keyword.value))
        for path, line, _, call in calls()
        for keyword in call.keywords
        if keyword.arg == "trust_remote_code"
    ]
    assert len(given) > 3
    assert [entry for entry in given if entry[2] == "True"] == []


def test_fault_58_the_key_of_wandb_is_shown_nowhere(tmp_path):
    key = "0123456789abcdef"
    flags = [f"--{name}={value}" for name, value in LINE.items()]
    loaded = load(PpoConfig, [*flags, f"--logger.wandb.key={key}"], environ={})
    assert loaded.config.logger.wandb.key == key
    texts = [render_plan(loaded.config, CPU, loaded.origins), to_yaml(loaded.config)]
    texts += [service.settings for service in local_services(loaded.config)]
    assert len(texts) == 7
    assert [text for text in texts if key in text] == []


def test_fault_60_weights_are_read_from_safetensors():
    """`torch.load` is not called: a folder of weights cannot bring code along."""
    found = [
        (path, line)
        for path, line, name, _ in calls()
        if name in ("torch.load", "load_state_dict_from_url")
    ]
    assert found == []


def test_fault_63_a_request_for_completions_is_little_more_than_its_tokens():
    group = PromptGroup(
        group_id="0/p",
        prompt_token_ids=tuple(range(1000)),
        num_samples=8,
        sample_ids=tuple(f"0/p/{i}" for i in range(8)),
        seeds=tuple(range(8)),
    )
    request = GenerateRequest(
        request_id="r",
        groups=(group,),
        sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=8),
        logprob_kind=LogprobKind.PROCESSED,
    )
    assert len(codec.encode_generate_request(request).SerializeToString()) < 4 * 1000 + 512


TALKERS = {
    "src/quartet/trainer/run.py": "the last line of a run",
    "src/quartet/rpc/probe.py": "the state that was asked for",
}
"""Who may write to the standard output: its answer is what the command is for."""


def test_fault_73_no_bare_prints_beside_the_log():
    found = [
        (path, line)
        for path, line, name, call in calls()
        if name == "print"
        and path not in TALKERS
        and "/demo/" not in path
        and "file=sys.stderr" not in ast.unparse(call)
    ]
    assert found == []
