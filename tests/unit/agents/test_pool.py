"""Agents in their processes: what they may do, and what becomes of those that do worse."""

import asyncio
import logging
import os
from pathlib import Path

import pytest

from quartet.agents.episode import Script
from quartet.errors import ConfigError, DataError, InfraError
from quartet.workers import descendants

GUESS_NUMBER = Path(__file__).parents[3] / "examples" / "agents" / "guess_number.py"
SINGLE_TURN = GUESS_NUMBER.with_name("single_turn.py")

# A free-form executor without `images`; the label says what it does.
BEHAVIOURS = """
    import asyncio, os, subprocess, sys, threading, time
    from pathlib import Path
    from quartet.agents import AgentExecutorBase

    class AgentExecutor(AgentExecutorBase):
        async def execute(
            self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine
        ):
            tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
            what, _, where = label.partition(" ")
            if what == "raise":
                raise ValueError("no such luck")
            if what == "exit":
                sys.exit(3)
            if what == "die":
                os._exit(3)
            if what == "hang":
                await asyncio.sleep(1000)
            if what == "deaf":
                while True:
                    try:
                        await asyncio.sleep(1000)
                    except asyncio.CancelledError:
                        continue
            if what == "block":
                child = subprocess.Popen(["sleep", "1000"])
                Path(where).write_text(str(child.pid))
                time.sleep(1000)
            if what == "images":
                await llm_engine.generate(tokens, sampling_params, {"image": 1})
            if what == "nodict":
                return tokens
            if what == "fork" and os.fork() == 0:
                return {}
            if what == "other loop":
                made = []
                def run():
                    made.append(asyncio.run(llm_engine.generate(tokens, sampling_params)))
                thread = threading.Thread(target=run)
                thread.start()
                while thread.is_alive():
                    await asyncio.sleep(0.01)
                output = made[0]
            else:
                output = await llm_engine.generate(tokens, sampling_params)
            said = output.outputs[0].token_ids
            return {
                "observation_tokens": tokens + said,
                "action_ranges": [(len(tokens), len(tokens) + len(said))],
                "rollout_log_probs": None,
                "truncated": output.outputs[0].finish_reason == "length",
                "reward": 1.0,
                "extra_logs": {"sees_secret": "QUARTET_TOKEN" in os.environ},
            }
"""


