"""Every Prometheus metric that Quartet's processes show, declared once.

Rooms import these objects and count; nothing else creates metrics. Names follow Prometheus
practice: prefix `quartet_`, base units, `_total` on counters. Labels have few values: never a
request id or a sample. They live in a registry of their own, so that libraries' metrics do not
leak in. To add one: declare it here, then use it.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)

from quartet.errors import ConfigError

# A second series per counter that nobody reads.
disable_created_metrics()

REGISTRY = CollectorRegistry()
"""The registry that the exporter shows."""

ProcessCollector(registry=REGISTRY)

_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)
"""Bucket borders in seconds: from a health check to a long optimizer step."""

# Calls, as servers see them.
RPC_STARTED = Counter(
    "quartet_rpc_started_calls",
    "Calls that arrived.",
    ["service", "method"],
    registry=REGISTRY,
)
RPC_DURATION = Histogram(
    "quartet_rpc_call_duration_seconds",
    "Time from a call's arrival to its end, by the status it ended with.",
    ["service", "method", "code"],
    registry=REGISTRY,
    buckets=_SECONDS,
)
RPC_IN_FLIGHT = Gauge(
    "quartet_rpc_in_flight_calls",
    "Calls being worked on.",
    ["service", "method"],
    registry=REGISTRY,
)
RPC_CLIENT_RETRIES = Counter(
    "quartet_rpc_client_retries",
    "Calls sent again by a client, to this or another replica.",
    ["service", "method"],
    registry=REGISTRY,
)

# Work.
GENERATED_TOKENS = Counter("quartet_rollout_generated_tokens", "Tokens sampled.", registry=REGISTRY)
PROMPT_TOKENS = Counter(
    "quartet_rollout_prompt_tokens",
    "Tokens of prompts, by where their keys and values came from: computed, or cache.",
    ["source"],
    registry=REGISTRY,
)
COMPLETIONS_IN_FLIGHT = Gauge(
    "quartet_rollout_completions_in_flight",
    "Completions running or waiting for a place in the engine.",
    registry=REGISTRY,
)
SCORED_SAMPLES = Counter(
    "quartet_reward_scored_samples",
    "Samples scored, by outcome: reward, or the class of the failure.",
    ["outcome"],
    registry=REGISTRY,
)
FAILED_SAMPLES = Counter(
    "quartet_reward_failed_samples",
    "Samples that could not be scored, by reason (TIME_LIMIT, NOT_FINITE, ...).",
    ["reason"],
    registry=REGISTRY,
)
CUT_INPUTS = Counter(
    "quartet_reward_cut_inputs",
    "Inputs longer than the reward model takes, cut on the right.",
    registry=REGISTRY,
)
REF_TOKENS = Counter(
    "quartet_ref_evaluated_tokens",
    "Tokens whose log-probability the reference model computed.",
    registry=REGISTRY,
)
TRAINED_TOKENS = Counter(
    "quartet_learner_trained_tokens",
    "Tokens under the action mask of applied optimizer steps.",
    registry=REGISTRY,
)
OPTIMIZER_STEPS = Counter(
    "quartet_learner_optimizer_steps",
    "Optimizer steps, by whether they were applied (true, false).",
    ["applied"],
    registry=REGISTRY,
)
STEP_DURATION = Histogram(
    "quartet_learner_step_duration_seconds",
    "Time of one optimizer step.",
    registry=REGISTRY,
    buckets=_SECONDS,
)
PUSH_DURATION = Histogram(
    "quartet_weights_push_duration_seconds",
    "Time of one weight push, by phase: prepare, transfer, commit; and what the sender did in it, "
    "side by side: gather, pack, digest, broadcast.",
    ["phase"],
    registry=REGISTRY,
    buckets=_SECONDS,
)
PUSHED_BYTES = Counter(
    "quartet_weights_pushed_bytes", "Bytes broadcast in weight pushes.", registry=REGISTRY
)

# State.
POLICY_VERSION = Gauge(
    "quartet_policy_version",
    "Version of the weights that serve (rollout), or were pushed last (learner, trainer).",
    registry=REGISTRY,
)
QUEUE_DEPTH = Gauge(
    "quartet_queue_depth",
    "Things that wait, by queue.",
    ["queue"],
    registry=REGISTRY,
)


def start_exporter(port: int | None, host: str = "127.0.0.1") -> str | None:
    """Serve REGISTRY over HTTP from a thread of its own.

    Args:
        port: TCP port; None serves nothing, 0 takes any free one.
        host: address to listen on.

    Returns:
        "host:port" as bound, or None when metrics are off.

    Raises:
        ConfigError: the port cannot be bound.
    """
    if port is None:
        return None
    try:
        server, _ = start_http_server(port, host, REGISTRY)
    except OSError as error:
        raise ConfigError(
            f"metrics.port {port} on {host} cannot be bound: {error.strerror}",
            field="metrics.port",
            value=str(port),
            remedy="give another port, or 0 for any free one",
        ) from error
    return f"{host}:{server.server_port}"
