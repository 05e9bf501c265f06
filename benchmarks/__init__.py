"""Measurements of Quartet that are commands of their own (docs/benchmarks.md). Not in the wheel."""
