"""What a ``tf.train.Checkpoint`` is about to write."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from npu_device._src.compat.slot_memory import HELD_ELSEWHERE, of_this_rank

SavedTensor = tuple[Any, str, str, tf.Tensor]
"""What has the tensor (a variable, another trackable, or None for the graph of objects), its key, its slice if the
variable is partitioned, as TensorFlow's files name it, else "", and the tensor.
"""


def tensors_of_checkpoint(checkpoint: tf.train.Checkpoint, is_whole: bool) -> list[SavedTensor]:
    """Return the tensors that a checkpoint would write now, with those of slots that other ranks hold if ``is_whole``.

    They are the buffers of variables, not copies: TensorFlow gives a variable another buffer when it changes.
    """
    context: contextlib.AbstractContextManager[None] = of_this_rank.on()
    if is_whole:
        context = contextlib.nullcontext()
    with context:
        by_owner, *_ = checkpoint._saver._gather_serialized_tensors()
        return list(_tensors(by_owner))


def _tensors(by_owner: dict[Any, dict[str, Any]]) -> Iterator[SavedTensor]:
    for owner, by_key in by_owner.items():
        for key, value in by_key.items():
            by_slice = value
            if not isinstance(value, dict):
                by_slice = {"": value}
            for slice_spec, saved in by_slice.items():
                if saved is HELD_ELSEWHERE:
                    continue
                # Older kinds of trackables tell their tensors in objects of their own.
                tensor = getattr(saved, "tensor", saved)
                if callable(tensor):
                    tensor = tensor()
                # A variable without a value yet has none.
                if tensor is not None:
                    yield owner, key, slice_spec, tensor
