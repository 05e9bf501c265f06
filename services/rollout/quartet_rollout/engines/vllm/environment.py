"""What vLLM reads from the environment. To be set before vLLM is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping

EVERYWHERE: Mapping[str, str] = {
    # No reports to vLLM's authors about what runs here.
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # A forked process inherits locks of gRPC and of torch in whatever state they are.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}

ON_CPU: Mapping[str, str] = {
    # Helpers of the sampler are compiled at their first use otherwise: up to half a minute of the
    # first request, and a C++ compiler must be there.
    "TORCH_COMPILE_DISABLE": "1",
    # Workers keep OMP_NUM_THREADS, and the system chooses their cores. By itself vLLM binds each
    # worker to the first cores of the machine: several engines then share one core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # One worker lives in the process of the engine's core. As a process of its own it would be one
    # more that imports torch, and the two would wait for each other by spinning.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def prepare(*, has_gpu: bool) -> None:
    """Set what is not set: whoever starts the service may know better."""
    for name, value in {**EVERYWHERE, **({} if has_gpu else ON_CPU)}.items():
        os.environ.setdefault(name, value)
