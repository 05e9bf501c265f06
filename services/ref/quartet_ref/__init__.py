"""The ref service."""
