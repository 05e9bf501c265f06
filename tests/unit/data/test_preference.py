"""Pairs of answers."""

import numpy as np
import pytest

from quartet.config.data import PreferenceDataConfig
from quartet.data import load_pairs, pair_batch
from quartet.errors import ConfigError


def load(path, tokenizer, **flags):
    return load_pairs(PreferenceDataConfig(dataset=path, **flags), tokenizer, seed=0)


def texts(tokenizer, pair):
    return [tokenizer.decode(s.token_ids) for s in (pair.chosen, pair.rejected)]


def learnt(tokenizer, pair):
    return [tokenizer.decode(s.token_ids[s.loss_mask]) for s in (pair.chosen, pair.rejected)]


def test_plain_answers_behind_a_prompt(write_rows, tokenizer):
    row = {"q": "How?", "chosen": " well\n", "rejected": " badly", "margin": 0.5}
    built = load(write_rows([row]), tokenizer, prompt_key="q", input_template="Q: {} A:")
    pair = built.samples[0]
    assert texts(tokenizer, pair) == ["Q: How? A: well<|im_end|>", "Q: How? A: badly<|im_end|>"]
    assert learnt(tokenizer, pair) == [" well<|im_end|>", " badly<|im_end|>"]
    assert pair.margin == 0.5


def test_plain_texts_without_prompt_key(write_rows, tokenizer):
    pair = load(write_rows([{"chosen": "good day", "rejected": "bad day"}]), tokenizer).samples[0]
    assert texts(tokenizer, pair) == ["good day<|im_end|>", "bad day<|im_end|>"]
    assert pair.margin == 0.0
    assert pair.chosen.loss_mask.tolist() == [False] + [True] * (len(pair.chosen) - 1)


HEAD = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("wrapped", [False, True])
def test_chat_with_prompt_key(write_rows, tokenizer, wrapped):
    def message(role, text):
        return [{"role": role, "content": text}] if wrapped else text

    row = {
        "q": message("user", "hi"),
        "chosen": message("assistant", "hello"),
        "rejected": message("assistant", "go away"),
    }
    built = load(write_rows([row]), tokenizer, prompt_key="q", apply_chat_template=True)
    pair = built.samples[0]
    assert texts(tokenizer, pair) == [HEAD + "hello<|im_end|>", HEAD + "go away<|im_end|>"]
    assert learnt(tokenizer, pair) == ["hello<|im_end|>", "go away<|im_end|>"]


def test_whole_conversations_that_differ_before_the_last_turn(write_rows, tokenizer):
    """Each answer is masked by its own prompt, not by the other's."""
    chosen = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    rejected = [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "no"}]
    path = write_rows([{"chosen": chosen, "rejected": rejected}])
    pair = load(path, tokenizer, apply_chat_template=True).samples[0]
    assert learnt(tokenizer, pair) == ["hello<|im_end|>", "no<|im_end|>"]


def test_what_is_dropped(write_rows, tokenizer):
    rows = [
        {"q": "x", "chosen": "a", "rejected": "b"},
        {"q": "x", "chosen": "a", "rejected": "a"},
        {"q": "x", "chosen": "", "rejected": "a"},
        {"q": "x", "chosen": "a", "rejected": "b", "margin": "much"},
        {"q": "x", "chosen": "a", "rejected": "b", "margin": float("nan")},
        {"q": None, "chosen": "a", "rejected": "b"},
        {"q": "long " * 50, "chosen": "a", "rejected": "b"},
    ]
    built = load(write_rows(rows), tokenizer, prompt_key="q", max_len=40)
    assert len(built) == 1
    assert built.report.counts == {
        "same_answers": 1,
        "empty_answer": 1,
        "bad_margin": 2,
        "not_text": 1,
        "prompt_too_long": 1,
    }


@pytest.mark.parametrize("key", ["prompt_key", "chosen_key", "rejected_key"])
def test_missing_columns(write_rows, tokenizer, key):
    path = write_rows([{"chosen": "a", "rejected": "b"}])
    with pytest.raises(ConfigError, match="its columns are 'chosen', 'rejected'") as caught:
        load(path, tokenizer, **{key: "nothing"})
    assert caught.value.info.field == f"data.{key}"


def test_batches_alternate(write_rows, tokenizer):
    rows = [{"chosen": f"good {i}", "rejected": f"bad {i}", "margin": i} for i in range(3)]
    pairs = load(write_rows(rows), tokenizer).samples
    batch = pair_batch(pairs)
    decoded = [tokenizer.decode(row) for row in batch.sequences.rows()]
    assert [text.split()[0] for text in decoded] == ["good", "bad"] * 3
    np.testing.assert_array_equal(batch.margins, np.float32([0, 1, 2]))
    assert batch.action_mask.dtype == np.bool_
