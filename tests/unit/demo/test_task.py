"""The demo's data says what it promises, and the lexicon knows its words."""

import re

import pytest

from quartet.demo.task import read_rows, sentiment, write_task
from quartet.demo.words import NEGATIVE, NEUTRAL, NOUNS, POSITIVE, TEMPLATES


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"), seed=3)


def test_words_are_what_the_lexicon_says():
    assert all(sentiment(word) > 0 for word in POSITIVE)
    assert all(sentiment(word) < 0 for word in NEGATIVE)
    assert all(sentiment(word) == 0 for word in (*NEUTRAL, *NOUNS))
    words = [*POSITIVE, *NEGATIVE, *NEUTRAL, *NOUNS]
    assert len(words) == len(set(words))
    glue = " ".join(before + after for before, after in TEMPLATES)
    assert sentiment(re.sub(r"\{.\}", "", glue)) == 0


def test_sentences_are_balanced_and_complete(files):
    rows = read_rows(files.sft)
    scores = [sentiment(row["completion"]) for row in rows]
    assert abs(sum(scores) / len(scores)) < 0.05
    assert all(row["completion"].startswith(" ") for row in rows)
    assert all(row["completion"].endswith(" .") for row in rows)
    assert not any("{" in row["prompt"] + row["completion"] for row in rows)


def test_pairs_are_ordered_by_the_lexicon(files):
    for row in read_rows(files.pairs):
        assert sentiment(row["chosen"]) > sentiment(row["rejected"])


def test_held_out_rows_are_not_training_rows(files):
    trained = {str(row) for row in read_rows(files.pairs)}
    held_out = [str(row) for row in read_rows(files.held_out_pairs)]
    assert sum(row in trained for row in held_out) < len(held_out) * 0.01


def test_the_same_seed_gives_the_same_files(files, tmp_path):
    again, other = write_task(tmp_path / "a", seed=3), write_task(tmp_path / "b", seed=4)
    assert again.sft.read_bytes() == files.sft.read_bytes()
    assert again.pairs.read_bytes() == files.pairs.read_bytes()
    assert other.sft.read_bytes() != files.sft.read_bytes()
