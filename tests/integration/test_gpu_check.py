"""The check for machines with GPUs, as far as it runs without one."""

from __future__ import annotations

import pytest

from benchmarks.gpu_check.__main__ import NO_GPU, main
from benchmarks.gpu_check.checks import CheckError, attempt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_what_a_cpu_can_is_run_and_the_lack_of_a_gpu_is_told(capsys):
    assert main(["--cpu"]) == NO_GPU
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "there is no GPU here"
    assert {line.split()[0] for line in lines[1:]} == {"ok"}, lines
    for backend in ("gloo", "ipc"):
        pushes = [line for line in lines if f"push by {backend}, on the CPU" in line]
        assert len(pushes) == 2
        assert all("greedy tokens of 3 prompts equal" in line for line in pushes)


def test_a_service_that_does_not_start_is_a_failure(capsys):
    assert main(["--cpu", "--python", "/bin/false"]) == 1
    assert "failed   rollout service for gloo and ipc, on the CPU" in capsys.readouterr().out


async def test_a_check_that_fails_says_why():
    async def check():
        raise CheckError("sleep freed nothing")

    outcome = await attempt("sleep", check)
    assert str(outcome) == "failed   sleep: CheckError: sleep freed nothing"


def test_without_cpu_nothing_is_run(capsys):
    assert main([]) == NO_GPU
    assert capsys.readouterr().out.strip() == "there is no GPU here"
