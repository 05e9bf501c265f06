"""The batch cache against lists of rows that are simply kept."""

import random

import pytest
import torch
from quartet_rollout.engines.transformers.cache import BatchCache

HEADS, DIM, LAYERS = 2, 3, 2


class PlainRows:
    """The same operations on a list of [heads, tokens, dim]."""

    def __init__(self):
        self.rows = []

    def remove(self, row):
        last = self.rows.pop()
        if row < len(self.rows):
            self.rows[row] = last


def prefill(length, generator, extra=2):
    """Keys and values of each layer, with padding on the right that must be ignored."""
    shape = (HEADS, length + extra, DIM)
    return [
        (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
        for _ in range(LAYERS)
    ]


def decode(cache, plain, generator):
    view = cache.decoding()
    assert view.get_seq_length() == cache.width - 1
    mask, places = (
        cache.attention_mask(torch.device("cpu")),
        cache.position_ids(torch.device("cpu")),
    )
    new = torch.randn((LAYERS, 2, len(cache), HEADS, 1, DIM), generator=generator)
    for layer in range(LAYERS):
        keys, values = view.update(new[layer, 0], new[layer, 1], layer)
        for row in range(len(cache)):
            wanted = torch.cat([plain.rows[row][layer], new[layer, :, row]], dim=-2)
            seen = mask[row].bool()
            assert torch.equal(keys[row][:, seen], wanted[0])
            assert torch.equal(values[row][:, seen], wanted[1])
            assert not keys[row][:, ~seen].any()
            assert int(places[row]) == wanted.shape[-2] - 1
    cache.advance()
    for row in range(len(cache)):
        plain.rows[row] = torch.cat([plain.rows[row], new[:, :, row]], dim=-2)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_joins_leaves_and_steps(seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    cache, plain = BatchCache(), PlainRows()
    for _ in range(250):
        action = rng.choice(("add", "remove", "decode", "decode", "decode"))
        if action == "add" and len(cache) < 6:
            length, copies = rng.randint(1, 40), rng.randint(1, 3)
            layers = prefill(length, generator)
            cache.add(layers, length, copies)
            row = torch.stack([torch.stack([k, v]) for k, v in layers])[..., :length, :]
            plain.rows.extend([row] * copies)
        elif action == "remove" and len(cache):
            row = rng.randrange(len(cache))
            cache.remove(row)
            plain.remove(row)
        elif len(cache):
            decode(cache, plain, generator)
        assert cache.lengths == [r.shape[-2] for r in plain.rows]


def test_a_row_that_holds_nan_leaves_none_behind():
    generator = torch.Generator().manual_seed(0)
    cache, plain = BatchCache(), PlainRows()
    poisoned = [(torch.full((HEADS, 9, DIM), torch.nan),) * 2 for _ in range(LAYERS)]
    good = prefill(4, generator, extra=0)
    cache.add(good, 4, 1)
    cache.add(poisoned, 9, 1)
    cache.remove(1)
    short = prefill(2, generator, extra=0)
    cache.add(short, 2, 1)
    plain.rows = [torch.stack([torch.stack([k, v]) for k, v in x]) for x in (good, short)]
    decode(cache, plain, generator)  # asserts zeros under the padding


def test_the_width_follows_the_longest_row_that_is_left():
    generator = torch.Generator().manual_seed(0)
    cache = BatchCache()
    cache.add(prefill(100, generator), 100, 1)
    cache.add(prefill(5, generator), 5, 1)
    assert cache.width == 101
    cache.remove(0)
    assert cache.width == 6
