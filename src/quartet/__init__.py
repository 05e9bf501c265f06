"""Quartet: RLHF training as four gRPC services. This package is the floor they share.

Nothing here imports torch when it is imported, so the trainer, the command line and a reward
server made of rules run without it.
"""

import os

# Before anything imports gRPC, whose core reads it once and then tells standard error of every
# connection that a peer closes. Its errors reach us as exceptions; a user who wants the rest sets
# the variable.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__version__ = "0.1.0"
