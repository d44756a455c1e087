"""The ranks of the job, or of a group, as one of them sees them: what training code needs of the collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.graph import at_once_in_session
from npu_device._src.collectives.group import Group
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.moves import all_gather_v
from npu_device._src.collectives.ops import all_reduce, barrier, broadcast
from npu_device._src.gradients.reduction import Owners, ReductionOptions, reduce_list
from npu_device._src.world.sent_objects import packed, unpacked


class World:
    """The ranks of a running job, or a group of them; ``rank`` is this process's in the group."""

    def __init__(self, job: Job, group: Group) -> None:
        self.job = job
        self.group = group
        self.rank = group.rank
        self.size = group.size
        self.is_main = group.rank == 0  # rank 0, if it is the whole job

    def sum_over_ranks(self, tensor: tf.Tensor) -> tf.Tensor:
        return all_reduce(self.job, tensor, "sum", self.group)

    def reduce(self, tensors: Sequence, options: ReductionOptions, owners: Owners = None) -> list:
        """Return a list of tensors, ``None`` and ``tf.IndexedSlices`` reduced over the ranks; see ``reduce_list``."""
        return reduce_list(self.job, tensors, options, self.group, owners)

    def gather(self, tensor: tf.Tensor, purpose: str = "") -> tf.Tensor:
        """Return all ranks' tensors one after the other along the first dimension, which may differ among the ranks."""
        return all_gather_v(self.job, tensor, self.group, purpose)

    def from_root(self, tensors: Sequence[tf.Tensor], root_rank: int = 0) -> list[tf.Tensor]:
        return broadcast(self.job, list(tensors), root_rank, self.group)

    def from_root_of_any_size(
        self, tensors: Sequence[tf.Tensor], root_rank: int = 0
    ) -> list[tf.Tensor]:
        """Return the root's tensors, whose sizes are sent first; also strings. Those of the others are ignored, but for
        their dtypes and numbers of dimensions.
        """
        sent = list(map(_encoded, tensors))
        # With 64 bits, since objects may be larger than 2 GiB.
        own_sizes = tf.concat([tf.shape(tensor, tf.int64) for tensor in sent], axis=0)
        [sizes] = self.from_root([own_sizes], root_rank)
        if self.rank != root_rank:
            sizes_of_tensors = tf.split(sizes, [tensor.shape.rank for tensor in sent])
            for position, size in enumerate(sizes_of_tensors):
                tensor = sent[position]
                sent[position] = _shaped_like(tensor, tf.zeros(size, tensor.dtype))
        elif not tf.executing_eagerly():
            # A session runs only what it needs, and the root doesn't need the sizes.
            with tf.control_dependencies([sizes]):
                sent = list(map(tf.identity, sent))
        return list(map(_decoded, tensors, self.from_root(sent, root_rank)))

    def object_from_root(self, value: Any, root_rank: int = 0) -> Any:
        """Return the Python object of the root, also while a graph is built; those of the other ranks are ignored."""
        with compat.eager_mode():
            trusted = self.job.cluster.is_trusted
            sends = self.rank == root_rank
            content = b""
            if sends:
                content = packed(value, trusted)
            array = np.frombuffer(content, np.uint8)
            [sent] = self.from_root_of_any_size([tf.constant(array)], root_rank)
            received = None
            # Read by the root, too, so that what can't be sent is an error on all ranks.
            if not sends or not trusted:
                [received] = unpacked(sent.numpy().tobytes(), [f"rank {root_rank}"], trusted)
            if sends:
                return value
            return received

    def objects(self, value: Any, purpose: str) -> list:
        """Return the Python objects of all ranks, also while a graph is built; ``purpose`` is for the error if they
        exchange unrelated ones.
        """
        with compat.eager_mode():
            trusted = self.job.cluster.is_trusted
            array = np.frombuffer(packed(value, trusted), np.uint8)
            # Objects differ in size, which a gather of rows allows.
            content = self.gather(tf.constant(array), purpose).numpy().tobytes()
            senders = [f"rank {rank}" for rank in self.group.ranks]
            return unpacked(content, senders, trusted)

    def lines(self, texts: Iterable[str]) -> str:
        """Return a line of a message for each rank, given its text."""
        texts_by_rank = dict(zip(self.group.ranks, texts))
        return "\n".join(self.job.cluster.lines(texts_by_rank))

    def wait(self) -> None:
        """Wait for the other ranks: at once in the graph of a session, and in a ``tf.function`` whenever it runs."""
        with at_once_in_session():
            barrier(self.job, self.group)


def _is_sent_as_it_is(tensor: tf.Tensor) -> bool:
    return tensor.dtype != tf.string and tensor.shape.rank is not None


def _encoded(tensor: tf.Tensor) -> tf.Tensor:
    if _is_sent_as_it_is(tensor):
        return tensor
    return tf.io.decode_raw(tf.io.serialize_tensor(tensor), tf.uint8)


def _decoded(replaced: tf.Tensor, encoded: tf.Tensor) -> tf.Tensor:
    """Return what was sent in place of a tensor of this rank."""
    if _is_sent_as_it_is(replaced):
        return encoded
    # No operation makes a string of numbers, so that each byte is looked up.
    characters = tf.constant([bytes([code]) for code in range(256)])
    codes = tf.cast(encoded, tf.int32)
    text = tf.strings.reduce_join(tf.gather(characters, codes))
    return _shaped_like(replaced, tf.io.parse_tensor(text, replaced.dtype))


def _shaped_like(replaced: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor with the shape that a graph knows of the one that it replaces."""
    # An eager tensor has the shape of its own batch, and that of the root may have another one.
    if tf.executing_eagerly():
        return tensor
    return tf.ensure_shape(tensor, replaced.shape)


def value_of(variable: Any) -> tf.Tensor:
    """Return the value of a variable now."""
    # A TensorFlow 1 variable as a tensor is a single read created with the variable, whatever precedes it here.
    if hasattr(variable, "read_value"):
        return variable.read_value()
    return tf.convert_to_tensor(variable)
