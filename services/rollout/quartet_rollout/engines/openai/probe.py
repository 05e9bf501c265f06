"""What a server can, found out by asking it when the engine opens.

A server that returns no token ids, or other log-probabilities than it is said to, would train a
policy on wrong numbers without an error. So each promise of the engine is put to the test once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from quartet.errors import ConfigError, InfraError, RequestError
from quartet.types import LogprobKind, SamplingParams
from quartet_rollout.engines.openai.http import Server
from quartet_rollout.engines.openai.sample import Reading, ServedSample

log = logging.getLogger(__name__)

NUM_TOKENS = 8
_PROMPT = (1, 2, 3, 5, 8, 13)
_ONLY_THE_BEST = 1e-6
"""A top-p that leaves one token."""
_ALMOST_NONE = 1e-3
"""Log-probabilities this close to one another, or to 0, are equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerTraits:
    """A server, as it answered."""

    model: str
    """The name of its model."""
    max_length: int | None
    """Most tokens of prompt and completion together, when it says so."""
    has_top_k: bool
    """It heeds top_k, which is not among OpenAI's parameters."""


async def probe(
    server: Server, *, model: str | None, kind: LogprobKind, vocabulary: int
) -> ServerTraits:
    """Ask a server what it is, and try what the engine relies on.

    Args:
        server: To ask.
        model: The model's name there; None takes the only one.
        kind: Log-probabilities that it is said to return.
        vocabulary: Tokens of the model.

    Raises:
        ConfigError: It lacks something; the message says what.
        InfraError: It is not there.
    """
    name, max_length = await _model_of(server, model)
    ask = _Asking(server, name, kind, vocabulary)
    greedy = await ask.greedy()
    await ask.check_stop_tokens(greedy)
    has_top_k = await ask.check_kind(greedy)
    await ask.check_seeds()
    return ServerTraits(model=name, max_length=max_length, has_top_k=has_top_k)


