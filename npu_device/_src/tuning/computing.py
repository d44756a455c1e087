"""The load beside which collectives are measured: the backward pass of dense layers, repeated in a thread."""

from __future__ import annotations

import threading
from typing import Any

import tensorflow as tf

# As in a backward pass, more operations are ready at any time than there are threads.
_BRANCHES, _LAYERS, _WIDTH = 4, 2, 384


class Computing:
    """Computes in a thread while the block runs; can be entered several times."""

    def __init__(self) -> None:
        self._backward = _backward()
        self._once()

    def __enter__(self) -> Computing:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._compute, name="computing beside a collective")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _compute(self) -> None:
        while not self._over.is_set():
            self._once()

    def _once(self) -> None:
        for result in self._backward():
            result[:1].numpy()


def _backward() -> Any:
    inputs, weight = tf.ones([_WIDTH, _WIDTH]), tf.fill([_WIDTH, _WIDTH], 1 / _WIDTH)
    losses = [
        tf.fill([_WIDTH, _WIDTH], float(branch)) for branch in range(_BRANCHES)
    ]  # TensorFlow would merge equal ones

    @tf.function
    def backward() -> list[tf.Tensor]:
        gradients = []
        for loss in losses:
            upstream = loss
            for _ in range(_LAYERS):
                gradients.append(tf.matmul(inputs, upstream, transpose_a=True))
                upstream = tf.matmul(upstream, weight, transpose_b=True)
        return gradients

    return backward.get_concrete_function()