def is_gone(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


async def outcome(coroutine):
    """The play, or the reason why there is none."""
    try:
        return await coroutine
    except DataError as error:
        return error.info.reason


async def test_a_game_of_two_turns(pool_of, policy, play, tokenizer):
    async with pool_of(GUESS_NUMBER) as pool:
        said = await play(pool, policy("3", "7"))
    text = tokenizer.decode(said.token_ids)
    eos = tokenizer.eos_token
    assert text == f"guess 3{eos}\nIt is more.\nGuess: 7{eos}"
    assert tokenizer.decode(said.token_ids[said.action_mask]) == f"3{eos}7{eos}"
    assert not said.rollout_logprobs[~said.action_mask].any()
    assert (said.rollout_logprobs[said.action_mask] < 0).all()
    assert (said.reward.reward, said.reward.score) == (0.5, 1.0)
    assert said.reward.extra_logs == {"said_number": 1, "turns": 2, "num_turns": 2}


async def test_many_episodes_share_a_worker_and_none_spoils_another(
    pool_of, write_agent, policy, play, make_episode, monkeypatch, caplog
):
    monkeypatch.setenv("QUARTET_TOKEN", "secret")
    labels = {
        "fine": None,
        "raise": "ERROR",
        "exit": "ERROR",
        "hang": "TIMEOUT",
        "images": "ERROR",
        "nodict": "ERROR",
        "fork": None,
        "other loop": None,
    }
    async with pool_of(write_agent(BEHAVIOURS), time_limit=5) as pool:
        [pid] = pool.worker_pids
        said = await asyncio.gather(
            *(
                outcome(play(pool, policy("yes"), make_episode(label, label=label)))
                for label in labels
            )
        )
        assert pool.worker_pids == [pid]  # one worker did all of it, and lives
    for (label, reason), found in zip(labels.items(), said, strict=True):
        if reason is None:
            assert found.reward.reward == 1.0, label
            assert found.reward.extra_logs["sees_secret"] == 0.0
        else:
            assert found == reason, label


async def test_errors_say_where_in_the_users_file(pool_of, write_agent, policy, play, make_episode):
    async with pool_of(write_agent(BEHAVIOURS)) as pool:
        with pytest.raises(DataError) as caught:
            await play(pool, policy(), make_episode(label="raise"))
        assert "ValueError: no such luck (my_agent.py:13, in execute)" in caught.value.message
        assert "Traceback" in caught.value.__notes__[0]
        # The policy is somebody else's: what it fails with is no fault of the agent's.
        broken = policy()
        broken.error = InfraError("the engine is gone")
        with pytest.raises(InfraError, match="the engine is gone"):
            await play(pool, broken)
        refusing = policy()
        refusing.error = DataError("the prompt is refused", reason="PROMPT_TOO_LONG")
        with pytest.raises(DataError, match="RuntimeError: the prompt is refused"):
            await play(pool, refusing)


async def test_waiting_for_the_policy_costs_no_time(pool_of, write_agent, policy, play):
    slow = policy()
    slow.gate = asyncio.Event()
    async with pool_of(write_agent(BEHAVIOURS), time_limit=1) as pool:
        call = asyncio.create_task(play(pool, slow))
        await asyncio.wait({call}, timeout=1.5)
        assert not call.done()
        slow.gate.set()
        assert (await call).reward.reward == 1.0


async def test_who_blocks_a_worker_is_killed_with_its_children_and_the_others_play_again(
    pool_of, write_agent, policy, make_episode, tmp_path, caplog
):
    caplog.set_level(logging.INFO, "quartet.agents")
    mark = tmp_path / "child"
    waiting = policy("yes")
    waiting.gate = asyncio.Event()
    attempts = []

    async with pool_of(write_agent(BEHAVIOURS), time_limit=1.0) as pool:
        [pid] = pool.worker_pids

        async def innocent():
            script = Script()
            answer = waiting.answer_of(script)

            def attempt(number):
                attempts.append(number)
                if number == 1:
                    waiting.gate.set()
                return answer(number)

            return await pool.play(make_episode("good"), script, attempt)

        good = asyncio.create_task(innocent())
        script = Script()
        blocker = make_episode("bad", label=f"block {mark}")
        with pytest.raises(DataError) as caught:
            await pool.play(blocker, script, policy().answer_of(script))
        assert caught.value.info.reason == "TIMEOUT"
        assert is_gone(pid)
        assert is_gone(int(mark.read_text()))
        assert (await good).reward.reward == 1.0
        assert attempts == [0, 1]
        # One that ends its process is to blame itself; the pool goes on with a new worker.
        script = Script()
        with pytest.raises(DataError) as caught:
            await pool.play(make_episode(label="die"), script, policy().answer_of(script))
        assert caught.value.info.reason == "WORKER_DIED"
        [last] = [*pool.worker_pids, None][:1]
    assert last is None or is_gone(last)
    assert not [child for child in descendants(os.getpid()) if not is_gone(child)]


async def test_an_episode_that_ignores_its_end_is_ended(
    pool_of, write_agent, policy, play, make_episode
):
    async with pool_of(write_agent(BEHAVIOURS), time_limit=0.2) as pool:
        [pid] = pool.worker_pids
        assert await outcome(play(pool, policy(), make_episode(label="deaf"))) == "TIMEOUT"
        assert is_gone(pid)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "my_agent.py: TypeError: defines no class AgentExecutor"),
        ("class AgentExecutor: pass", "AgentExecutor is no subclass of quartet.agents"),
        ("import no_such_module", "No module named 'no_such_module' (my_agent.py:1, in <module>)"),
        ("import os; os._exit(5)", "ends its process when imported (exit code 5)"),
        (
            """
            from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
            class AgentInstance(AgentInstanceBase):
                async def __init__(self): pass
                async def reset(self, states): pass
                async def step(self, states): pass
            class AgentExecutor(MultiTurnAgentExecutor):
                def __init__(self): super().__init__(AgentInstance)
            """,
            "AgentInstance.__init__ is async (my_agent.py:4)",
        ),
    ],
)
async def test_a_file_that_is_no_agent_is_one_line_at_the_start(
    pool_of, write_agent, text, message
):
    with pytest.raises(ConfigError) as caught:
        async with pool_of(write_agent(text)):
            pytest.fail("it started")
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_a_file_that_is_missing_or_does_not_parse(pool_of, write_agent, tmp_path):
    with pytest.raises(ConfigError, match="cannot read the agent file"):
        pool_of(tmp_path / "missing.py")
    with pytest.raises(ConfigError, match=r"does not parse: .* \(line 1\)"):
        pool_of(write_agent("def"))


async def test_the_example_of_one_turn(pool_of, policy, play):
    async with pool_of(SINGLE_TURN) as pool:
        right = await play(pool, policy("it is 7"))
        wrong = await play(pool, policy("it is 8"))
    assert (right.reward.reward, wrong.reward.reward) == (1.0, 0.0)
    assert right.reward.extra_logs["num_turns"] == 1
