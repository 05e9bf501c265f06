"""Processes for code that users write: reward files and agents.

Such code never runs in a trainer or a service. It hangs, crashes, forks and leaks in a process of
its own, which is ended with everything it started, and it sees none of Quartet's own settings.

`process` is the side that starts a worker, `child` the worker's side, `frames` what they exchange.
"""

from quartet.workers.frames import MAX_FRAME_BYTES, pack_frame, receive_frame
from quartet.workers.process import UserProcess, read_source, worker_environment
from quartet.workers.process_tree import descendants, kill_tree

__all__ = [
    "MAX_FRAME_BYTES",
    "UserProcess",
    "descendants",
    "kill_tree",
    "pack_frame",
    "read_source",
    "receive_frame",
    "worker_environment",
]
