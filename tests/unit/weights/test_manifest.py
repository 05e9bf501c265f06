import pytest

from quartet.errors import RequestError
from quartet.types import TensorSpec, WeightManifest
from quartet.weights import check_manifest, plan_buckets, total_bytes


def manifest(*specs: tuple, bucket_bytes: int = 64, aliases: dict | None = None) -> WeightManifest:
    tensors = tuple(TensorSpec(name=n, dtype=d, shape=s) for n, d, s in specs)
    return WeightManifest(tensors=tensors, bucket_bytes=bucket_bytes, aliases=aliases or {})


def names(plan) -> list[list[str]]:
    return [[slot.name for slot in bucket.tensors] for bucket in plan]


def test_buckets_close_before_the_size_is_passed():
    plan = plan_buckets(manifest(*[(c, "float32", (8,)) for c in "abc"]))
    assert names(plan) == [["a", "b"], ["c"]]
    assert [b.nbytes for b in plan] == [64, 32]
    assert [slot.offset for slot in plan[0].tensors] == [0, 8]


def test_a_large_tensor_is_alone_and_a_dtype_closes_a_bucket():
    plan = plan_buckets(
        manifest(
            ("a", "float32", (2,)),
            ("big", "float32", (5, 7)),
            ("c", "float32", ()),
            ("d", "bfloat16", (3,)),
        )
    )
    assert names(plan) == [["a"], ["big"], ["c"], ["d"]]
    assert [b.nbytes for b in plan] == [8, 140, 4, 6]


def test_every_tensor_is_sent_once_and_in_order():
    m = manifest(*[(f"t{i}", "float32", (i % 5, 3)) for i in range(40)], bucket_bytes=100)
    plan = plan_buckets(m)
    assert [n for bucket in names(plan) for n in bucket] == [t.name for t in m.tensors]
    assert sum(b.nbytes for b in plan) == total_bytes(m)


A, B = ("a", "float32", (2, 3)), ("b", "float32", (3,))


@pytest.mark.parametrize(
    ("sent", "reason", "word"),
    [
        (manifest(A), "WEIGHTS_NAME_MISMATCH", "lacks tensors: b"),
        (manifest(A, B, ("c", "float32", (1,))), "WEIGHTS_NAME_MISMATCH", "unknown here: c"),
        (manifest(A, ("b", "float32", (4,))), "WEIGHTS_SHAPE_MISMATCH", r"\[4\]"),
        (manifest(A, ("b", "bfloat16", (3,))), "WEIGHTS_DTYPE_MISMATCH", "bfloat16"),
        (manifest(A, B, ("head", "float32", (2, 3))), "WEIGHTS_NAME_MISMATCH", "ties"),
        (manifest(A, B, aliases={"x": "a"}), "WEIGHTS_NAME_MISMATCH", "untie|ties"),
        (manifest(A, A, B), "WEIGHTS_NAME_MISMATCH", "twice"),
        (manifest(), "WEIGHTS_MANIFEST_INVALID", "without tensors"),
        (manifest(A, B, bucket_bytes=0), "WEIGHTS_MANIFEST_INVALID", "bucket_bytes"),
        (manifest(A, ("b", "int4", (3,))), "WEIGHTS_DTYPE_UNSUPPORTED", "int4"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(sent, reason, word):
    with pytest.raises(RequestError, match=word) as caught:
        check_manifest(sent, manifest(A, B, aliases={"head": "a"}))
    assert caught.value.info.reason == reason
    assert caught.value.info.field.startswith("manifest.")


def test_order_and_bucket_size_are_the_senders():
    check_manifest(manifest(B, A, bucket_bytes=7), manifest(A, B, aliases={"head": "a"}))
