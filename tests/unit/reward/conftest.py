"""Helpers of the reward service's tests."""

import textwrap

import pytest


@pytest.fixture
def write_reward_file(tmp_path):
    """Write a reward file and return its path."""

    def write(text, name="my_reward.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write
