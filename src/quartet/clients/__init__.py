"""Typed, asynchronous clients of the four services. They speak quartet.types only.

One client talks to one address; `ReplicaPool` spreads calls over several. Every failure is one of
quartet.errors and names the server.
"""

from quartet.clients.base import Client
from quartet.clients.learner import LearnerClient
from quartet.clients.pool import ReplicaPool
from quartet.clients.ref import RefClient
from quartet.clients.reward import RewardClient
from quartet.clients.rollout import RolloutClient

__all__ = [
    "Client",
    "LearnerClient",
    "RefClient",
    "ReplicaPool",
    "RewardClient",
    "RolloutClient",
]
