"""User code in worker processes: what it may do, and what it cannot break."""

import asyncio
import contextlib
import hashlib
import logging
import os
import signal

import pytest
from quartet_reward.batcher import Batcher
from quartet_reward.scorers.function import FunctionScorer

from quartet.errors import ConfigError
from quartet.types import Failure, Reward, ScoreItem
from quartet.workers import descendants


def make_item(name="s0", query="a question and its answer", label=""):
    return ScoreItem(sample_id=name, prompt="a question", query=query, label=label)


@contextlib.asynccontextmanager
async def serving(path, **options):
    """A started scorer behind a batcher, as the service has it; `score(*items)` scores a call."""
    scorer = FunctionScorer(path, **options)
    traits = await scorer.start()
    batcher = Batcher(
        scorer.score, max_batches=traits.max_batches, max_items=traits.max_batch_items
    )

    async def score(*items):
        return await batcher.submit(await scorer.prepare(items, ""))

    try:
        yield score, scorer
    finally:
        await scorer.stop()
    assert scorer.worker_pids == []


def is_gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for offers no event
            await asyncio.sleep(0.01)


SEED_SHAPE = """
    import torch

    def reward_func(queries, prompts, labels, **kwargs) -> dict:
        rewards = []
        for query, prompt, label in zip(queries, prompts, labels):
            response = query[len(prompt):]
            rewards.append(1.0 if response.strip() == label else 0.0)
        rewards_tensor = torch.tensor(rewards)
        return {
            "rewards": rewards_tensor,
            "scores": rewards_tensor,
            "extra_logs": {"math_accuracy": rewards_tensor.mean()},
        }
"""


async def test_the_file_shape_of_the_incumbent_works_unchanged(write_reward_file):
    async with serving(write_reward_file(SEED_SHAPE)) as (score, _):
        right = make_item("right", "a question 42", "42")
        wrong = make_item("wrong", "a question 41", "42")
        outcomes = await score(right, wrong)
    assert outcomes == [
        Reward(reward=1.0, score=1.0, extra_logs={"math_accuracy": 1.0}),
        Reward(reward=0.0, score=0.0, extra_logs={"math_accuracy": 0.0}),
    ]


BEHAVIOURS = """
    import asyncio, os, signal, subprocess, sys, threading, time

    calls = 0

    def reward_func(queries, prompts, labels, **kwargs):
        global calls
        calls += 1
        assert len(queries) == len(prompts) == len(labels)
        what = labels[0]
        if what == "raise":
            raise ValueError("no such answer\\nat all")
        if what == "exit":
            sys.exit(3)
        if what == "die":
            os._exit(7)
        if what == "hang":
            child = subprocess.Popen(["sleep", "600"])
            stray = subprocess.Popen(["sleep", "600"], start_new_session=True)
            print("children", child.pid, stray.pid)
            time.sleep(600)
        if what == "tensor":
            import numpy
            return numpy.array([1.0])
        if what == "nan":
            return {"rewards": [float("nan")]}
        if what == "length":
            return {"rewards": [1.0] * (len(queries) + 1)}
        if what == "object":
            return {"rewards": [object()]}
        if what == "print":
            print("hello", "from the verifier")
            os.write(1, b"\\xff raw\\n")
            os.write(2, b"on stderr\\n")
        if what == "stdin":
            assert sys.stdin.read() == ""
        if what == "alarm":
            def ring(*_):
                raise TimeoutError("rang")
            signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            try:
                time.sleep(10)
            except TimeoutError:
                return {"rewards": 1.0}
        if what == "main":
            return {"rewards": float(threading.current_thread() is threading.main_thread())}
        if what == "calls":
            return {"rewards": calls}
        if what == "pid":
            return {"rewards": 0, "extra_logs": {"pid": os.getpid()}}
        if what == "threads":
            return {"rewards": float(os.environ["OMP_NUM_THREADS"])}
        if what == "secrets":
            return {"rewards": sum(name.startswith("QUARTET_") for name in os.environ)}
        return {"rewards": [len(query) for query in queries]}
"""


