"""Texts to learn: which tokens are targets, and what ends a text."""

import numpy as np
import pytest

from quartet.config.data import SftDataConfig
from quartet.data import epoch_order, load_sft, load_tokenizer, token_batch
from quartet.errors import ConfigError

EOS = 2


def load(path, tokenizer, *, pretrain=False, **flags):
    return load_sft(SftDataConfig(dataset=path, **flags), tokenizer, seed=0, pretrain=pretrain)


def learnt(tokenizer, sample):
    """The text under the loss mask."""
    return tokenizer.decode(sample.token_ids[sample.loss_mask])


def test_default_template_learns_the_answer_and_its_end(write_rows, tokenizer):
    path = write_rows([{"input": "2 + 2?", "output": "four.\n"}])
    sample = load(path, tokenizer, output_key="output").samples[0]
    assert tokenizer.decode(sample.token_ids) == "User: 2 + 2?\nAssistant: four.<|im_end|>"
    assert learnt(tokenizer, sample).strip() == "four.<|im_end|>"
    assert sample.token_ids.dtype == np.int32
    assert sample.loss_mask.dtype == np.bool_


def test_a_token_over_the_border_is_learnt(write_rows, tiny_model_dir):
    """'Assistant:' + ' four' may be one token ' four': the text is tokenised whole."""
    tokenizer = load_tokenizer(tiny_model_dir)
    path = write_rows([{"input": "x", "output": "four."}])
    sample = load(path, tokenizer, output_key="output", input_template="{} is ").samples[0]
    whole = tokenizer("x is four.", add_special_tokens=False)["input_ids"]
    assert sample.token_ids.tolist() == [*whole, EOS]
    border = tokenizer("x is ", add_special_tokens=False)["input_ids"]
    assert whole[: len(border)] != border, "the example no longer has a token over the border"
    assert learnt(tokenizer, sample) == " four.<|im_end|>"


def test_an_end_token_in_the_text_is_not_doubled(write_rows, tokenizer):
    path = write_rows([{"input": "x", "output": "y<|im_end|>"}])
    sample = load(path, tokenizer, output_key="output").samples[0]
    assert sample.token_ids.tolist().count(EOS) == 1
    assert sample.loss_mask[-1]


@pytest.mark.parametrize(
    "row",
    [
        {"input": "hi", "output": "hello"},
        {"input": [{"role": "user", "content": "hi"}], "output": "hello"},
        {"input": "hi", "output": [{"role": "assistant", "content": "hello"}]},
    ],
)
def test_chat_with_an_output_column(write_rows, tokenizer, row):
    path = write_rows([row])
    sample = load(path, tokenizer, output_key="output", apply_chat_template=True).samples[0]
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>"
    assert tokenizer.decode(sample.token_ids) == expected
    assert learnt(tokenizer, sample) == "hello<|im_end|>"


CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "2 日本"},
]


def test_the_last_message_is_the_answer(write_rows, tokenizer):
    path = write_rows([{"input": CONVERSATION}])
    sample = load(path, tokenizer, apply_chat_template=True).samples[0]
    assert learnt(tokenizer, sample) == "2 日本<|im_end|>"


def test_multiturn_learns_every_answer_with_its_end(write_rows, tokenizer):
    path = write_rows([{"input": CONVERSATION}])
    sample = load(path, tokenizer, apply_chat_template=True, multiturn=True).samples[0]
    assert learnt(tokenizer, sample) == "1<|im_end|>2 日本<|im_end|>"


def test_a_template_that_rewrites_history_drops_the_row(write_rows, tiny_model_dir):
    """Only the last answer keeps its thoughts, as in Qwen3: earlier spans would be wrong."""
    tokenizer = load_tokenizer(
        tiny_model_dir,
        chat_template="{% for m in messages %}<{{ m['role'] }}>"
        "{{ m['content'] if loop.last else m['content'].split('/')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
    )
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "thought/a"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "thought/b"},
    ]
    path = write_rows([{"input": turns}, {"input": turns[:2]}])
    built = load(path, tokenizer, apply_chat_template=True, multiturn=True)
    assert built.report.counts == {"template_rewrites_history": 1}
    assert learnt(tokenizer, built.samples[0]) == "thought/a<|im_end|>"
    last = load(path, tokenizer, apply_chat_template=True)
    assert learnt(tokenizer, last.samples[0]) == "thought/b<|im_end|>"


def test_pretraining_learns_all_but_the_first_token(write_rows, tokenizer):
    path = write_rows([{"input": "The cat sat."}])
    sample = load(path, tokenizer, pretrain=True).samples[0]
    assert sample.loss_mask.tolist() == [False] + [True] * (len(sample) - 1)
    assert sample.token_ids[-1] == EOS


def test_a_cut_text_does_not_learn_to_end(write_rows, tokenizer):
    path = write_rows([{"input": "x", "output": "word " * 50}])
    built = load(path, tokenizer, output_key="output", max_len=30)
    sample = built.samples[0]
    assert len(sample) == 30
    assert EOS not in sample.token_ids
    assert built.report.truncated == 1
    assert "cut 1 of 1 rows to max_len" in built.report.lines()[0]


def test_what_is_dropped(write_rows, tokenizer):
    rows = [
        {"input": "x", "output": "y"},
        {"input": "x", "output": ""},
        {"input": "x", "output": None},
        {"input": "long " * 50, "output": "y"},
    ]
    built = load(write_rows(rows), tokenizer, output_key="output", max_len=20)
    assert built.report.counts == {"empty_answer": 1, "not_text": 1, "nothing_to_learn": 1}
    chat = [{"input": [CONVERSATION[4]]}, {"input": CONVERSATION}]
    built = load(write_rows(chat), tokenizer, apply_chat_template=True)
    assert built.report.counts == {"no_answer": 1}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "output_key is not set"),
        ({"output_key": "answer"}, "no column 'answer'"),
        ({"multiturn": True, "output_key": "output"}, "multiturn needs"),
    ],
)
def test_wrong_flags(write_rows, tokenizer, flags, words):
    with pytest.raises(ConfigError, match=words):
        load(write_rows([{"input": "x", "output": "y"}]), tokenizer, **flags)


def test_batches_are_ragged(write_rows, tokenizer):
    rows = [{"input": "x", "output": "y"}, {"input": "x", "output": "longer answer"}]
    samples = load(write_rows(rows), tokenizer, output_key="output").samples
    batch = token_batch(samples)
    assert batch.sequences.lengths.tolist() == [len(s) for s in samples]
    rows = batch.sequences.rows(batch.action_mask)
    assert all((row == s.loss_mask).all() for row, s in zip(rows, samples, strict=True))
    assert len(batch.sequences.sample_ids) == len(set(batch.sequences.sample_ids)) == 2
    assert token_batch([]).sequences.num_tokens == 0


def test_epoch_order_is_a_function_of_seed_and_epoch():
    order = epoch_order(50, seed=1, epoch=0)
    assert sorted(order) == list(range(50))
    assert (order == epoch_order(50, seed=1, epoch=0)).all()
    assert (order != epoch_order(50, seed=1, epoch=1)).any()
    assert (order != epoch_order(50, seed=2, epoch=0)).any()
