"""Whose weights a replica serves, by what its completions say and by what they are."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Mapping
from contextlib import asynccontextmanager

import pytest
import torch

from quartet.clients import RolloutClient
from quartet.errors import QuartetError, StateError
from quartet.types import PromptGroup, ReplicaState, SamplingParams

PROMPTS = ((5, 6, 7, 8), tuple(range(20, 60)))
TOKENS = 12
LONG = 24
TOLERANCE = 1e-4
"""Largest distance of a served log-probability from the reference's."""
_numbers = itertools.count()


async def ask(client, *, tokens=TOKENS, at_least=None):
    """Completions of all prompts."""
    groups = [
        PromptGroup(group_id=str(i), prompt_token_ids=prompt, num_samples=1)
        for i, prompt in enumerate(PROMPTS)
    ]
    result = await client.generate(
        request_id=f"{client.address}-{next(_numbers)}",
        groups=groups,
        sampling=SamplingParams(temperature=1.0, max_new_tokens=tokens, ignore_eos=True),
        min_policy_version=at_least,
    )
    return [group.completions[0] for group in result.groups]


def check_numbers(made, models: Mapping[int, torch.nn.Module]) -> None:
    """Each log-probability is that of the version its span names.

    Args:
        made: Completions of all prompts, as often as they were asked for.
        models: The weights of each version that may be there.
    """
    by_version = defaultdict(list)
    for completions in made:
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            assert completion.failure is None, completion.failure
            spans = completion.versions
            assert [s.start for s in spans] == [0, *(s.end for s in spans[:-1])]
            assert spans[-1].end == len(completion.token_ids)
            for span in spans:
                by_version[span.policy_version].append((prompt, completion, span))
    for version, places in by_version.items():
        expected = logprobs_of(models[version], [(p, c.token_ids.tolist()) for p, c, _ in places])
        for (_, completion, span), numbers in zip(places, expected, strict=True):
            served = torch.from_numpy(completion.logprobs)
            distance = (served - numbers)[span.start : span.end].abs().max()
            assert distance < TOLERANCE, (completion.versions, span, distance)


def check_apart(completions, version: int, models: Mapping[int, torch.nn.Module]) -> None:
    """The numbers of one version could not be taken for those of another."""
    asked = [(p, c.token_ids.tolist()) for p, c in zip(PROMPTS, completions, strict=True)]
    for model in models.values():
        if model is not models[version]:
            for completion, numbers in zip(completions, logprobs_of(model, asked), strict=True):
                distance = (torch.from_numpy(completion.logprobs) - numbers).abs().max()
                assert distance > 100 * TOLERANCE, distance


def logprobs_of(model, asked):
    """Log-probabilities of the tokens after each prompt, [tokens] each; 16 at once."""
    found = []
    for some in (asked[i : i + 16] for i in range(0, len(asked), 16)):
        width = max(len(prompt) + len(tokens) for prompt, tokens in some)
        # Padded on the right: under a causal mask nobody sees it.
        rows = [[*prompt, *tokens] for prompt, tokens in some]
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
        with torch.no_grad():
            logprobs = model(ids).logits[:, :-1].log_softmax(-1)
        taken = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
        found += [
            taken[i, len(prompt) - 1 : len(prompt) - 1 + len(tokens)]
            for i, (prompt, tokens) in enumerate(some)
        ]
    return found


async def check_served(address, wanted, models) -> int:
    """A replica serves one of the wanted versions, whole; returns which."""
    async with RolloutClient(address) as client:
        info = await client.get_info()
        assert info.state is ReplicaState.SERVING, info.state
        assert info.policy_version in wanted, (info.policy_version, wanted)
        completions = await ask(client, at_least=info.policy_version)
        # A commit may be under way: then the next version comes in the middle.
        versions = {span.policy_version for c in completions for span in c.versions}
        assert info.policy_version <= min(versions) <= max(versions) <= max(wanted), versions
        assert versions <= wanted
        check_numbers([completions], models)
        if len(versions) == 1:
            check_apart(completions, *versions, models)
        with pytest.raises(StateError) as refusal:
            await ask(client, at_least=max(wanted) + 1)
        assert refusal.value.info.reason == "POLICY_VERSION_TOO_OLD"
    return info.policy_version


class Traffic:
    """Completions that are asked for without a pause while something goes wrong."""

    def __init__(self, addresses, at_least: int) -> None:
        self.at_least = at_least
        self.completions = []
        self.refusals = set()
        self._addresses = addresses
        self._is_over = False

    async def run(self, address: str) -> None:
        """Ask one replica until it is over."""
        async with RolloutClient(address, retry=False) as client:
            while not self._is_over:
                try:
                    made = await ask(client, tokens=LONG, at_least=self.at_least)
                except QuartetError as error:
                    self.refusals.add(error.info.reason or type(error).__name__)
                    await asyncio.sleep(0.05)
                else:
                    self.completions.append(made)
                    await asyncio.sleep(0.3)

    @asynccontextmanager
    async def flowing(self):
        """Ask for the time of the block; calls to a replica that stands still end with it."""
        tasks = [asyncio.ensure_future(self.run(address)) for address in self._addresses]
        try:
            yield self
        finally:
            self._is_over = True
            await asyncio.wait(tasks, timeout=1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def check(self, models) -> None:
        """All that was completed is of weights that were allowed, and of none but those named."""
        check_numbers(self.completions, models)
        for made in self.completions:
            versions = {s.policy_version for c in made for s in c.versions}
            assert min(versions) >= self.at_least, versions
