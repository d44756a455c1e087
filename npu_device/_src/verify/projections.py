"""What is kept of tensors: of each a few random projections, of a batch a digest for each row.

Projections are small, and show by which factor two tensors differ. They are the same in every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from npu_device._src.comparison.compare import PROJECTIONS
from npu_device._src.training.watching.digests import checksum

_WIDTH = 1024  # most columns of the matrix as which a tensor is projected


def projected(arrays: Sequence) -> np.ndarray:
    """Return the projections of each array; NaN for one that is NaN."""
    projections = [_projection(array, position) for position, array in enumerate(arrays)]
    return np.array(projections).reshape(-1, PROJECTIONS)


def _projection(array: Any, position: int) -> np.ndarray:
    """Return the projections of an array on directions that are the same in every process."""
    flat = np.asarray(array, np.float64).ravel()
    generator = np.random.default_rng([position, flat.size])
    # A tensor is taken as a matrix, which needs random numbers for its rows and columns only.
    width = min(flat.size, _WIDTH) or 1
    padded = np.pad(flat, (0, -flat.size % width))
    matrix = padded.reshape(-1, width)
    rows = generator.standard_normal((PROJECTIONS, len(matrix)))
    columns = generator.standard_normal((PROJECTIONS, width))
    products = (rows @ matrix) * columns
    return np.asarray(products.sum(axis=1))


def digests_of(count: np.ndarray, *leaves: np.ndarray) -> list[int]:
    """Return a number for each row of the arrays that have as many rows as the first."""
    arrays = [leaf for leaf in leaves if leaf.ndim]
    if not arrays:
        return []
    digests = [0] * len(arrays[0])
    for array in arrays:
        if len(array) == len(digests):
            rows = [np.array(row, array.dtype) for row in array]
            digests = [checksum(row, digest) for row, digest in zip(rows, digests)]
    if count >= 0:
        digests = digests[: int(count)]
    return digests