@pytest.mark.parametrize(
    ("what", "reason", "message"),
    [
        ("raise", "USER_EXCEPTION", "ValueError: no such answer at all (my_reward.py:"),
        ("exit", "USER_EXCEPTION", "SystemExit: 3"),
        ("die", "WORKER_DIED", "exit code 7"),
        ("tensor", "USER_EXCEPTION", "returned a ndarray, not a dict"),
        ("nan", "NOT_FINITE", "nan"),
        ("length", "WRONG_LENGTH", "2 value(s) for 1 item(s)"),
        ("object", "NOT_A_NUMBER", "<object>"),
    ],
)
async def test_a_failure_is_typed_and_the_others_go_on(write_reward_file, what, reason, message):
    async with serving(write_reward_file(BEHAVIOURS)) as (score, _):
        before, bad, after = await score(
            make_item("a"), make_item("b", label=what), make_item("c", label="threads")
        )
    assert isinstance(before, Reward)
    assert isinstance(bad, Failure)
    assert (bad.error_class, bad.reason) == ("DATA", reason)
    assert message in bad.message
    assert "\n" not in bad.message
    assert after == Reward(reward=1.0, score=1.0)


async def test_the_traceback_is_logged_with_the_sample(write_reward_file, caplog):
    async with serving(write_reward_file(BEHAVIOURS)) as (score, _):
        await score(make_item("sample-9", label="raise"))
    assert "[sample sample-9]" in caplog.text
    assert 'raise ValueError("no such answer' in caplog.text


async def test_a_hung_verifier_is_killed_with_its_children(write_reward_file, caplog):
    caplog.set_level(logging.INFO)
    path = write_reward_file(BEHAVIOURS)
    async with serving(path, time_limit=0.5) as (score, scorer):
        [pid] = scorer.worker_pids
        outcomes = await score(make_item("a", label="hang"), make_item("b"))
        assert (outcomes[0].error_class, outcomes[0].reason) == ("DATA", "TIME_LIMIT")
        assert isinstance(outcomes[1], Reward)
        await until(lambda: is_gone(pid))
        [line] = [r.getMessage() for r in caplog.records if "children" in r.getMessage()]
        for child in line.split()[-2:]:
            await until(lambda child=child: is_gone(int(child)))
        assert len(scorer.worker_pids) == 1
        assert scorer.worker_pids != [pid]


async def test_what_it_prints_goes_to_the_log(write_reward_file, caplog):
    caplog.set_level(logging.INFO)
    async with serving(write_reward_file(BEHAVIOURS)) as (score, _):
        [outcome] = await score(make_item(label="print"))
        assert isinstance(outcome, Reward)
        await until(lambda: "on stderr" in caplog.text)
    assert "hello from the verifier" in caplog.text
    assert "� raw" in caplog.text


@pytest.mark.parametrize(
    ("what", "reward"), [("alarm", 1.0), ("main", 1.0), ("threads", 1.0), ("stdin", 25.0)]
)
async def test_the_worker_is_a_plain_process(write_reward_file, what, reward):
    async with serving(write_reward_file(BEHAVIOURS)) as (score, _):
        assert await score(make_item(label=what)) == [Reward(reward=reward, score=reward)]


async def test_our_own_settings_are_not_passed_to_user_code(write_reward_file, monkeypatch):
    monkeypatch.setenv("QUARTET_RPC__TOKEN", "secret")
    async with serving(write_reward_file(BEHAVIOURS)) as (score, _):
        assert await score(make_item(label="secrets")) == [Reward(reward=0.0, score=0.0)]


async def test_workers_share_the_load(write_reward_file):
    text = """
        import os, time
        def reward_func(queries, prompts, labels, **kwargs):
            time.sleep(0.1)
            return {"rewards": 0, "extra_logs": {"pid": os.getpid()}}
    """
    async with serving(write_reward_file(text), num_workers=2) as (score, scorer):
        outcomes = await score(*(make_item(str(i)) for i in range(6)))
        assert {o.extra_logs["pid"] for o in outcomes} == set(scorer.worker_pids)


