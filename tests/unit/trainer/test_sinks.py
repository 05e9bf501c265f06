"""What is logged arrives, in each sink's own form."""

import json
import urllib.request

import pytest

from quartet.errors import ConfigError
from quartet.trainer.sinks import JsonlSink, SampleText, Sinks, is_timing
from quartet.trainer.sinks.console import ConsoleSink
from quartet.trainer.sinks.prometheus import PrometheusSink
from quartet.trainer.sinks.tensorboard import TensorBoardSink

TEXT = SampleText(sample_id="a", prompt="2 + 2 =", completion=" 4", reward=1.0, score=0.5)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_rows(tmp_path):
    sink = JsonlSink(tmp_path)
    sink.log("train", 1, {"reward": 1.5, "kl": float("nan"), "timing/step_total": 2.0})
    sink.texts(1, [TEXT])
    sink.close()
    assert rows(tmp_path / "metrics.jsonl") == [
        {"global_step": 1, "kind": "train", "kl": None, "reward": 1.5, "timing/step_total": 2.0}
    ]
    assert rows(tmp_path / "samples.jsonl")[0]["completion"] == " 4"
    assert not (tmp_path / "timings.jsonl").exists()


def test_jsonl_keeps_the_clock_apart(tmp_path):
    sink = JsonlSink(tmp_path, split_timings=True)
    sink.log("train", 1, {"reward": 1.5, "timing/step_total": 2.0, "rollout/tokens_per_second": 9})
    sink.close()
    assert rows(tmp_path / "metrics.jsonl") == [{"global_step": 1, "kind": "train", "reward": 1.5}]
    assert rows(tmp_path / "timings.jsonl")[0]["rollout/tokens_per_second"] == 9.0


def test_jsonl_appends_when_a_run_goes_on(tmp_path):
    for step in (1, 2):
        sink = JsonlSink(tmp_path, append=step > 1)
        sink.log("train", step, {"reward": step})
        sink.close()
    assert [r["global_step"] for r in rows(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("timing/x", True), ("rollout/tokens_per_second", True), ("reward", False)],
)
def test_is_timing(name, expected):
    assert is_timing(name) is expected


def test_console_line():
    lines = []
    sink = ConsoleSink(lines.append)
    sink.log("train", 3, {"reward": 0.51234, "kl": 0.00001, "dropped/x": 2.0, "hidden": 1.0})
    sink.texts(3, [TEXT])
    sink.close()
    assert lines == [
        "Global step 3: reward 0.5123, kl 1.00e-05, dropped/x 2",
        "  sample (+1.000): 2 + 2 =| 4",
    ]


def test_tensorboard_can_be_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path / "tb")
    sink.log("train", 1, {"reward": 1.5})
    sink.log("train", 2, {"reward": 2.5})
    sink.log("eval", 2, {"eval_default_pass1": 0.25})
    sink.texts(2, [TEXT])
    sink.close()
    read = EventAccumulator(str(tmp_path / "tb"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("train/reward")] == [(1, 1.5), (2, 2.5)]
    assert read.Scalars("eval/eval_default_pass1")[0].value == 0.25
    (text,) = read.Tensors("train/generated_samples")
    assert b"2 + 2 = 4" in text.tensor_proto.string_val[0]


def test_wandb_offline_keeps_the_run_on_disk(tmp_path, monkeypatch):
    from quartet.trainer.sinks.wandb import WandbSink

    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = WandbSink(tmp_path, project="p", name="n", config={"train": {"seed": 1}})
    sink.log("train", 1, {"reward": 1.5})
    sink.texts(1, [TEXT])
    sink.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"train/reward" in file.read_bytes()


def test_prometheus_serves_values_and_totals():
    sink = PrometheusSink(host="127.0.0.1", port=0)
    sink.log("train", 1, {"reward": 1.5, "dropped/x": 2.0, "num_samples_trained": 6.0})
    sink.log("train", 2, {"reward": 2.5, "dropped/x": 1.0, "num_samples_trained": 6.0})
    page = urllib.request.urlopen(f"http://{sink.address}/metrics").read().decode()
    with pytest.raises(ConfigError, match="cannot be served"):
        PrometheusSink(host="127.0.0.1", port=int(sink.address.split(":")[1]))
    sink.close()
    assert 'quartet_trainer_metric{kind="train",name="reward"} 2.5' in page
    assert 'quartet_trainer_samples_dropped_total{reason="x"} 3.0' in page
    assert "quartet_trainer_samples_total 12.0" in page
    assert "quartet_trainer_global_step 2.0" in page
    # What this process counts beside the steps is there too.
    assert "# TYPE quartet_policy_version gauge" in page
    assert "# TYPE quartet_rpc_client_retries_total counter" in page


def test_one_broken_sink_does_not_keep_others_open():
    class Broken:
        def close(self):
            raise OSError("disk full")

    class Whole:
        closed = False

        def close(self):
            self.closed = True

    whole = Whole()
    with pytest.raises(OSError, match="disk full"):
        Sinks([Broken(), whole]).close()
    assert whole.closed
