"""The part of a checkpoint that each rank has of its own: iterators, generators, random state, and differing values."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.checkpoint.shared import trackable


class Own:
    """The part of a ``JobCheckpoint`` that is of one rank: trackables, ``random.Random`` and ``numpy.random.Generator``
    objects by name.
    """

    def __init__(self, things: Mapping[str, Any]) -> None:
        plain = (random.Random, np.random.Generator)
        self._generators = {name: thing for name, thing in things.items() if isinstance(thing, plain)}
        self._trackables = {
            name: trackable(thing, name) for name, thing in things.items() if name not in self._generators
        }

    def names_of_states(self) -> list[str]:
        """Return a sentence on what isn't restored in another number of ranks; none if there is nothing."""
        names = ", ".join([*self._trackables, *self._generators])
        return [f"{names} (per_rank): as this script has made them; an optimizer begins at step 0"] if names else []

    def write(self, prefix: Path, differing: Mapping[str, Any]) -> None:
        """Write everything, and the variables of the shared part that have other values than those written there, by
        path.
        """
        if self._trackables:
            tf.train.Checkpoint(**self._trackables).write(str(prefix))
        if differing:
            values = [tf.convert_to_tensor(variable) for variable in differing.values()]
            tf.raw_ops.SaveV2(
                prefix=f"{prefix}.differing",
                tensor_names=list(differing),
                shape_and_slices=[""] * len(differing),
                tensors=values,
            )
        record = {
            "random": _state_of_process(),
            "generators": {name: _state_of_generator(thing) for name, thing in self._generators.items()},
            "differing": list(differing),
        }
        with Path(f"{prefix}.json").open("w", encoding="utf-8") as file:
            json.dump(record, file)

    def read(self, prefix: Path, variables: Mapping[str, Any]) -> list[str]:
        """Read what ``write`` has written, given the variables of the shared part by path; return what could not be
        kept.
        """
        record = json.loads(Path(f"{prefix}.json").read_text(encoding="utf-8"))
        lost = []
        if self._trackables:
            if Path(f"{prefix}.index").exists():
                tf.train.Checkpoint(**self._trackables).read(str(prefix)).assert_existing_objects_matched()
            else:
                lost.append(f"{', '.join(self._trackables)}: not in the checkpoint")
        for name, thing in self._generators.items():
            if name in record["generators"]:
                _set_generator(thing, record["generators"][name])
            else:
                lost.append(f"{name}: not in the checkpoint")
        known = [path for path in record["differing"] if path in variables]
        _assign(f"{prefix}.differing", known, variables)
        lost += [f"{path}: it doesn't exist yet" for path in record["differing"] if path not in variables]
        _set_process(record["random"])
        return lost


def _assign(prefix: str, paths: Sequence[str], variables: Mapping[str, Any]) -> None:
    if paths:
        values = tf.raw_ops.RestoreV2(
            prefix=prefix,
            tensor_names=list(paths),
            shape_and_slices=[""] * len(paths),
            dtypes=[tf.as_dtype(variables[path].dtype) for path in paths],
        )
        for path, value in zip(paths, values):
            variables[path].assign(value)


# Random states as plain values for JSON.


def _state_of_process() -> dict[str, Any]:
    """Return the states of ``random``, ``numpy.random``, TensorFlow's seed and its eager operations."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    seed, position = compat.random_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "tensorflow": [seed, position],
    }


def _set_process(state: dict[str, Any]) -> None:
    """Set what ``_state_of_process`` has returned, also after it has been JSON."""
    random.setstate(_tuples(state["python"]))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))
    seed, position = state["tensorflow"]
    if compat.random_state()[0] is not None or seed is not None:
        compat.set_random_state((seed, _tuples(position)))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def _state_of_generator(generator: Any) -> Any:
    """Return the state of a ``random.Random`` or a ``numpy.random.Generator``."""
    return generator.getstate() if isinstance(generator, random.Random) else _plain(generator.bit_generator.state)


def _set_generator(generator: Any, state: Any) -> None:
    """Set what ``_state_of_generator`` has returned, also after it has been JSON."""
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