async def test_called_with_one_sample_unless_asked_otherwise(write_reward_file):
    text = """
        def reward_func(queries, prompts, labels, **kwargs):
            return {"rewards": [len(queries)] * len(queries)}
    """
    path = write_reward_file(text)
    items = [make_item(str(i)) for i in range(5)]
    async with serving(path) as (score, _):
        assert [o.reward for o in await score(*items)] == [1.0] * 5
    async with serving(path, batch_size=3) as (score, _):
        assert [o.reward for o in await score(*items)] == [3.0, 3.0, 3.0, 2.0, 2.0]


async def test_one_bad_sample_of_a_batch_fails_alone(write_reward_file):
    text = """
        def reward_func(queries, prompts, labels, **kwargs):
            if "bad" in labels:
                raise ValueError("bad")
            return {"rewards": [1.0] * len(queries)}
    """
    async with serving(write_reward_file(text), batch_size=4) as (score, _):
        outcomes = await score(*(make_item(str(i), label=x) for i, x in enumerate(["", "bad", ""])))
    assert [type(o) for o in outcomes] == [Reward, Failure, Reward]


async def test_async_functions_keep_their_loop(write_reward_file):
    text = """
        import asyncio
        lock, loops = asyncio.Lock(), set()
        async def reward_func(queries, prompts, labels, **kwargs):
            async with lock:
                loops.add(asyncio.get_running_loop())
                await asyncio.sleep(0)
            return {"rewards": len(loops)}
    """
    async with serving(write_reward_file(text)) as (score, _):
        assert [o.reward for o in await score(make_item("a"), make_item("b"))] == [1.0, 1.0]


async def test_labels_of_any_json_type_and_files_beside_it(write_reward_file):
    write_reward_file("FACTOR = 2", name="beside.py")
    text = """
        from beside import FACTOR
        def reward_func(queries, prompts, labels, **kwargs):
            return {"rewards": labels[0]["target"] * FACTOR}
    """
    async with serving(write_reward_file(text)) as (score, _):
        assert (await score(make_item(label={"target": 21})))[0].reward == 42.0


async def test_later_workers_run_the_same_code_as_the_first(write_reward_file):
    path = write_reward_file(BEHAVIOURS)
    source = path.read_text()
    async with serving(path) as (score, _):
        path.write_text("def reward_func(*_): return {'rewards': -1}")
        assert isinstance((await score(make_item(label="die")))[0], Failure)
        assert (await score(make_item(label="main")))[0].reward == 1.0
    again = FunctionScorer(write_reward_file(BEHAVIOURS))
    traits = await again.start()
    await again.stop()
    assert traits.digest == hashlib.sha256(source.encode()).hexdigest()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "defines no function reward_func"),
        ("reward_func = 3", "defines no function reward_func"),
        ("def reward_func(:", "does not parse: invalid syntax (line 1)"),
        ("import no_such_module", "No module named 'no_such_module' (my_reward.py:1"),
        ("import os; os._exit(5)", "ends its process when imported (exit code 5)"),
        ("raise SystemExit", "SystemExit"),
    ],
)
async def test_a_file_that_cannot_score_is_one_line_at_start(write_reward_file, text, message):
    scorer = FunctionScorer(write_reward_file(text))
    with pytest.raises(ConfigError) as caught:
        await scorer.start()
    await scorer.stop()
    assert message in str(caught.value)
    assert "my_reward.py" in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        await FunctionScorer(tmp_path / "nowhere.py").start()


async def test_a_worker_that_dies_while_idle_costs_nobody_a_sample(write_reward_file):
    async with serving(write_reward_file(BEHAVIOURS)) as (score, scorer):
        [pid] = scorer.worker_pids
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not scorer.worker_pids)
        assert (await score(make_item(label="main")))[0].reward == 1.0


async def test_children_of_a_worker_that_died_do_not_outlive_it(write_reward_file, caplog):
    caplog.set_level(logging.INFO)
    text = """
        import os, subprocess
        def reward_func(queries, prompts, labels, **kwargs):
            os.write(1, b"child %d\\n" % subprocess.Popen(["sleep", "600"]).pid)
            if os.fork() == 0:
                import time
                time.sleep(600)  # keeps every descriptor of the worker open
            os._exit(7)
    """
    async with serving(write_reward_file(text), time_limit=60) as (score, _):
        [outcome] = await score(make_item())
        assert outcome.reason == "WORKER_DIED"
        [line] = [r.getMessage() for r in caplog.records if "child" in r.getMessage()]
        await until(lambda: is_gone(int(line.split()[-1])))


