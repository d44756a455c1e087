"""Sets variables that a step changes by this rank's samples to the values that all ranks' samples give.

Metrics count and add up, so the ranks' increments are added. Moving averages move by the average of the ranks'
increments. All variables of a dtype travel in one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.world import value_of

Add = Callable[[tf.Tensor], tf.Tensor]


class Increments:
    """The values of variables before a step, so that their increments can be reduced after it.

    Args:
        variables: each with the weight of this rank's increment; few different weights.
        add_up: adds up a tensor over the ranks.
    """

    def __init__(self, variables: Sequence[tuple[Any, Any]], add_up: Add) -> None:
        self._add_up = add_up
        groups: dict[tuple[tf.DType, int], list[Any]] = {}
        factors = {id(factor): factor for _, factor in variables}
        for variable, factor in variables:
            groups.setdefault((tf.as_dtype(variable.dtype), id(factor)), []).append(variable)
        # Packed, since a step has hundreds of such variables and few operations to spare for each.
        self._groups = [(dtype, members, factors[key], _packed(members)) for (dtype, key), members in groups.items()]

    def reduce(self) -> None:
        """Give each variable its value before the step plus the sum of all ranks' increments."""
        for dtype in dict.fromkeys(dtype for dtype, *_ in self._groups):
            groups = [group for group in self._groups if group[0] == dtype]
            moved = [_times(_packed(members) - before, factor) for _, members, factor, before in groups]
            before = tf.concat([before for *_, before in groups], axis=0)
            total = before + self._add_up(tf.concat(moved, axis=0))
            members = [member for _, members, *_ in groups for member in members]
            sizes = [tf.TensorShape(member.shape).num_elements() for member in members]
            for member, value in zip(members, tf.split(total, sizes)):
                member.assign(value if len(member.shape) == 1 else tf.reshape(value, member.shape))


def _packed(variables: Sequence[Any]) -> tf.Tensor:
    values = [value_of(variable) for variable in variables]
    return tf.concat([value if value.shape.rank == 1 else tf.reshape(value, [-1]) for value in values], axis=0)


def _times(value: tf.Tensor, factor: Any) -> tf.Tensor:
    if isinstance(factor, float) and factor == 1.0:
        return value
    if value.dtype.is_floating:
        return value * tf.cast(factor, value.dtype)
    return tf.where(
        tf.cast(factor, tf.float32) > 0, value, tf.zeros_like(value)
    )  # an integer counts in full or not at all


def mean_of_logs(values: Sequence[Any], weight: Any, add_up: Add) -> list[Any]:
    """Return the averages of scalars in logs over the ranks, weighted by samples; other values stay."""
    values = [compat.to_tensor(value) if isinstance(value, (float, np.floating)) else value for value in values]
    places = [
        place
        for place, value in enumerate(values)
        if tf.is_tensor(value) and value.shape.rank == 0 and value.dtype.is_floating
    ]
    results = list(values)
    if places:
        stacked = tf.stack([tf.cast(values[place], tf.float32) for place in places])
        reduced = tf.unstack(add_up(stacked * tf.cast(weight, tf.float32)))
        for place, value in zip(places, reduced):
            results[place] = tf.cast(value, values[place].dtype)
    return results
