"""Tokenizers load without torch, and a fingerprint names what decides the meaning of ids."""

import json
import shutil
import subprocess
import sys

import pytest

from quartet.data.tokenizer import fingerprint, fingerprint_of, load_tokenizer
from quartet.errors import ConfigError
from quartet.testing.tiny import TinyShape, make_tiny_model, train_tokenizer


def test_loading_imports_no_torch(tiny_model_dir):
    code = (
        "import sys; from quartet.data.tokenizer import load_tokenizer\n"
        f"t = load_tokenizer({str(tiny_model_dir)!r})\n"
        "m = [{'role': 'user', 'content': 'hi'}]\n"
        "t.apply_chat_template(m, tokenize=False, add_generation_prompt=True)\n"
        "t('hi', return_offsets_mapping=True)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "text", ["What is 3 + 4?", "日本語 🙂\n\n  two  spaces", "<|im_end|>x", ""]
)
def test_any_text_survives_encoding(tiny_model_dir, text):
    tokenizer = load_tokenizer(tiny_model_dir)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_have_the_documented_ids(tiny_model_dir):
    tokenizer = load_tokenizer(tiny_model_dir)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") == 1


def test_chat_template_ends_where_the_assistant_begins(tiny_model_dir):
    tokenizer = load_tokenizer(tiny_model_dir)
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_chat_template_can_be_replaced(tiny_model_dir):
    tokenizer = load_tokenizer(tiny_model_dir, chat_template="{{ messages[0]['content'] }}!")
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "hi!"


def test_fingerprint_survives_saving_and_ignores_the_template(tiny_model_dir, tmp_path):
    tokenizer = load_tokenizer(tiny_model_dir, chat_template="other")
    tokenizer.save_pretrained(tmp_path)
    assert fingerprint(tmp_path) == fingerprint(tiny_model_dir) == fingerprint_of(tokenizer)
    assert len(fingerprint(tmp_path)) == 64


def test_fingerprint_reads_old_and_new_merges_alike(tiny_model_dir, tmp_path):
    shutil.copytree(tiny_model_dir, tmp_path / "old")
    file = tmp_path / "old" / "tokenizer.json"
    content = json.loads(file.read_text())
    merges = content["model"]["merges"]
    content["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in merges]
    file.write_text(json.dumps(content))
    assert fingerprint(tmp_path / "old") == fingerprint(tiny_model_dir)


def test_fingerprint_differs_by_vocabulary_and_by_added_token(tiny_model_dir):
    other = train_tokenizer(["entirely different words here"] * 3, vocab=270)
    assert fingerprint_of(other) != fingerprint(tiny_model_dir)
    more = load_tokenizer(tiny_model_dir)
    more.add_tokens(["<tool>"])
    assert fingerprint_of(more) != fingerprint(tiny_model_dir)


def test_missing_folder_is_one_clear_line(tmp_path):
    with pytest.raises(ConfigError, match="no such folder") as caught:
        load_tokenizer(tmp_path / "nothing")
    assert "tokenizer.json" in caught.value.info.remedy
    with pytest.raises(ConfigError, match="nothing"):
        fingerprint(tmp_path / "nothing")


def test_tokenizer_without_end_token_is_refused(tiny_model_dir, tmp_path):
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["eos_token"]
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="no end token"):
        load_tokenizer(tmp_path / "model")


def test_same_seed_same_bytes_and_both_heads_open(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    shape = TinyShape(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=16, vocab=270)
    state = torch.random.get_rng_state()
    one, two = (make_tiny_model(tmp_path / n, shape=shape, seed=7) for n in "ab")
    assert torch.equal(state, torch.random.get_rng_state())
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(one)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.vocab_size == 270
    reward = make_tiny_model(tmp_path / "r", shape=shape, head="reward")
    assert AutoModelForSequenceClassification.from_pretrained(reward).score.out_features == 1
