"""Every place that rows can come from, and every way to get it wrong."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from quartet.config.data import EvalConfig, PromptDataConfig, SftDataConfig
from quartet.data.load import Source, eval_source, load_table, train_source
from quartet.errors import ConfigError

ROWS = [{"input": f"question {i}", "label": i} for i in range(5)]


def source(names, **more):
    return Source(names=str(names), field="data.dataset", **more)


def write(folder, kind):
    path = folder / f"rows.{kind}"
    table = pa.Table.from_pylist(ROWS)
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps(r) for r in ROWS) + "\n\n")
    elif kind == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif kind == "csv":
        pyarrow.csv.write_csv(table, path)
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_files(tmp_path, kind):
    table = load_table(source(write(tmp_path, kind)), seed=0)
    assert [dict(row) for row in table.rows] == ROWS
    assert table.columns == ("input", "label")


def test_arrow_file_with_a_footer(tmp_path):
    table = pa.Table.from_pylist(ROWS)
    path = tmp_path / "rows.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert list(load_table(source(path), seed=0).rows) == ROWS


def test_json_lines_in_a_json_file_and_labels_of_any_type(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('{"a": 1}\n{"a": "one", "b": [1]}\n')
    table = load_table(source(path), seed=0)
    assert list(table.rows) == [{"a": 1}, {"a": "one", "b": [1]}]
    assert table.columns == ("a", "b")


def test_folder_saved_by_datasets_and_its_splits(tmp_path):
    import datasets

    split = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": split, "test": split.select([4])}).save_to_disk(tmp_path / "d")
    assert list(load_table(source(tmp_path / "d"), seed=0).rows) == ROWS
    assert len(load_table(source(tmp_path / "d", split="test"), seed=0)) == 1
    cut = load_table(source(tmp_path / "d", max_samples=2), seed=0)
    assert [dict(cut.rows[i]) for i in range(len(cut))] == ROWS[:2]
    with pytest.raises(ConfigError, match="no split 'dev' but train, test"):
        load_table(source(tmp_path / "d", split="dev"), seed=0)


def test_folder_of_data_files_and_a_folder_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "d" / "part").mkdir(parents=True)
    write(tmp_path / "d" / "part", "jsonl")
    assert len(load_table(source(f"{tmp_path / 'd'}@part"), seed=0)) == len(ROWS)


def test_max_samples_is_from_the_front_of_each_and_of_the_mix(tmp_path):
    a, b = write(tmp_path, "jsonl"), write(tmp_path, "csv")
    assert list(load_table(source(a, max_samples=2), seed=0).rows) == ROWS[:2]
    table = load_table(source(f"{a},{b}", max_samples=3), seed=0)
    assert list(table.rows) == ROWS[:3]
    assert len(table.datasources) == 3


def test_several_one_after_the_other(tmp_path):
    a, b = write(tmp_path, "jsonl"), write(tmp_path, "csv")
    table = load_table(source(f"{a}, {b}"), seed=0)
    assert list(table.rows) == ROWS + ROWS
    assert table.datasources == [str(a)] * 5 + [str(b)] * 5


def test_names_with_comma_and_at_sign_are_paths_first(tmp_path):
    folder = tmp_path / "a,b@c"
    folder.mkdir()
    assert len(load_table(source(write(folder, "jsonl")), seed=0)) == 5


def test_shares_repeat_the_short_one_and_follow_the_seed(tmp_path):
    long, short = tmp_path / "long.jsonl", tmp_path / "short.jsonl"
    long.write_text("".join(f'{{"x": {i}}}\n' for i in range(300)))
    short.write_text('{"x": -1}\n{"x": -2}\n')
    mix = source(f"{long},{short}", probs="3,1")
    one, again, other = (load_table(mix, seed=seed) for seed in (1, 1, 2))
    values = [row["x"] for row in one.rows]
    assert {v for v in values if v >= 0} == set(range(300))
    assert 0.15 < np.mean([v < 0 for v in values]) < 0.35
    assert values == [row["x"] for row in again.rows]
    assert values != [row["x"] for row in other.rows]
    limited = load_table(source(f"{long},{short}", probs="3,1", max_samples=50), seed=1)
    assert [row["x"] for row in limited.rows] == values[:50]


@pytest.mark.parametrize("probs", ["1", "1,0", "1,x", "nan,1", "-1,2"])
def test_shares_that_do_not_fit(tmp_path, probs):
    path = write(tmp_path, "jsonl")
    with pytest.raises(ConfigError, match="do not fit 2 data sets") as caught:
        load_table(source(f"{path},{path}", probs=probs), seed=0)
    assert caught.value.info.field == "data.dataset_probs"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing.jsonl", "no such file"),
        ("/nowhere/at/all", "no such file or folder"),
        ("./nowhere", "no such file or folder"),
        ("loader.py", "scripts are not run"),
        (" , ", "names no data set"),
    ],
)
def test_wrong_places(name, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load_table(source(name), seed=0)
    assert caught.value.info.field == "data.dataset"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no rows"),
        ('{"a": 1}\n{"a": \n', "line 2 is not JSON"),
        ("[1]\n", "line 1 is not an object"),
    ],
)
def test_broken_files(tmp_path, text, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_table(source(path), seed=0)


def test_broken_parquet(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"not parquet at all")
    with pytest.raises(ConfigError, match="cannot read the data set"):
        load_table(source(path), seed=0)


def test_missing_column_names_those_that_exist(tmp_path):
    table = load_table(source(write(tmp_path, "jsonl")), seed=0)
    with pytest.raises(ConfigError, match="no column 'text'; its columns are 'input', 'label'"):
        table.require("text", "data.input_key")
    table.require("label", "data.label_key")


def test_sources_of_flags():
    prompts = PromptDataConfig(prompt_dataset="a,b", prompt_probs="1,2", prompt_split="x")
    assert train_source(prompts) == Source(
        names="a,b", field="data.prompt_dataset", probs="1,2", split="x", max_samples=100_000_000
    )
    assert train_source(SftDataConfig(dataset="d")).field == "data.dataset"
    with pytest.raises(ConfigError, match="dataset is not set"):
        train_source(SftDataConfig())
    assert eval_source(EvalConfig()) is None
    assert eval_source(EvalConfig(dataset="e", split="dev")).split == "dev"
