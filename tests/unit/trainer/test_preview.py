"""`quartet data preview`: what is shown is what would be trained."""

import io
import itertools
import json

import numpy as np
import pytest

from quartet import cli
from quartet.config import DpoConfig, PpoConfig, SftConfig
from quartet.config.load import load
from quartet.data import load_sft, load_tokenizer
from quartet.trainer.preview import Shown, preview, stretches


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def answers(tmp_path):
    rows = [{"input": f"Say {i}.", "output": f" It is {i}\nfine."} for i in range(4)]
    return write(tmp_path / "sft.jsonl", [*rows, {"input": "x", "output": ""}])


def shown(settings, flags, samples=2):
    stream = io.StringIO()
    preview(load(settings, flags, environ={}).config, samples=samples, stream=stream)
    return stream.getvalue()


def sft_flags(model, data):
    return [
        *("--model.model_name_or_path", str(model), "--data.dataset", data),
        *("--data.output_key", "output"),
    ]


def test_the_marked_text_is_what_would_be_trained(tiny_model_dir, answers):
    flags = sft_flags(tiny_model_dir, answers)
    text = shown(SftConfig, flags, samples=4)
    config = load(SftConfig, flags, environ={}).config
    tokenizer = load_tokenizer(str(tiny_model_dir))
    samples = load_sft(config.data, tokenizer, seed=config.train.seed, pretrain=False).samples
    marked = [part.partition("»")[0] for part in text.split("«")[1:]]
    assert marked == [str(tokenizer.decode(s.token_ids[s.loss_mask])) for s in samples]
    assert all("fine." in part for part in marked)


def test_lengths_and_drops_are_told(tiny_model_dir, answers):
    text = shown(SftConfig, sft_flags(tiny_model_dir, answers), samples=0)
    assert "5 rows, 4 samples" in text
    assert "dropped 1 of 5 rows, empty_answer" in text
    assert "trained tokens" in text
    assert "«" not in text


def test_both_sides_of_pairs(tiny_model_dir, tmp_path):
    data = write(tmp_path / "p.jsonl", [{"prompt": "a", "chosen": " good", "rejected": " bad"}])
    flags = ["--model.model_name_or_path", str(tiny_model_dir), "--data.dataset", data]
    text = shown(DpoConfig, [*flags, "--data.prompt_key", "prompt"])
    assert ": chosen: " in text
    assert ": rejected: " in text
    assert "« good" in text
    assert "« bad" in text


def test_prompts_have_labels_and_nothing_trained(tiny_model_dir, tmp_path):
    data = write(tmp_path / "q.jsonl", [{"input": "What is 1 + 1?", "answer": 2}])
    flags = ["--actor.model_name_or_path", str(tiny_model_dir), "--data.prompt_dataset", data]
    text = shown(PpoConfig, [*flags, "--data.label_key", "answer"])
    assert "label 2" in text
    assert "What is 1 + 1?" in text
    assert "trained tokens" not in text


def test_stretches_keep_every_token_in_order():
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(0, 99, 40).astype(np.int32), rng.random(40) < 0.5
    parts = list(stretches(Shown(title="", token_ids=ids, mask=mask)))
    assert [i for _, part in parts for i in part] == ids.tolist()
    assert [kind for kind, part in parts for _ in part] == mask.tolist()
    assert all(a != b for (a, _), (b, _) in itertools.pairwise(parts))


def test_the_command(tiny_model_dir, answers, capsys):
    flags = sft_flags(tiny_model_dir, answers)
    assert cli.main(["data", "preview", "sft", "--samples", "1", *flags]) == 0
    assert capsys.readouterr().out.count("«") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data", "look"], "there are preview"),
        (["data", "preview", "ppoo"], "there are ppo, sft, rm, dpo"),
        (["data", "preview", "sft", "--samples", "few"], "no number of samples"),
        (["data", "preview", "sft", "--data.datasetx", "x"], "data.dataset"),
    ],
)
def test_a_wrong_word_is_named(words, said, capsys):
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err


def test_help_of_the_command(capsys):
    assert cli.main(["data", "--help"]) == 0
    assert "quartet data preview" in capsys.readouterr().out
    assert cli.main(["data"]) == 2
