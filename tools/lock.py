"""Write the versions installed in this environment as a pip constraints file.

    python tools/lock.py constraints/cpu-py311.txt

Local version labels (2.13.0+cpu) are dropped: they name builds, not versions, and differ between
package indexes.
"""

from __future__ import annotations

import sys
from importlib.metadata import distributions
from pathlib import Path

LEFT_OUT = {"quartet-rlhf", "pip", "wheel", "setuptools"}
HEADER = (
    "# Versions that pass the tests together: Linux x86-64, CPU, Python 3.11. From `make lock`.\n"
)


def pins() -> list[str]:
    """One `name==version` a distribution, sorted by name."""
    found = {
        dist.metadata["Name"].lower().replace("_", "-"): dist.version for dist in distributions()
    }
    return [f"{name}=={found[name].split('+')[0]}" for name in sorted(found.keys() - LEFT_OUT)]


def main() -> int:
    """Run from the command line."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    Path(sys.argv[1]).write_text(HEADER + "\n".join(pins()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
