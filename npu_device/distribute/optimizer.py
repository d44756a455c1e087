"""``npu_distributed_keras_optimizer_wrapper``: a Keras optimizer that reduces the gradients over all ranks before it
uses them.

Which methods of which optimizer that takes is in ``keras_hooks``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from npu_device import _compat, device
from npu_device.cluster.runtime import Runtime
from npu_device.collectives.group import WORLD_GROUP, Group, group_of
from npu_device.distribute import keras_hooks
from npu_device.gradients.reduce import Gradient, Reduction
from npu_device.options import global_options
from npu_device.sessions.graph_collectives import reduce_list


def npu_distributed_keras_optimizer_wrapper(
    optimizer: Any,
    reduce_reduction: str = "mean",
    fusion: int = 1,
    fusion_id: int = -1,
    group: str = WORLD_GROUP,
    compression: str | None = None,
) -> Any:
    """Make an optimizer reduce its gradients over all ranks before clipping and applying them.

    Args:
        optimizer: a Keras optimizer: Keras 3, tf-keras, tf-keras legacy, a ``LossScaleOptimizer`` of any of them; or a
            name or config that ``tf.keras.optimizers.get`` understands.
        reduce_reduction: ``"mean"`` (default) or ``"sum"``; also ``"min"``, ``"max"``, ``"prod"``.
        fusion: as in ``all_reduce``.
        fusion_id: as in ``all_reduce``.
        group: name of the group.
        compression: as in ``all_reduce``.

    Returns:
        The same optimizer object. Its class, variables, checkpoints and config stay as they are; a model that is saved
        with it loads everywhere, with a plain optimizer that is to be wrapped again. On a single device it is
        untouched.

    Raises:
        ValueError: the optimizer is wrapped already (it would reduce twice); unknown reduction, group, fusion or
            compression.
        TypeError: not a Keras optimizer.
        RuntimeError: the environment names several ranks but the job can't be joined any more.

    Works in custom loops (``apply_gradients``, Keras 3's ``apply``) and in ``fit``. With
    ``gradient_accumulation_steps`` each step's gradients are reduced. With a loss-scale optimizer wrap either it or
    its inner optimizer; the ranks agree on whether the gradients are finite either way. Use either this wrapper or
    ``all_reduce`` by hand, not both.

    Source: Ascend TF Adapter 2.x, ``npu.distribute.npu_distributed_keras_optimizer_wrapper``.
    """
    how = Reduction(
        reduce_reduction, fusion, fusion_id, overlap=global_options().hcom_parallel.typed, compression=compression
    )
    if isinstance(optimizer, (str, dict)):
        optimizer = tf.keras.optimizers.get(optimizer)
    runtime = device.cluster_runtime()
    if runtime is None:
        return optimizer
    if keras_hooks.is_wrapped(optimizer):
        raise ValueError(
            f"rank {runtime.cluster.rank}: this {type(optimizer).__name__} is wrapped already; wrapping it, or the "
            "loss-scale optimizer around it, "
            "a second time would reduce its gradients twice.\nWhat to do: call "
            "npu_distributed_keras_optimizer_wrapper once an optimizer."
        )
    keras_hooks.install(
        optimizer,
        _compat.keras_of(optimizer),
        GradientReduction(runtime, how, group_of(runtime, group)),
    )
    return optimizer


class GradientReduction:
    """How one optimizer's gradients are reduced, and which of them have been."""

    def __init__(self, runtime: Runtime, reduction: Reduction, group: Group) -> None:
        self._runtime = runtime
        self._reduction = reduction
        self._group = group
        self._reduced: list[weakref.ref[Any]] = []
        self._applying = False

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientReduction:
        return GradientReduction(self._runtime, self._reduction, self._group)

    def reduce(self, gradients: Iterable[Gradient]) -> list[Gradient]:
        """The gradients reduced over the ranks, ``None`` where ``None`` was."""
        reduced = reduce_list(self._runtime, list(gradients), self._reduction, self._group)
        self._reduced = [weakref.ref(gradient) for gradient in reduced if gradient is not None]
        return reduced

    @contextlib.contextmanager
    def applying(self) -> Iterator[None]:
        """Gradients that come in the block have been reduced already."""
        before, self._applying = self._applying, True
        try:
            yield
        finally:
            self._applying = before

    def reduce_once(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Like ``reduce``, but what has just come from there, or comes while it is applied, goes through as it is.

        A loss-scale optimizer has them reduced first, and applied by its inner optimizer later, if they are finite.
        """
        done = {id(gradient) for reference in self._reduced if (gradient := reference()) is not None}
        present = [gradient for gradient in gradients if gradient is not None]
        if self._applying or (present and all(id(gradient) in done for gradient in present)):
            return list(gradients)
        return self.reduce(gradients)

    def finite_everywhere(self, finite: tf.Tensor) -> tf.Tensor:
        """Whether the gradients are finite on every rank, given whether they are on this one."""
        [least] = reduce_list(self._runtime, [tf.cast(finite, tf.int32)], Reduction("min"), self._group)
        return tf.cast(least, tf.bool)
