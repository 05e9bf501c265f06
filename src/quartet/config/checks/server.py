"""The server that the engine openai asks."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from quartet.config.derive import num_engines, split_list
from quartet.config.methods import PpoConfig
from quartet.config.sampling import EngineName, ServerFields
from quartet.config.tree import wrong
from quartet.errors import ConfigError

_WORDS = ("auto", "vllm", "none")


def check_served_run(config: PpoConfig) -> Iterator[ConfigError]:
    """A run whose engines ask servers, and what such engines cannot do for it."""
    if config.rollout.address:
        return
    engine = config.rollout.engine
    yield from check_server(config.rollout, engine, count=num_engines(config))
    if engine != "openai":
        return
    if config.push.backend not in ("auto", "file"):
        yield wrong(
            "push.backend",
            config.push.backend,
            "the engine openai takes weights as files",
            "leave the flag away",
        )
    if config.rollout.server_weights == "none":
        yield wrong(
            "rollout.server_weights",
            "none",
            "training needs a server whose weights can change",
            "give vllm, or the URL of a hook",
        )
    for name, is_set in (
        ("train.full_determinism_enable", config.train.full_determinism_enable),
        ("vllm.enable_sleep", config.vllm.enable_sleep),
    ):
        if is_set:
            yield wrong(
                name,
                None,
                "a server that others started cannot promise it",
                "leave the flag away, or take another --rollout.engine",
            )


def check_server(rollout: ServerFields, engine: EngineName, *, count: int) -> Iterator[ConfigError]:
    """Addresses, and flags that only one engine has.

    Args:
        rollout: The section of flags.
        engine: Which engine is asked for.
        count: How many of them; each has a server of its own.
    """
    urls = split_list(rollout.server_url)
    if engine != "openai":
        if rollout.server_url is not None:
            yield wrong(
                "rollout.server_url",
                rollout.server_url,
                "only the engine openai asks a server",
                "add --rollout.engine openai, or leave the flag away",
            )
        return
    if len(urls) != count:
        yield wrong(
            "rollout.server_url",
            rollout.server_url,
            f"the engine openai needs {_servers(count)}, and there "
            f"{'is' if len(urls) == 1 else 'are'} {len(urls)}",
            "give http://host:port for each engine, with commas",
        )
    for url in urls:
        if not is_http(url):
            yield wrong(
                "rollout.server_url", url, "is no address of a server", "give http://host:port"
            )
    if rollout.server_weights not in _WORDS and not is_http(rollout.server_weights):
        yield wrong(
            "rollout.server_weights",
            rollout.server_weights,
            "is neither a word that is known nor a URL",
            f"give {', '.join(_WORDS)}, or http://host:port/path",
        )


def is_http(url: str) -> bool:
    """True for a URL that can be asked."""
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _servers(count: int) -> str:
    return "a server" if count == 1 else f"{count} servers"
