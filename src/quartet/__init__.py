"""Quartet: RLHF training as four gRPC services. This package is the floor they share.

Nothing here imports torch when it is imported, so the trainer, the command line and a reward
server made of rules run without it.
"""

__version__ = "0.1.0"
