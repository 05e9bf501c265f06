"""Generate src/quartet/api from protos/, or check that it is fresh.

    python tools/gen_protos.py            write
    python tools/gen_protos.py --check    fail with the names of stale files

The proto path is the Python path, so the output needs no edit. The generator is pinned
(grpcio-tools 1.81.1): its output runs on every newer protobuf and grpcio.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
SRC = ROOT / "src"
API = Path("quartet/api")


def generate(out: Path) -> None:
    """Write the modules, their stubs and the package markers under `out`."""
    files = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    scripts = sysconfig.get_path("scripts")
    env = dict(os.environ, PATH=f"{scripts}{os.pathsep}{os.environ['PATH']}")
    outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *outputs, *files]
    subprocess.run(command, check=True, env=env, cwd=PROTOS)
    for folder in sorted({path.parent for path in (out / API).rglob("*.py")} | {out / API}):
        while folder != out / "quartet":
            (folder / "__init__.py").write_text('"""Generated from protos/. Never edited."""\n')
            folder = folder.parent


def stale(fresh: Path) -> list[str]:
    """Names of generated files that differ, are missing or are left over."""
    found = {p.relative_to(SRC) for p in (SRC / API).rglob("*.py*") if "__pycache__" not in p.parts}
    wanted = {p.relative_to(fresh) for p in (fresh / API).rglob("*.py*")}
    same = {p for p in found & wanted if filecmp.cmp(SRC / p, fresh / p, shallow=False)}
    return sorted(str(p) for p in (found | wanted) - same)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="Generate src/quartet/api from protos/.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if stale")
    if not parser.parse_args().check:
        generate(SRC)
        return 0
    with tempfile.TemporaryDirectory() as fresh:
        generate(Path(fresh))
        names = stale(Path(fresh))
    for name in names:
        print(f"stale: {name} (run `make protos`)", file=sys.stderr)
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