async def test_user_code_may_wait_for_all_its_children(write_reward_file):
    text = """
        import os, subprocess
        def reward_func(queries, prompts, labels, **kwargs):
            child = subprocess.Popen(["true"])  # kept: a Popen that is collected may wait itself
            waited = 0
            try:
                while os.wait():
                    waited += 1
            except ChildProcessError:
                return {"rewards": waited}
    """
    async with serving(write_reward_file(text), time_limit=10) as (score, _):
        assert (await score(make_item()))[0].reward == 1.0


FORKS = """
    import json, os, stat, struct, sys

    if what_at_import == "fork":
        os.fork()

    def send(answer):
        for name in os.listdir("/proc/self/fd"):
            if os.path.exists(path := f"/proc/self/fd/{name}") and stat.S_ISSOCK(
                os.stat(path).st_mode
            ):
                data = json.dumps(answer).encode()
                os.write(int(name), struct.pack(">I", len(data)) + data)

    def reward_func(queries, prompts, labels, **kwargs):
        [what], number = labels, float(queries[0])
        if what == "forge":
            send({"answer": {"rewards": 99}})
        if what == "forge all":
            send({"id": 1, "pid": os.getppid(), "answer": {"rewards": 99}})
        if what == "no dict":
            send([1])
        status = 0
        if what in ("return", "raise", "exit"):
            child = os.fork()
            if child == 0:
                if what == "raise":
                    raise ValueError("in the child")
                if what == "exit":
                    sys.exit(5)
                return {"rewards": 99}
            if number % 2:  # the child comes first, or the worker does
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return {"rewards": number, "extra_logs": {"status": status}}
"""


@pytest.mark.parametrize(("what", "status"), [("return", 0), ("raise", 1), ("exit", 5)])
async def test_a_forked_child_answers_nothing(write_reward_file, what, status):
    path = write_reward_file(FORKS.replace("what_at_import", "''"))
    items = [make_item(f"s{i}", query=str(i), label=what) for i in range(8)]
    async with serving(path, num_workers=1) as (score, scorer):
        [pid] = scorer.worker_pids
        outcomes = await score(*items)
        assert scorer.worker_pids == [pid]
    assert [outcome.reward for outcome in outcomes] == list(range(8))
    assert [outcome.extra_logs["status"] for outcome in outcomes] == [0, status] * 4


async def test_a_child_forked_at_import_answers_nothing(write_reward_file):
    path = write_reward_file(FORKS.replace("what_at_import", "'fork'"))
    async with serving(path, num_workers=1) as (score, _):
        outcomes = await score(*(make_item(f"s{i}", query=str(i)) for i in range(8)))
    assert [outcome.reward for outcome in outcomes] == list(range(8))


@pytest.mark.parametrize("what", ["forge", "forge all", "no dict"])
async def test_an_answer_that_is_not_the_workers_own_is_no_reward(write_reward_file, what):
    path = write_reward_file(FORKS.replace("what_at_import", "''"))
    labels = ["", what, ""]
    async with serving(path, num_workers=1) as (score, _):
        before, bad, after = await score(
            *(make_item(f"s{i}", query=str(i), label=label) for i, label in enumerate(labels))
        )
    assert (before.reward, after.reward) == (0, 2)
    assert isinstance(bad, Failure)
    assert (bad.error_class, bad.reason) == ("DATA", "WORKER_DIED")


async def test_a_cancelled_call_takes_its_worker_along(write_reward_file):
    async with serving(write_reward_file(BEHAVIOURS), time_limit=60) as (score, scorer):
        [pid] = scorer.worker_pids
        [job] = await scorer.prepare([make_item(label="hang")], "")
        call = asyncio.create_task(scorer.score([job]))
        await until(lambda: descendants(pid))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert is_gone(pid)
        assert (await score(make_item(label="main")))[0].reward == 1.0


async def test_worker_processes_have_their_own_group(write_reward_file):
    async with serving(write_reward_file(BEHAVIOURS)) as (_, scorer):
        [pid] = scorer.worker_pids
        assert os.getpgid(pid) == pid != os.getpgrp()
