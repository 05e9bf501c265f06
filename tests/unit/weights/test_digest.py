import hashlib
import struct

import numpy as np
import pytest
import torch

from quartet.weights import digest as digest_module
from quartet.weights.digest import BLOCK_WORDS, PushDigest, bucket_digest


def reference(data: bytes) -> str:
    """The definition in the module's docstring, in Python integers and numpy."""
    golden, prime = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
    words = np.frombuffer(data + b"\0" * (-len(data) % 8), dtype="<u8")
    sums = [struct.pack("<q", len(data))]
    for start in range(0, len(words), BLOCK_WORDS):
        block = words[start : start + BLOCK_WORDS]
        x = (block ^ (np.arange(len(block), dtype=np.uint64) * golden)) * prime
        shifted = (x.astype(np.int64) >> 32).astype(np.uint64)
        sums.append(struct.pack("<Q", int((x ^ shifted).sum(dtype=np.uint64))))
    return hashlib.blake2b(b"".join(sums), digest_size=16).hexdigest()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4096, BLOCK_WORDS * 8, BLOCK_WORDS * 16 + 13])
def test_follows_its_definition(size):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert bucket_digest(torch.from_numpy(data)) == reference(data.tobytes())


@pytest.mark.parametrize("size", [0, 9, BLOCK_WORDS * 8, BLOCK_WORDS * 24 + 13])
@pytest.mark.parametrize("start", [0, 3])
def test_the_way_of_a_gpu_leads_to_the_same(size, start):
    data = torch.randint(0, 256, (size + start,), dtype=torch.uint8)[start:]
    on_host = digest_module._sums_on_host(data.numpy())
    assert digest_module._sums_on_device(data) == on_host
    assert len(on_host) == -(-size // (BLOCK_WORDS * 8))


def test_sees_bytes_not_values():
    values = torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16)
    assert bucket_digest(values) == bucket_digest(values.view(torch.int16))
    unaligned = torch.zeros(9, dtype=torch.bfloat16)[3:6].copy_(values)
    assert bucket_digest(unaligned) == bucket_digest(values)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x.__setitem__(70000, x[70000] + 1e-3),  # one value
        lambda x: x[:4].copy_(x[:4].flip(0)),  # two words swapped
        lambda x: x[:8].neg_(),  # sign bits only, an even number of them
        lambda x: x[: BLOCK_WORDS * 2].copy_(x[BLOCK_WORDS * 2 : BLOCK_WORDS * 4].clone()),
        lambda x: x[-1:].zero_(),  # a tail never written
    ],
)
def test_sees_damage(spoil):
    x = torch.randn(BLOCK_WORDS * 4 + 3, generator=torch.Generator().manual_seed(0))
    before = bucket_digest(x)
    spoil(x)
    assert bucket_digest(x) != before


def test_swapped_blocks_and_zero_tails_count():
    block = torch.arange(BLOCK_WORDS, dtype=torch.int64)
    a, b = block, block + 1
    assert bucket_digest(torch.cat([a, b])) != bucket_digest(torch.cat([b, a]))
    assert bucket_digest(torch.zeros(3)) != bucket_digest(torch.zeros(4))


def test_a_push_is_its_buckets_in_order():
    one, two, again = PushDigest(), PushDigest(), PushDigest()
    for d in ("00" * 16, "01" * 16):
        one.update(d)
        again.update(d)
    for d in ("01" * 16, "00" * 16):
        two.update(d)
    assert one.hexdigest() == again.hexdigest() != two.hexdigest()
