"""Agents: user code that makes samples turn by turn, with rewards of its own (docs/agents.md).

What is exported here is what an agent's file is written with. It runs in worker processes
(`quartet.agents.worker`); the trainer's side is `quartet.agents.pool`.
"""

from quartet.agents.executors import (
    AgentExecutorBase,
    AgentInstanceBase,
    MultiTurnAgentExecutor,
    SingleTurnAgentExecutor,
)
from quartet.agents.outputs import CompletionOutput, Logprob, RequestOutput, SamplingParams

__all__ = [
    "AgentExecutorBase",
    "AgentInstanceBase",
    "CompletionOutput",
    "Logprob",
    "MultiTurnAgentExecutor",
    "RequestOutput",
    "SamplingParams",
    "SingleTurnAgentExecutor",
]
