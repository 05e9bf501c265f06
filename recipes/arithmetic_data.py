"""Model and data of smollm2-135m.yaml: SmolLM2-135M-Instruct, and sums from reasoning-gym.

    python recipes/arithmetic_data.py [--folder .cache]

Writes FOLDER/smollm2-135m (a model folder) and FOLDER/arithmetic/{train,held_out}.jsonl with the
columns `messages` and `answer`. A sum that is held out does not occur in training.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reasoning_gym

from quartet.tools.gguf_to_hf import convert, find_gguf

SYSTEM = "Answer with a number."
NUM_TRAIN = 1024
NUM_HELD_OUT = 20
"""Of the 100 sums of two numbers up to 9."""


def sums(seed: int) -> Iterator[tuple[str, str]]:
    """Endless (question, answer) of sums of two numbers up to 9."""
    while True:
        data = reasoning_gym.create_dataset(
            "chain_sum", size=1024, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1
        )
        for entry in data:
            if "+" in entry["metadata"]["expression"]:
                yield entry["question"], entry["answer"]
        seed += 1


def rows(questions: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Questions as conversations."""
    for question, answer in questions:
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question},
        ]
        yield {"messages": messages, "answer": answer}


def split(seed: int = 1) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Questions to train on, with repetitions, and the held-out ones, each once."""
    train: list[tuple[str, str]] = []
    held_out: list[tuple[str, str]] = []
    for item in sums(seed):
        if item in held_out:
            continue
        if len(held_out) < NUM_HELD_OUT:
            held_out.append(item)
        elif len(train) < NUM_TRAIN:
            train.append(item)
        else:
            return train, held_out
    raise AssertionError("sums() never ends")


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(".cache"))
    folder = parser.parse_args().folder
    convert(find_gguf("smollm2-135m"), folder / "smollm2-135m")
    data = folder / "arithmetic"
    data.mkdir(parents=True, exist_ok=True)
    for name, questions in zip(("train", "held_out"), split(), strict=True):
        text = "".join(json.dumps(row) + "\n" for row in rows(questions))
        (data / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{data / name}.jsonl: {len(questions)} rows")


if __name__ == "__main__":
    main()
