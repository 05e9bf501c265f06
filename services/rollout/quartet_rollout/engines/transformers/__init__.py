"""The embedded engine: any HF causal language model made of attention, on CPU or one GPU.

model.py     one forward pass: whole sequences, or one token a row
cache.py     keys and values of rows that come and go
sampler.py   from logits to tokens
sequence.py  one sample
batch.py     a running batch and its queue
loop.py      which batch steps next, and the thread that owns it all
engine.py    the Engine that the room sees
"""

from quartet_rollout.engines.transformers.engine import open_engine

__all__ = ["open_engine"]
