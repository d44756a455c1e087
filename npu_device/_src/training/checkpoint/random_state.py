"""The process's own random states as plain values for JSON: Python's, numpy's, TensorFlow's seed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from npu_device._src import compat


def of_process() -> dict[str, Any]:
    """Return the states of ``random``, ``numpy.random``, TensorFlow's seed and its eager operations."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    seed, position = compat.random_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "tensorflow": [seed, position],
    }


def set_process(state: dict[str, Any]) -> None:
    """Set what ``of_process`` has returned, also after it has been JSON."""
    random.setstate(_tuples(state["python"]))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))
    seed, position = state["tensorflow"]
    if compat.random_state()[0] is not None or seed is not None:
        compat.set_random_state((seed, _tuples(position)))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def of_generator(generator: Any) -> Any:
    """Return the state of a ``random.Random`` or a ``numpy.random.Generator``."""
    return generator.getstate() if isinstance(generator, random.Random) else _plain(generator.bit_generator.state)


def set_generator(generator: Any, state: Any) -> None:
    """Set what ``of_generator`` has returned, also after it has been JSON."""
    if isinstance(generator, random.Random):
        generator.setstate(_tuples(state))
    else:
        generator.bit_generator.state = _arrays(state)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": value.dtype.name}
    return value.item() if isinstance(value, np.generic) else value


def _arrays(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"array", "dtype"}:
        return np.asarray(value["array"], value["dtype"])
    return {key: _arrays(part) for key, part in value.items()} if isinstance(value, dict) else value
