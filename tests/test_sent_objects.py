"""Python objects between ranks: nothing that could run code is read in a job that strangers can reach."""

from __future__ import annotations

import json
import math
import pickle
import random
from pathlib import Path
from typing import Any

import job
import numpy as np
import pytest
import tensorflow as tf
from fuzzing import VALUES, given, st
from ranks import free_port

from npu_device._src.cluster.ports import addresses_of_this_host
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.world.sent_objects import packed, unpacked

_PLAIN: list[Any] = [
    [None, True, -3, 1 << 100, 0.1, math.inf, "ä\ud800", b"\0\xff", bytearray(b"x")],
    {"a": (1, [2]), 3: {4, 5}, (6,): frozenset("b"), None: {}},
    np.arange(6, dtype="i2").reshape(2, 3),
    np.array(2.5, np.float16),
    np.zeros([0, 3], np.complex64),
    np.array(["text", "ä"]),
    tf.constant([1.5, 2.5], tf.bfloat16).numpy(),
    np.float32(0.1),
    np.random.RandomState(1).get_state(),
    random.getstate(),
]


@pytest.mark.parametrize("trusted", [True, False])
def test_what_is_plain_arrives_as_it_was(trusted: bool) -> None:
    for value in _PLAIN:
        found, second = unpacked(
            packed(value, trusted) + packed(1, trusted), ["rank 0", "rank 1"], trusted
        )
        assert second == 1 and pickle.dumps(found) == pickle.dumps(value)
    [found] = unpacked(packed({"x": tf.constant([[1, 2]])}, False), ["rank 0"], False)
    assert isinstance(found["x"], tf.Tensor) and found["x"].numpy().tolist() == [[1, 2]]


class _Own:
    pass


def test_other_objects_need_a_secret() -> None:
    for value in (_Own(), [_Own], {1: print}, np.array([_Own()]), Path("a"), random.Random(1)):
        with pytest.raises(
            ClusterError,
            match=r"object of rank 1 can't be sent: it is, or contains, a(.|\n)*_SECRET",
        ):
            unpacked(packed(1, False) + packed(value, False), ["rank 0", "rank 1"], False)
    for sent in (
        packed(1, True),
        b"p" + (12).to_bytes(8, "little") + pickle.dumps(1)[:12].ljust(12),
    ):
        with pytest.raises(
            ClusterError, match=r"rank 0 has sent a pickled object, which isn't read(.|\n)*_SECRET"
        ):
            unpacked(sent, ["rank 0"], False)


_KINDS = st.sampled_from(
    (
        "int",
        "list",
        "tuple",
        "set",
        "frozenset",
        "dict",
        "bytes",
        "bytearray",
        "tensor",
        "number",
        "array",
        "other",
    )
)


@given(
    st.binary() | st.builds(lambda kind, rest: [kind, *rest], _KINDS, st.lists(VALUES, max_size=4))
)
def test_any_bytes_are_an_object_or_an_error(sent: Any) -> None:
    data = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
    for text in (data, b"j" + len(data).to_bytes(8, "little") + data):
        try:
            unpacked(text, ["rank 0"], False)
        except ClusterError as error:
            assert "rank 0" in str(error)


_SCRIPT = """
import numpy as np
import tensorflow as tf
import npu_device as npu
npu.open().as_default()
rank = npu.distribute.rank()
plain = npu.distribute.broadcast_object({"epoch": 3, "x": np.float32([1.5])} if rank == 1 else None, 1)
print("plain", plain)

class Own:
    pass

try:
    print("own", type(npu.distribute.broadcast_object(Own())).__name__)
except RuntimeError as error:
    print("error", error)

if HAS_SECRET:
    raise SystemExit

class Model(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.words, self.out = tf.keras.layers.StringLookup(vocabulary=["a", "b"]), tf.keras.layers.Dense(1)

    def call(self, words):
        return self.out(tf.cast(self.words(words), tf.float32))

model = npu.distribute.replicate(Model())
model.compile("sgd", "mse")
data = tf.data.Dataset.from_tensor_slices((tf.constant([["a"], ["b"], ["c"]]), tf.ones([3, 1]))).batch(3)
checkpoint = npu.callbacks.FitCheckpoint(DIRECTORY)
model.fit(data, epochs=2, verbose=0, callbacks=[checkpoint], validation_data=data)
print("trained", model.predict(data).shape)
"""


@pytest.mark.parametrize("has_secret", [True, False])
def test_a_job_that_other_hosts_can_reach(tmp_path: Path, has_secret: bool) -> None:
    addresses = addresses_of_this_host()
    if not addresses:
        pytest.skip("this host has no address but the loopback")
    port = str(free_port())
    shared = {"MASTER_ADDR": addresses[0], "MASTER_PORT": port, "WORLD_SIZE": "2"}
    if has_secret:
        shared["NPU_DEVICE_SECRET"] = "known to the ranks"
    script = f"HAS_SECRET, DIRECTORY = {has_secret}, {str(tmp_path / 'checkpoints')!r}\n{_SCRIPT}"
    ended = job.finish(
        job.start_each(tmp_path, script, [{**shared, "RANK": str(rank)} for rank in range(2)])
    )
    for one in ended:
        assert one.code == 0, one.output
        assert "plain {'epoch': 3, 'x': array([1.5], dtype=float32)}" in one.output
        if has_secret:
            assert "own Own" in one.output
        else:
            assert "trained (3, 1)" in one.output
            assert (
                "error an object of rank 0 can't be sent: it is, or contains, a __main__.Own."
                in one.output
            )
            assert "NPU_DEVICE_SECRET" in one.output.rpartition("error")[2]
