"""Prompts: rendering, ids, and what is dropped."""

import pytest

from quartet.config.data import PromptDataConfig
from quartet.data import load_prompts
from quartet.errors import ConfigError


def load(path, tokenizer, *, limit=64, **flags):
    data = PromptDataConfig(prompt_dataset=path, **flags)
    return load_prompts(data, tokenizer, max_prompt_tokens=limit, seed=0)


def test_plain_text_is_taken_as_it_is(write_rows, tokenizer):
    built = load(write_rows([{"input": "What is 3 + 4? <image>"}]), tokenizer)
    prompt = built.samples[0]
    assert prompt.text == "What is 3 + 4? <image>"
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert (prompt.label, prompt.datasource) == ("", "default")
    assert built.report.lines() == []


def test_input_template_keeps_other_braces_and_reads_shell_line_ends(write_rows, tokenizer):
    path = write_rows([{"q": "hi {}"}])
    built = load(path, tokenizer, input_key="q", input_template="{x}: {}\\nA:")
    assert built.samples[0].text == "{x}: hi {}\nA:"


@pytest.mark.parametrize("value", ["hi", [{"role": "user", "content": "hi"}]])
def test_chat_template(write_rows, tokenizer, value):
    built = load(write_rows([{"input": value}]), tokenizer, apply_chat_template=True)
    assert built.samples[0].text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert built.samples[0].token_ids[0] == 1


def test_labels_keep_their_type(write_rows, tokenizer):
    labels = [7, "7", [7], {"a": 7}, 0, False, ""]
    rows = [{"input": "x", "y": label} for label in labels]
    built = load(write_rows(rows), tokenizer, label_key="y")
    assert [p.label for p in built.samples] == labels
    assert [type(p.label) for p in built.samples] == [type(label) for label in labels]


def test_datasources(write_rows, tokenizer):
    a = write_rows([{"input": "x", "datasource": "own"}, {"input": "y"}], "a.jsonl")
    b = write_rows([{"input": "z"}], "b.jsonl")
    assert [p.datasource for p in load(a, tokenizer).samples] == ["own", "default"]
    assert [p.datasource for p in load(f"{a},{b}", tokenizer).samples] == ["own", a, b]


def test_prompt_ids_are_unique_and_do_not_depend_on_the_order(write_rows, tokenizer):
    rows = [{"input": "x"}, {"input": "y"}, {"input": "x"}]
    one = [p.prompt_id for p in load(write_rows(rows, "a.jsonl"), tokenizer).samples]
    two = [p.prompt_id for p in load(write_rows(rows[::-1], "b.jsonl"), tokenizer).samples]
    assert len(set(one)) == 3
    assert set(one) == set(two)
    assert one[0].endswith("-0")
    assert one[2] == one[0].replace("-0", "-1")


def test_every_dropped_row_is_counted_with_its_first_example(write_rows, tokenizer):
    rows = [
        {"input": "good", "y": 1},
        {"input": "", "y": 1},
        {"input": "long " * 40, "y": 1},
        {"input": "longer " * 40, "y": 1},
        {"input": 3, "y": 1},
        {"input": "what"},
    ]
    built = load(write_rows(rows), tokenizer, limit=8, label_key="y")
    assert len(built) == 1
    assert built.report.counts == {
        "empty_prompt": 1,
        "prompt_too_long": 2,
        "not_text": 1,
        "label_missing": 1,
    }
    assert built.report.dropped == 5
    line = next(line for line in built.report.lines() if "prompt_too_long" in line)
    assert "dropped 2 of 6 rows" in line
    assert "row 2:" in line
    assert "at most 8" in line


@pytest.mark.parametrize(
    ("value", "reason"),
    [(3, "not_messages"), ([], "not_messages"), ([{"role": "user"}], "not_messages")],
)
def test_what_is_no_conversation(write_rows, tokenizer, value, reason):
    rows = [{"input": "fine"}, {"input": value}]
    built = load(write_rows(rows), tokenizer, apply_chat_template=True)
    assert built.report.counts == {reason: 1}


def test_a_template_that_refuses_drops_the_row(write_rows, tiny_model_dir):
    from quartet.data import load_tokenizer

    picky = load_tokenizer(
        tiny_model_dir,
        chat_template="{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}x",
    )
    rows = [{"input": [{"role": "tool", "content": "1"}]}, {"input": "fine"}]
    built = load(write_rows(rows), picky, apply_chat_template=True)
    assert built.report.counts == {"template_failed": 1}
    assert "no tools" in built.report.lines()[0]


def test_nothing_usable_is_an_error_that_says_why(write_rows, tokenizer):
    with pytest.raises(ConfigError, match=r"no usable sample.*prompt_too_long"):
        load(write_rows([{"input": "long " * 90}]), tokenizer, limit=4)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"input_key": "text"}, "no column 'text'"),
        ({"label_key": "answer"}, "no column 'answer'"),
        ({"input_template": "no slot"}, "no {} for the prompt"),
    ],
)
def test_wrong_flags(write_rows, tokenizer, flags, words):
    with pytest.raises(ConfigError, match=words):
        load(write_rows([{"input": "x"}]), tokenizer, **flags)


def test_a_missing_chat_template_is_named(write_rows, tiny_model_dir):
    from quartet.data import load_tokenizer

    bare = load_tokenizer(tiny_model_dir)
    bare.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template"):
        load(write_rows([{"input": "x"}]), bare, apply_chat_template=True)


def test_worker_processes_give_the_same(write_rows, tokenizer):
    path = write_rows([{"input": f"question {i}"} for i in range(600)] + [{"input": ""}])
    one = load(path, tokenizer)
    two = load(path, tokenizer, dataloader_num_workers=2)
    assert one.samples == two.samples
    assert one.report == two.report
