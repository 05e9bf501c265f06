"""Write docs/flags.md from the configuration classes. `--check` only says whether it is current."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from quartet import config
from quartet.config.aliases import aliases_of
from quartet.config.help import docstring, shown_default
from quartet.config.support import EXPLAINED, REFUSED
from quartet.config.tree import Leaf, flat, leaves

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "flags.md"
INCUMBENT = ROOT / "tests" / "contract"

COMMANDS = (
    ("quartet train ppo", config.PpoConfig, "train_ppo_ray", "ppo"),
    ("quartet train sft", config.SftConfig, "train_sft", "sft"),
    ("quartet train rm", config.RmConfig, "train_rm", "rm"),
    ("quartet train dpo", config.DpoConfig, "train_dpo", "dpo"),
    ("quartet serve reward", config.RewardServeConfig, "serve_rm", "serve_rm"),
    ("quartet serve rollout", config.RolloutServeConfig, "", ""),
    ("quartet serve ref", config.RefServeConfig, "", ""),
    ("quartet serve learner", config.LearnerServeConfig, "", ""),
)
"""Command, configuration, OpenRLHF's entry point and the list of its flags."""

HEAD = """\
# Flags

Made by `python tools/gen_flags.py` from the dataclasses in `src/quartet/config`; do not edit.

`python -m openrlhf.cli.train_ppo_ray ...` becomes `quartet train ppo ...`, and so for the others;
flags, types and defaults are those of OpenRLHF 0.11.2. A flag is

* **honoured**: it does what it does there;
* **differs**: it is accepted, and the text says what is different;
* **refused**: it is parsed, and any value but its default ends the command before anything starts,
  with the sentence given here;
* **added**: OpenRLHF does not have it.

The same names are keys in YAML files (`--config FILE`, nested or dotted) and, in capitals with two
underscores for each dot, environment variables: `QUARTET_ACTOR__ADAM__LR`. Later wins: default,
files in their order, environment, flags. Flags without a value have a form that turns them off:
`--train.no_colocate_all`.
"""


def main() -> int:
    """Write or check the file."""
    text = "\n".join([HEAD, *_sections()])
    if "--check" in sys.argv[1:]:
        if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text:
            return 0
        sys.stderr.write("docs/flags.md is out of date: run python tools/gen_flags.py\n")
        return 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


def _sections() -> Iterator[str]:
    for command, cls, entry_point, listed in COMMANDS:
        known = _incumbent(listed)
        yield f"## {command}\n"
        if entry_point:
            yield f"Stands for `openrlhf.cli.{entry_point}` ({len(known)} flags).\n"
        yield "| flag | type | default | here | meaning |\n|---|---|---|---|---|"
        defaults = flat(cls())
        yield from (_row(leaf, defaults[name], cls, known) for name, leaf in leaves(cls).items())
        yield ""


def _incumbent(listed: str) -> frozenset[str]:
    """Names of OpenRLHF's flags."""
    if not listed:
        return frozenset()
    lines = (INCUMBENT / f"flags_{listed}.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line.partition("\t")[0] for line in lines if not line.startswith("#"))


def _row(leaf: Leaf, default: object, cls: type, known: frozenset[str]) -> str:
    names = (leaf.name, *aliases_of(leaf.name, cls))
    flags = " ".join(f"`--{name}`" for name in names)
    text = docstring(leaf)
    reason = REFUSED.get(leaf.name)
    if reason is not None:
        status, text = "refused", f"{text} {_sentence(reason.why)} {_sentence(reason.instead)}"
    elif known.isdisjoint(names):
        status = "added"
    elif leaf.name in EXPLAINED:
        status, text = "differs", f"{text} {EXPLAINED[leaf.name]}"
    else:
        status = "honoured"
    shown = "(the time)" if leaf.name.endswith(("run_name", "run.name")) else shown_default(default)
    kind = "flag" if leaf.is_bool else leaf.type_name
    cells = (flags, kind, f"`{shown}`" if shown else "", status, text)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", "\\n") for cell in cells) + " |"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


if __name__ == "__main__":
    sys.exit(main())
