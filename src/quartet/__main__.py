"""`python -m quartet`."""

from quartet.cli import entry

if __name__ == "__main__":
    entry()
