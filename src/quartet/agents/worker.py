"""The process in which a user's agent file runs: `python -m quartet.agents.worker FILE FD PAGE`.

One `AgentExecutor` makes many samples at the same time, in one event loop in the main thread. Each
episode has a number. Frames (`quartet.workers.frames`) that come from here carry the "pid" of the
process that wrote them.

    <- {"source": str, "tokenizer": {...}}             the file, and how to load the tokenizer
    -> {"ready": true}  or  {"failed": str, "traceback": str}
    <- {"episode": n, "prompt", "label", "sampling": {...}, "max_length"}
    -> {"episode": n, "call": k, "generate": {"prompt_token_ids": [..], "max_tokens", ...}}
    <- {"episode": n, "call": k, "completion": {...}}  or  {..., "refused": str}
    <- {"cancel": n}                                   its time is over
    -> {"episode": n, "result": {...}}  or  {"episode": n, "raised": str, "traceback": str}
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from quartet.agents import aliases
from quartet.agents.executors import AgentExecutorBase, MultiTurnAgentExecutor
from quartet.agents.held import Page, held
from quartet.agents.outputs import RequestOutput, SamplingParams, as_wire, output_of
from quartet.workers.child import end_if_forked, load_module, open_channel, plain, summary
from quartet.workers.frames import pack_frame, read_frame, receive_frame, write_frame


def main(arguments: list[str]) -> int:
    """Make samples until the trainer hangs up. Returns the exit code."""
    path, channel, page = Path(arguments[0]), open_channel(int(arguments[1])), int(arguments[2])
    hello = read_frame(channel)
    if hello is None:
        return 0
    pid = os.getpid()
    try:
        executor = load_executor(path, hello["source"])
        tokenizer = _load_tokenizer(**hello["tokenizer"])
    except BaseException as error:
        end_if_forked(pid, error)
        failed = {"failed": summary(error, path), "traceback": traceback.format_exc()}
        write_frame(channel, {"pid": os.getpid(), **failed})
        return 1
    end_if_forked(pid)
    write_frame(channel, {"pid": pid, "ready": True})
    asyncio.run(_Stage(path, executor, tokenizer, Page(page)).serve(channel))
    return 0


def load_executor(path: Path, source: str) -> AgentExecutorBase:
    """Run the file as a module and make its `AgentExecutor`.

    Raises:
        TypeError: there is no such class, it is of another kind, or it cannot be made.
        BaseException: whatever the file raises while it is imported.
    """
    aliases.install()
    made_by = getattr(load_module(path, source), "AgentExecutor", None)
    if not isinstance(made_by, type):
        raise TypeError("defines no class AgentExecutor")
    if not issubclass(made_by, AgentExecutorBase):
        raise TypeError(
            "AgentExecutor is no subclass of quartet.agents.AgentExecutorBase, "
            "MultiTurnAgentExecutor or SingleTurnAgentExecutor"
        )
    _no_async_init(made_by, path)
    executor = made_by()
    if isinstance(executor, MultiTurnAgentExecutor):
        instance = executor.agent_instance_cls
        for name in ("reset", "step"):
            if not callable(getattr(instance, name, None)):
                raise TypeError(f"{instance.__name__} has no method {name}")
        _no_async_init(instance, path)
    return executor


def _no_async_init(made_by: Any, path: Path) -> None:
    begin = getattr(made_by, "__init__", None)
    if inspect.iscoroutinefunction(begin):
        place = f"{path.name}:{begin.__code__.co_firstlineno}"
        raise TypeError(
            f"{made_by.__name__}.__init__ is async ({place}): nothing can await it; "
            "make it a plain def, and do what needs await in reset"
        )


def _load_tokenizer(name: str, use_fast: bool, trust_remote_code: bool, fingerprint: str) -> Any:
    from quartet.data.tokenizer import fingerprint_of, load_tokenizer

    tokenizer = load_tokenizer(name, use_fast=use_fast, trust_remote_code=trust_remote_code)
    if fingerprint and fingerprint_of(tokenizer) != fingerprint:
        raise ValueError(f"the tokenizer in {name} is not the one that the trainer read")
    return tokenizer


class _Stage:
    """Runs episodes, and passes their questions on to the trainer."""

    def __init__(self, path: Path, executor: AgentExecutorBase, tokenizer: Any, page: Page) -> None:
        self._path = path
        self._executor = executor
        self.tokenizer = tokenizer
        self._page = page
        self._episodes: dict[int, asyncio.Task[None]] = {}
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._takes_images = "images" in inspect.signature(executor.execute).parameters

    async def serve(self, channel: Any) -> None:
        """Take frames until there are no more."""
        self.loop = asyncio.get_running_loop()
        reader, self._writer = await asyncio.open_connection(sock=channel)
        try:
            while True:
                self._take(await receive_frame(reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the trainer is gone: the guard ends this process and all it started

    def _take(self, frame: dict[str, Any]) -> None:
        if "cancel" in frame:
            episode = self._episodes.get(frame["cancel"])
            if episode is not None:
                episode.cancel()
        elif "call" in frame:
            waiting = self._calls.get(frame["call"])
            if waiting is not None and not waiting.done():
                waiting.set_result(frame)
        else:
            number = frame["episode"]
            self._episodes[number] = asyncio.create_task(self._play(number, frame))

    async def _play(self, number: int, frame: dict[str, Any]) -> None:
        """Make one sample, and say what became of it, whatever that is."""
        try:
            await asyncio.sleep(0)  # a cancellation before the start is one of the episode
            result = await held(self._page, number, self._execute(number, frame))
            if not isinstance(result, dict):
                raise TypeError(f"execute returned a {type(result).__name__}, not a dict")
            answer = {"result": _told(result)}
        except BaseException as error:  # SystemExit of a user's code must not end the worker
            answer = {"raised": summary(error, self._path), "traceback": traceback.format_exc()}
        finally:
            self._episodes.pop(number, None)
        self.send({"episode": number, **answer})

    async def _execute(self, number: int, frame: dict[str, Any]) -> Any:
        sampling = SamplingParams(**frame["sampling"])
        more = {"images": None} if self._takes_images else {}
        return await self._executor.execute(
            prompt=frame["prompt"],
            label=frame["label"],
            sampling_params=sampling.clone(),
            max_length=frame["max_length"],
            hf_tokenizer=self.tokenizer,
            llm_engine=_Engine(self, number, sampling),
            **more,
        )

    async def ask(self, number: int, wanted: dict[str, Any]) -> dict[str, Any]:
        """Have the trainer complete a prompt for an episode."""
        call = next(self._numbers)
        self._calls[call] = self.loop.create_future()
        try:
            self.send({"episode": number, "call": call, "generate": wanted})
            return await self._calls[call]
        finally:
            del self._calls[call]

    def send(self, frame: dict[str, Any]) -> None:
        """Send a frame; what waits to be sent is at most one frame an episode."""
        self._writer.write(pack_frame({"pid": os.getpid(), **frame}))


class _Engine:
    """`LlmEngine` of one episode."""

    def __init__(self, stage: _Stage, number: int, sampling: SamplingParams) -> None:
        self._stage = stage
        self._number = number
        self._sampling = sampling

    async def generate(
        self,
        prompt_token_ids: Any,
        sampling_params: Any = None,
        multi_modal_data: Any = None,
    ) -> RequestOutput:
        """Complete a prompt, also for code that runs in an event loop of its own."""
        if multi_modal_data:
            raise ValueError("multi_modal_data: models of images are not in this release")
        tokens = [int(token) for token in prompt_token_ids]
        wanted = {"prompt_token_ids": tokens, **as_wire(sampling_params, self._sampling)}
        asked = self._stage.ask(self._number, wanted)
        if asyncio.get_running_loop() is not self._stage.loop:
            asked = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, self._stage.loop))
        answer = await asked
        if "refused" in answer:
            raise RuntimeError(answer["refused"])
        return output_of(answer["completion"], tokens, tokenizer=self._stage.tokenizer)


def _told(result: dict[str, Any]) -> dict[str, Any]:
    """The part of a result that the trainer reads, as JSON values."""
    names = (
        *("observation_tokens", "action_ranges", "rollout_log_probs", "truncated"),
        *("reward", "scores", "extra_logs"),
    )
    return {name: plain(result.get(name)) for name in names}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
