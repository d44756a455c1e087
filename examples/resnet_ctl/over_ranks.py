"""Small exchanges between the ranks that the example needs besides the port's three additions: rows and metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

import npu_device as npu


def gather(row: list[Any]) -> np.ndarray:
    """Return the rows of all ranks, in rank order, on every rank: shape (ranks, len(row)), all int64 or all float64."""
    device = npu.open()
    rows = np.zeros((device.workers_num, len(row)), np.asarray(row).dtype)
    rows[device.worker_id] = row
    return npu.distribute.all_reduce(tf.constant(rows), reduction="sum").numpy()


def add_up(*metrics: tf_keras.metrics.Mean) -> None:
    """Turn each rank's metrics, which are a total and a count, into those of all ranks."""
    variables = [variable for metric in metrics for variable in metric.variables]
    for variable, total in zip(variables, npu.distribute.all_reduce(variables, reduction="sum")):
        variable.assign(total)
