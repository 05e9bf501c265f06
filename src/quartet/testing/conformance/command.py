"""`quartet conformance ROOM ADDRESS`: grade a server, whoever wrote it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from quartet.testing.conformance import CheckResult, advice_of, rule_of, run_checks
from quartet.types import PushBackend

EXIT_FAILURE = 1

_WHAT = {
    "rollout": "Asks a rollout server what the contract says it must do, one check after another.",
    "reward": "Asks a reward server what the contract says it must do, one check after another.",
}
_OUTCOMES = """\
Each check is one line: passed, failed, or skipped with the reason. Under a failed one stand what
was seen, and what that does to a run. The exit code is 1 when any check failed."""


def run(room: str, args: Sequence[str]) -> int:
    """Grade a server of `room`; returns the exit code."""
    suite = import_module(f"quartet.testing.conformance.{room}")
    given = vars(_parser(room, suite.CHECKS).parse_args(args))
    names = given.pop("only") or [check.__name__ for check in suite.CHECKS]
    checks = [check for check in suite.CHECKS if check.__name__ in names]
    subject = getattr(suite, f"{room.capitalize()}Subject")(**given)
    failed = False
    for check in checks:
        [result] = asyncio.run(run_checks([check], subject))
        failed = failed or result.outcome == "failed"
        sys.stdout.write(_lines(result))
        sys.stdout.flush()
    return EXIT_FAILURE if failed else 0


def _lines(result: CheckResult) -> str:
    if result.outcome == "passed":
        return f"passed   {result.name}: {result.rule}\n"
    if result.outcome == "skipped":
        return f"skipped  {result.name}: {result.message}\n"
    advice = f"         what that means: {result.advice}\n" if result.advice else ""
    return f"failed   {result.name}: {result.rule}\n         seen: {result.message}\n{advice}"


def _parser(room: str, checks: Sequence[Any]) -> argparse.ArgumentParser:
    listed = "\n".join(
        f"  {check.__name__}\n      {rule_of(check)}" + _indented(advice_of(check))
        for check in checks
    )
    parser = argparse.ArgumentParser(
        prog=f"quartet conformance {room}",
        description=f"{_WHAT[room]}\n\n{_OUTCOMES}",
        epilog=f"Checks:\n{listed}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("address", metavar="ADDRESS", help="host:port of the server")
    parser.add_argument(
        "--exclusive",
        dest="is_exclusive",
        action="store_true",
        help="nobody else uses the server: it may be paused, put to sleep, filled with calls, and "
        "pushed to; it gets its own weights back. Without it such checks are skipped",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="CHECK",
        choices=[check.__name__ for check in checks],
        help="make these checks alone",
    )
    if room == "rollout":
        _add_model(parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--reference",
        metavar="FOLDER",
        default="",
        help="the model that the server was started with: numbers are compared with it, and pushes "
        "are made from its weights",
    )
    parser.add_argument(
        "--tolerance",
        dest="logprob_tolerance",
        type=float,
        default=1e-4,
        metavar="NATS",
        help="largest difference from the reference's log-probabilities: 1e-4 for fp32 (the "
        "default), 0.3 for bf16",
    )
    parser.add_argument(
        "--not-repeatable",
        dest="is_repeatable",
        action="store_false",
        help="a seed need not give the same tokens beside other calls (bf16)",
    )
    parser.add_argument(
        "--push-backend",
        type=PushBackend,
        choices=(PushBackend.GLOO, PushBackend.FILE),
        default=None,
        help="how the suite pushes; without it gloo, or file where gloo is not offered",
    )
    parser.add_argument(
        "--push-folder",
        default="",
        metavar="FOLDER",
        help="folder that the server sees too, for pushes by file",
    )


def _indented(text: str) -> str:
    return f"\n      If it fails: {text}" if text else ""
