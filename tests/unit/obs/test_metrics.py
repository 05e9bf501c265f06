"""The exporter shows our registry, and nothing else."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from quartet.errors import ConfigError
from quartet.obs import metrics


def test_off_by_default() -> None:
    assert metrics.start_exporter(None) is None


def test_any_free_port_is_told() -> None:
    address = metrics.start_exporter(0)
    metrics.POLICY_VERSION.set(7)
    metrics.GENERATED_TOKENS.inc(3)
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        page = answer.read().decode()
    assert "\nquartet_policy_version 7.0\n" in page
    assert "\nquartet_rollout_generated_tokens_total " in page
    assert "_created" not in page
    assert "\npython_info" not in page


def test_a_taken_port_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics.port {port}") as caught:
            metrics.start_exporter(port)
    assert caught.value.info.field == "metrics.port"
