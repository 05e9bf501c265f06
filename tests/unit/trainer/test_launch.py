"""The launcher starts, watches and stops processes, and leaves none behind."""

import asyncio
import contextlib
import io
import os
import signal
import sys
from pathlib import Path

import pytest
import yaml

from quartet.errors import ConfigError, FatalError
from quartet.obs.progress import Progress
from quartet.trainer.launch import Launcher, LocalService, serve_command

FAKE = Path(__file__).with_name("fake_service.py")


def service(role, *, room="learner", max_restarts=0, drain_seconds=20.0, remedy="", **settings):
    return LocalService(
        role=role,
        room=room,
        settings=yaml.safe_dump(settings),
        max_restarts=max_restarts,
        drain_seconds=drain_seconds,
        remedy=remedy,
    )


async def serving(address):
    return True


@contextlib.asynccontextmanager
async def launcher(folder, *services, probe=serving, **options):
    """A launcher of fake services that is stopped whatever happens."""
    progress = Progress(stream=io.StringIO())
    made = Launcher(
        folder,
        services,
        probe=probe,
        progress=progress,
        command=lambda s, settings, ready: [sys.executable, str(FAKE), str(settings), str(ready)],
        **options,
    )
    try:
        yield made
    finally:
        pids = list(made.pids.values())
        await made.stop()
        progress.close()
        assert not any(alive(pid) for pid in pids)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    # A zombie whose parent has not reaped it is gone for our purpose.
    return state != "Z"


async def test_starts_all_and_gives_their_addresses(tmp_path):
    async with launcher(tmp_path, service("learner"), service("critic")) as made:
        addresses = await made.start()
        assert set(addresses) == {"learner", "critic"}
        assert addresses["learner"].startswith("127.0.0.1:")
        assert len(set(made.pids.values())) == 2


async def test_service_that_exits_early_is_named_with_its_log(tmp_path):
    async with launcher(tmp_path, service("learner"), service("ref", exit=3)) as made:
        with pytest.raises(ExceptionGroup) as caught:
            await made.start()
    (error,) = caught.value.exceptions
    assert isinstance(error, FatalError)
    assert "ref ended with exit code 3 while it started" in str(error)
    assert "about to say why" in str(error)
    assert "no such model" in str(error)


async def test_refused_settings_are_a_config_error(tmp_path):
    async with launcher(tmp_path, service("ref", exit=2, say="no such folder")) as made:
        with pytest.raises(ExceptionGroup) as caught:
            await made.start()
    assert isinstance(caught.value.exceptions[0], ConfigError)


async def test_slow_service_is_late(tmp_path):
    async with launcher(tmp_path, service("learner", silent=True), start_timeout=0.3) as made:
        with pytest.raises(ExceptionGroup) as caught:
            await made.start()
    assert "learner did not serve within 0 s (it was starting)" in str(caught.value.exceptions[0])


async def test_waits_for_health_and_says_so(tmp_path):
    answers = iter([False, False, True])

    async def probe(address):
        return next(answers)

    async with launcher(tmp_path, service("learner"), probe=probe) as made:
        await made.start()
    assert next(answers, None) is None


async def test_stubborn_service_is_killed_with_its_children(tmp_path):
    child = tmp_path / "child"
    stubborn = service("learner", stubborn=True, child=str(child), drain_seconds=-4.8)
    async with launcher(tmp_path, stubborn) as made:
        await made.start()
        pid = int(child.read_text())
        assert alive(pid)
    async with asyncio.timeout(5):
        # It was sent SIGKILL; whoever adopted it reaps it in a moment.
        while alive(pid):  # noqa: ASYNC110 - nobody tells of a process that is not our child
            await asyncio.sleep(0.01)


async def test_death_in_the_middle_of_a_run_is_fatal(tmp_path):
    critic = service("critic", remedy="resume with --ckpt.load_enable")
    async with launcher(tmp_path, service("learner"), critic) as made:
        addresses = await made.start()
        watch = asyncio.ensure_future(made.watch())
        os.kill(made.pids["critic"], signal.SIGKILL)
        with pytest.raises(ExceptionGroup) as caught:
            await watch
    text = str(caught.value.exceptions[0])
    assert (
        f"critic ended with signal SIGKILL in the middle of the run (it was at "
        f"{addresses['critic']}); the end of {tmp_path / 'logs' / 'critic.log'}:" in text
    )
    assert text.endswith("(resume with --ckpt.load_enable)")


async def test_restarts_on_the_same_port_a_few_times(tmp_path):
    async with launcher(tmp_path, service("reward", max_restarts=1)) as made:
        addresses = await made.start()
        first = made.pids["reward"]
        watch = asyncio.ensure_future(made.watch())
        os.kill(first, signal.SIGKILL)
        assert await made.settle()
        assert made.addresses == addresses
        assert made.pids["reward"] != first
        assert not await made.settle(notice=0.0)
        os.kill(made.pids["reward"], signal.SIGKILL)
        with pytest.raises(ExceptionGroup, match="unhandled errors"):
            await watch


async def test_a_lost_replica_leaves_its_work_to_the_others(tmp_path):
    said = []
    replicas = [service(f"rollout-{i}", room="rollout", max_restarts=0) for i in range(2)]
    async with launcher(tmp_path, *replicas) as made:
        await made.start()
        made._progress.say = said.append
        watch = asyncio.ensure_future(made.watch())
        os.kill(made.pids["rollout-0"], signal.SIGKILL)
        while not said:  # noqa: ASYNC110 - it says so when it has noticed
            await asyncio.sleep(0.01)
        (line,) = said
        assert line.startswith("going on without it: rollout-0 ended with signal SIGKILL")
        assert not await made.settle(notice=0.0)
        assert not watch.done()
        os.kill(made.pids["rollout-1"], signal.SIGKILL)
        with pytest.raises(ExceptionGroup) as caught:
            await watch
    assert "rollout-1 ended with signal SIGKILL" in str(caught.value.exceptions[0])


async def test_a_death_while_it_starts_again_is_one_more_death(tmp_path):
    once = tmp_path / "dies once"
    mortal = service("reward", max_restarts=2, dies_once=str(once))
    async with launcher(tmp_path, mortal) as made:
        addresses = await made.start()
        once.touch()
        watch = asyncio.ensure_future(made.watch())
        os.kill(made.pids["reward"], signal.SIGKILL)
        assert await made.settle()
        assert made.addresses == addresses
        assert not once.exists()
        assert not watch.done()
        watch.cancel()


async def test_cancelled_start_leaves_nothing(tmp_path):
    async with launcher(tmp_path, service("learner", silent=True)) as made:
        start = asyncio.ensure_future(made.start())
        while not made.pids:  # noqa: ASYNC110 - the next turn of the loop starts it
            await asyncio.sleep(0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start


async def test_no_services_is_no_work(tmp_path):
    async with launcher(tmp_path) as made:
        assert await made.start() == {}
        await made.watch()
    assert list(tmp_path.iterdir()) == []


def test_command_line_of_a_real_service():
    command = serve_command(service("learner"), Path("s.yaml"), Path("r.ready"))
    assert command[1:] == [
        *("-m", "quartet", "serve", "learner", "--config", "s.yaml", "--rpc.port", "0"),
        *("--rpc.ready_file", "r.ready", "--rpc.die_with_parent"),
    ]
