"""The part of a checkpoint that each rank has of its own: iterators, generators, random state, and differing values."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.checkpoint.shared import trackable
from npu_device._src.training.sent_objects import from_json, to_json


class Own:
    """The part of a ``JobCheckpoint`` that is of one rank: trackables and random generators by name."""

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
        """Write everything, and the shared variables whose values differ from those written there, by path."""
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
            "random": [random.getstate(), np.random.get_state(), compat.random_state()],
            "generators": {name: _state_of_generator(thing) for name, thing in self._generators.items()},
            "differing": list(differing),
        }
        Path(f"{prefix}.json").write_text(to_json(record), encoding="utf-8")

    def read(self, prefix: Path, variables: Mapping[str, Any]) -> list[str]:
        """Read what ``write`` has written, given the shared variables by path; return what could not be kept."""
        record = from_json(Path(f"{prefix}.json").read_text(encoding="utf-8"))
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
        python, numpy, tensorflow = record["random"]
        random.setstate(python)
        np.random.set_state(numpy)
        if compat.random_state()[0] is not None or tensorflow[0] is not None:
            compat.set_random_state(tensorflow)
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


def _state_of_generator(generator: Any) -> Any:
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def _set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state
