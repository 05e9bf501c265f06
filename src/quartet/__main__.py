"""`python -m quartet`."""

import sys

from quartet.cli import main

if __name__ == "__main__":
    sys.exit(main())
