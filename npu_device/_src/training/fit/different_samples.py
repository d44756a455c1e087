"""Chooses samples of a batch that differ as far as any do: a step is checked on few, and a batch may be sorted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

_LOOKED_AT = 4096  # elements of a sample, at equal distances


def different_samples(batch: Any, total: int, count: int) -> list[int]:
    """Return the places of some of a batch's samples: both ends, those with the most and the least padding, and some in
    between.

    Those alike are next to each other, so that parts of them differ.
    """
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    features = [
        each for leaf in leaves for each in _features(leaf, total) if each.min() < each.max()
    ]
    places = [0, total - 1]
    for feature in features:
        places += [int(feature.argmin()), int(feature.argmax())]
    places += np.linspace(0, total - 1, count).round().astype(int).tolist()
    places += range(total)
    chosen = list(dict.fromkeys(places))[:count]
    return sorted(
        chosen, key=lambda place: ([-float(feature[place]) for feature in features], place)
    )


def _features(leaf: Any, total: int) -> Iterator[np.ndarray]:
    """Yield numbers for each sample of a tensor that tell how much of it is padding, masked or missing."""
    if isinstance(leaf, tf.RaggedTensor):
        yield _per_sample(leaf.row_lengths().numpy(), total).sum(axis=1)
    elif isinstance(leaf, tf.SparseTensor):
        rows = leaf.indices.numpy()[:, 0] * total // max(1, int(leaf.dense_shape[0]))
        yield np.bincount(rows, minlength=total)
    elif tf.TensorShape(leaf.shape).rank:
        values = _per_sample(np.asarray(leaf), total)
        values = values[:, :: max(1, values.shape[1] // _LOOKED_AT)]
        # As they are in padding: 0, or what is common at the end of the samples.
        yield (values == _empty(values)).sum(axis=1)
        last = values[:, -1:]
        common = [value for value in np.unique(last[: 2 * _LOOKED_AT]) if (last == value).sum() > 1]
        for value in common[:2]:
            yield (values == value).sum(axis=1)
        if values.dtype.kind == "f":
            yield np.isnan(values).sum(axis=1)
        if values.shape[1] == 1 and values.dtype.kind in "iufb":
            yield values[:, 0]


def _per_sample(values: np.ndarray, total: int) -> np.ndarray:
    return values.reshape(total, -1)


def _empty(values: np.ndarray) -> Any:
    return b"" if values.dtype.kind in "OS" else 0