class _Asking:
    """Short completions of one prompt."""

    def __init__(self, server: Server, model: str, kind: LogprobKind, vocabulary: int) -> None:
        self._server = server
        self._model = model
        self._kind = kind
        self._prompt = tuple(min(token, vocabulary - 1) for token in _PROMPT)

    async def greedy(self) -> list[int]:
        """The likeliest completion."""
        return (await self._ask(temperature=0.0)).token_ids

    async def check_stop_tokens(self, greedy: list[int]) -> None:
        """A stop token ends a completion, and is its last token."""
        stop = greedy[NUM_TOKENS // 2]
        wanted = greedy[: greedy.index(stop) + 1]
        got = await self._ask(temperature=0.0, stop_token_ids=(stop,))
        if got.token_ids != wanted or got.finish_reason != "stop":
            raise self._lacks(
                f"does not end a completion with a stop token: {got.token_ids} "
                f"({got.finish_reason}) where {wanted} (stop) was expected",
                "use a server that knows stop_token_ids and returns them",
            )

    async def check_kind(self, greedy: list[int]) -> bool:
        """Log-probabilities are of the kind that is declared. Returns whether it heeds top_k."""
        # Where one token is kept, a processed log-probability is 0, and a raw one is the model's.
        warm = await self._ask(temperature=1.0, top_p=_ONLY_THE_BEST)
        hot = await self._ask(temperature=2.0, top_p=_ONLY_THE_BEST)
        cut = await self._ask(temperature=2.0, top_k=1)
        if warm.token_ids != greedy or hot.token_ids != greedy:
            raise self._lacks("does not heed top_p or temperature", "use another server")
        free = (await self._ask(temperature=1.0, seed=1)).logprobs
        if max(map(abs, free)) < _ALMOST_NONE:
            log.warning("the model is certain of every token: log-probabilities are taken as told")
        elif (found := _kind_of(warm.logprobs, hot.logprobs)) is not self._kind:
            raise ConfigError(
                f"the server at {self._server.url} returns "
                f"{found or 'neither raw nor processed'} log-probabilities, and "
                f"rollout.server_logprobs says {self._kind}",
                reason="LOGPROB_KIND_UNSUPPORTED",
                field="rollout.server_logprobs",
                value=str(self._kind),
                remedy=f"start vLLM's server with --logprobs-mode {self._kind}_logprobs"
                + (f", or give --rollout.server_logprobs {found}" if found else ""),
            )
        return cut.token_ids == greedy

    async def check_seeds(self) -> None:
        """The same seed gives the same tokens; only a run that is to be repeated needs it."""
        first, second = [await self._ask(temperature=1.0, seed=7) for _ in range(2)]
        if first.token_ids != second.token_ids:
            log.warning(
                "the server at %s draws other tokens from the same seed: samples cannot be "
                "repeated",
                self._server.url,
            )

    async def _ask(self, *, seed: int = 1, **sampling: Any) -> Reading:
        sampling = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": 0, **sampling}
        sample = ServedSample(
            sample_id="probe",
            prompt=self._prompt,
            seed=seed,
            sampling=SamplingParams(ignore_eos=True, **sampling),
            kind=self._kind,
            stop_ids=frozenset(sampling.get("stop_token_ids", ())),
            max_tokens=NUM_TOKENS,
        )
        reading = Reading()
        try:
            await self._server.stream("/v1/completions", sample.body(self._model), reading.take)
        except ConfigError:
            raise
        except RequestError as error:
            raise self._lacks(f"refuses a completion: {error.message}", "see its log") from error
        except InfraError as error:
            if error.info.reason != "ANSWER_MALFORMED":
                raise
            raise self._lacks(error.message, error.info.remedy) from error
        if not sampling.get("stop_token_ids") and len(reading.token_ids) != NUM_TOKENS:
            raise self._lacks(
                f"made {len(reading.token_ids)} tokens where {NUM_TOKENS} were asked for with "
                "ignore_eos",
                "use a server that knows return_token_ids and ignore_eos, as vLLM's does",
            )
        return reading

    def _lacks(self, what: str, remedy: str) -> ConfigError:
        return ConfigError(
            f"the server at {self._server.url} cannot be a rollout engine: it {what}",
            reason="SERVER_LACKS",
            field="rollout.server_url",
            value=self._server.url,
            remedy=remedy,
        )


def _kind_of(warm: list[float], hot: list[float]) -> LogprobKind | None:
    """Which kind it is, from tokens sampled where all but the best are cut away.

    Args:
        warm: Log-probabilities at temperature 1.
        hot: Of the same tokens at temperature 2.
    """
    if max(map(abs, (*warm, *hot))) < _ALMOST_NONE:
        return LogprobKind.PROCESSED
    same = all(abs(a - b) < _ALMOST_NONE for a, b in zip(warm, hot, strict=True))
    return LogprobKind.RAW if same else None


async def _model_of(server: Server, wanted: str | None) -> tuple[str, int | None]:
    """Name and longest sequence of the model to ask for."""
    try:
        answer = await server.get("/v1/models")
    except ConfigError:
        raise
    except RequestError as error:
        raise ConfigError(
            f"the server at {server.url} does not say which models it has: {error.message}",
            field="rollout.server_url",
            value=server.url,
            remedy="give the address of a server of OpenAI's API, http://host:port",
        ) from error
    cards = {str(card["id"]): card for card in (answer or {}).get("data") or []}
    name = wanted if wanted or len(cards) != 1 else next(iter(cards))
    if name not in cards:
        raise ConfigError(
            f"the server at {server.url} has {', '.join(cards) or 'no model'}"
            + (f", and not {wanted}" if wanted else ""),
            field="rollout.server_model",
            value=wanted or "",
            remedy="name one of its models, --rollout.server_model",
        )
    return name, cards[name].get("max_model_len")
