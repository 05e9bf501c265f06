"""Weight pushes: from the learner's rank 0 to the rollout replicas, in four calls.

    manifest.py   which tensors, cut into which buckets: both sides compute the same plan
    tensors.py    buckets as torch buffers: pack, unpack, the manifest of a model
    digest.py     proof that what arrived is what was sent
    group.py      a broadcast group outside the default world, with a deadline on every wait
    transport.py  how a bucket travels: group broadcast, or safetensors files
    push.py       the sender: Prepare, Receive, broadcast, Commit, or Abort
    member.py     one replica, as the sender sees it
    assemble.py   brings the replicas into one group and leaves out who does not come
    lane.py       the sender's blocking half: drains the model's tensors and sends them
    clock.py      where the time of a push goes
    worker.py     a thread that may be left behind
    receive.py    the receiver: into a staging area, never into the model that serves
    landing.py    where the bytes arrive and wait; an engine may bring its own

`docs/weights.md` draws the protocol. torch is imported inside functions only, so that a trainer
without torch may read manifests.
"""

from quartet.weights.clock import PushClock
from quartet.weights.landing import Landing
from quartet.weights.manifest import (
    Bucket,
    TensorSlot,
    check_manifest,
    dtype_bytes,
    plan_buckets,
    total_bytes,
)
from quartet.weights.member import PushTarget
from quartet.weights.push import push_weights
from quartet.weights.receive import WeightInbox
from quartet.weights.tensors import (
    flat_tensor,
    manifest_of_model,
    pack_bucket,
    unpack_bucket,
)

__all__ = [
    "Bucket",
    "Landing",
    "PushClock",
    "PushTarget",
    "TensorSlot",
    "WeightInbox",
    "check_manifest",
    "dtype_bytes",
    "flat_tensor",
    "manifest_of_model",
    "pack_bucket",
    "plan_buckets",
    "push_weights",
    "total_bytes",
    "unpack_bucket",
]
