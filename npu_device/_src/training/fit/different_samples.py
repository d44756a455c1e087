"""Chooses samples of a batch that differ as far as any do: a step is checked on few, and a batch may be sorted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

_MOST_ELEMENTS = 4096  # elements of a sample, at equal distances


def different_samples(batch: Any, total: int, count: int) -> list[int]:
    """Return the positions of some of a batch's samples: both ends, those with the most and the least padding, and
    some in between.

    Those alike are next to each other, so that parts of them differ.
    """
    features: list[np.ndarray] = []
    for leaf in tf.nest.flatten(batch):
        if leaf is not None:
            features += _features(leaf, total)
    features = [feature for feature in features if feature.min() < feature.max()]
    positions = [0, total - 1]
    for feature in features:
        # The extremes come first, because later positions are dropped where there are too many.
        positions.append(int(feature.argmin()))
        positions.append(int(feature.argmax()))
    in_between = np.linspace(0, total - 1, count)
    positions += in_between.round().astype(int).tolist()
    # The list is filled up with all other positions, for batches in which these coincide.
    positions += range(total)
    chosen = list(dict.fromkeys(positions))[:count]

    def order(position: int) -> Any:
        features_of_sample = [-float(feature[position]) for feature in features]
        return features_of_sample, position

    return sorted(chosen, key=order)


def _features(leaf: Any, total: int) -> Iterator[np.ndarray]:
    """Yield numbers for each sample of a tensor that tell how much of it is padding, masked or missing."""
    if isinstance(leaf, tf.RaggedTensor):
        lengths = leaf.row_lengths().numpy()
        yield lengths.reshape(total, -1).sum(axis=1)
    elif isinstance(leaf, tf.SparseTensor):
        rows = leaf.indices.numpy()[:, 0]
        row_count = int(leaf.dense_shape[0])
        units = rows * total // max(1, row_count)
        yield np.bincount(units, minlength=total)
    elif tf.TensorShape(leaf.shape).rank:
        samples = np.asarray(leaf).reshape(total, -1)
        distance = max(1, samples.shape[1] // _MOST_ELEMENTS)
        samples = samples[:, ::distance]
        # The length of the padding is a feature: it is 0, or what is common at the end of the samples.
        ends = samples[:, -1:]
        different_ends = np.unique(ends[: 2 * _MOST_ELEMENTS])
        common_ends = [end for end in different_ends if (ends == end).sum() > 1]
        for padding in [_padding(samples), *common_ends[:2]]:
            yield (samples == padding).sum(axis=1)
        if samples.dtype.kind == "f":
            yield np.isnan(samples).sum(axis=1)
        # A single number for each sample, such as its label, is a feature by itself.
        if samples.shape[1] == 1 and samples.dtype.kind in "iufb":
            yield samples[:, 0]


def _padding(array: np.ndarray) -> Any:
    """Return what most scripts fill samples up with: empty strings or zeros."""
    if array.dtype.kind in "OS":
        return b""
    return 0
