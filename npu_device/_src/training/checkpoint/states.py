"""The states in a checkpoint: what all ranks share; iterators, generators, states and values that each has alone."""

from __future__ import annotations

import logging
import random
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.checkpoint import next_samples
from npu_device._src.training.checkpoint.callback_states import CallbackStates
from npu_device._src.training.checkpoint.folder import CheckpointError
from npu_device._src.training.optimizers.accumulation import note_accumulators
from npu_device._src.training.watching import training_state
from npu_device._src.training.watching.digests import checksum
from npu_device._src.training.watching.partial_sums import between_updates
from npu_device._src.training.watching.training_state import random_states, set_random_states
from npu_device._src.training.watching.wrapped_optimizers import reducing_optimizer
from npu_device._src.wording import counted
from npu_device._src.world.sent_objects import from_json, to_json
from npu_device._src.world.world import World

_log = logging.getLogger("npu_device")
_UNTRACKED = "npu_untracked"
_UNKNOWN_NEXT = "the next samples of iterators can't be noted: another number of ranks would begin their data anew: %s"
Digests = dict[str, tuple[str, int]]


class SharedState:
    """The trackables of a ``JobCheckpoint`` by name: what ``tf.train.Checkpoint`` takes, and seed generators."""

    def __init__(self, trackables: Mapping[str, Any]) -> None:
        self._trackables = dict(trackables)
        self.is_waiting = False  # tf-keras reads some variables when they are made

    def checkpoint(self) -> Any:
        """Return a ``tf.train.Checkpoint`` of all variables that exist now."""
        # TensorFlow's view misses the random states of layers (Keras 3.15, tf-keras 2.20); they are added until both
        # track them.
        named = {name: trackable(component, name) for name, component in self._trackables.items()}
        # Variables are compared as objects: the same one has another path in each view.
        tracked_variables = variables_of(tf.train.Checkpoint(**named))
        tracked = set(map(id, tracked_variables.values()))
        listed = []
        for component in self._trackables.values():
            listed += _listed(component)
        missed = [variable for variable in compat.unique(listed) if id(variable) not in tracked]
        if missed:
            named[_UNTRACKED] = missed
        return tf.train.Checkpoint(**named)

    def variables(self) -> dict[str, Any]:
        """Return the variables by the path on which ``checkpoint`` reaches them."""
        return variables_of(self.checkpoint())

    def digests(self) -> Digests:
        digests = {}
        for path, variable in self.variables().items():
            value_digest = 0
            # What only one rank has can't differ, and would be sent to all.
            if not compat.is_apart(variable):
                value_digest = checksum(variable)
            # As text, since a shape may be unknown.
            digests[path] = (str(tf.TensorShape(variable.shape)), value_digest)
        return digests

    def partial_sums(self) -> dict[str, Any]:
        """Return the variables in which each rank has added up gradients since the last update, by path."""
        variables = self.variables()
        held = set(map(id, between_updates(variables.values())))
        return {path: variable for path, variable in variables.items() if id(variable) in held}

    def note_partial_sums(self, world: World, paths: Sequence[str]) -> None:
        """Note that this rank has read its own partial sums."""
        if not paths:
            return
        reducing: list = []
        for component in self._trackables.values():
            reducing += map(reducing_optimizer, training_state.optimizers(component))
        for optimizer in compat.unique(reducing):
            if compat.accumulation_steps(optimizer) > 1:
                note_accumulators(world, optimizer)

    def trained(self) -> dict[str, list[str]]:
        """Return, for each optimizer, the paths of what it is built for, in its order: those beside optimizers.

        There are none if it isn't to be built before it is read. One of tf-keras that isn't built is left out.
        """
        paths = {}
        for path, variable in self._beside_optimizers().items():
            paths[id(compat.inner_variable(variable))] = path
        candidates = []
        for model in self._models():
            candidates += model.trainable_variables
        trained: dict[str, list[str]] = {}
        for name, optimizer in self._optimizers().items():
            if not (_of_keras_3(optimizer) or compat.is_optimizer_built(optimizer)):
                continue
            inner = compat.with_inner(optimizer)[-1]
            variables = compat.trained_in_order(inner, compat.unique(candidates)) or ()
            ids = [id(compat.inner_variable(variable)) for variable in variables]
            trained[name] = []
            if paths.keys() >= set(ids):
                trained[name] = [paths[variable_id] for variable_id in ids]
        return trained

    def _beside_optimizers(self) -> dict[str, Any]:
        # An optimizer that is built is another way to what it trains.
        return variables_of(self.checkpoint(), with_optimizers=False)

    def _models(self) -> list:
        components = self._trackables.values()
        return [component for component in components if hasattr(component, "trainable_variables")]

    def _optimizers(self) -> dict[str, Any]:
        optimizers = {}
        for name, component in self._trackables.items():
            if _is_optimizer(component):
                optimizers[name] = component
        return optimizers

    def _build_optimizers(self, trained: Mapping[str, Sequence[str]]) -> None:
        """Build optimizers for what they have trained, since their state has to exist to be read."""
        variables = self._beside_optimizers()
        optimizers = self._optimizers()
        for name, paths in trained.items():
            if paths and name in optimizers and variables.keys() >= set(paths):
                compat.build_optimizer(optimizers[name], [variables[path] for path in paths])
        # Earlier releases didn't write what is trained.
        models = self._models()
        if len(models) == len(optimizers) == 1 and getattr(models[0], "built", False):
            for name in optimizers.keys() - set(trained):
                compat.build_optimizer(optimizers[name], models[0].trainable_variables)

    def read(self, prefix: Path, manifest: Mapping[str, Any]) -> list[str]:
        """Read all variables of a checkpoint; return what is in the files only, or raise CheckpointError."""
        components = list(self._trackables.values())
        self._build_optimizers(manifest.get("trained", {}))
        checkpoint = self.checkpoint()
        absent = sorted(set(manifest["variables"]) - set(variables_of(checkpoint)))
        self.is_waiting = bool(absent)
        if absent and any(map(_of_keras_3, components)):
            raise CheckpointError(
                f"{len(absent)} variable(s) of the checkpoint don't exist in this script, for instance {absent[0]}.\n"
                "Likely cause: the model or its optimizer isn't built yet, or is another one than when it was saved.\n"
                "What to do: before restore(), build the model (call it once, or give it an Input), and then the "
                "optimizer for what it trains (optimizer.build(variables))."
            )
        try:
            checkpoint.read(str(prefix)).assert_existing_objects_matched()
        except (AssertionError, ValueError, tf.errors.OpError) as error:
            raise CheckpointError(
                f"the checkpoint doesn't fit the model, optimizer or other trackables of the script: {error}\n"
                "What to do: make the same objects as in the script that saved it, under the same names."
            ) from error
        # Names in a checkpoint begin with the name of the trackable.
        counts = Counter(path.partition("/")[0] for path in absent)
        counts.pop(_UNTRACKED, None)
        # Variables of what is built later will be read then.
        lost = []
        for name, count in counts.items():
            component = self._trackables.get(name)
            if component is None or getattr(component, "built", False):
                lost.append(f"{name}: this script doesn't have {counted(count, 'variable')} of it")
        return lost


def trackable(component: Any, name: str) -> Any:
    """Return what ``tf.train.Checkpoint`` takes for a thing, or raise TypeError."""
    state = getattr(component, "state", None)
    if hasattr(state, "assign") and not isinstance(component, tf.random.Generator):
        # The variable of a Keras 3 seed generator.
        return state
    if isinstance(component, (list, tuple, dict)) or compat.is_trackable(component):
        return component
    raise TypeError(
        f"{name!r} can't be in a checkpoint: found a {type(component).__module__}.{type(component).__name__}; "
        "expected a model, an optimizer, a variable, a tf.data iterator, a random generator, or anything else that "
        "tf.train.Checkpoint takes.\nWhat to do: leave it out, or keep its value in a tf.Variable."
    )


def with_hidden_random_state(components: Mapping[str, Any]) -> list[str]:
    """Return the names of tf-keras layers whose random state is inside an operation, where nothing can read it."""
    names = []
    for component in components.values():
        if _of_keras_3(component):
            continue
        for layer, generator in compat.layers_that_draw(component):
            if compat.hides_its_state(generator):
                names.append(layer.name)
    return names


def _listed(component: Any) -> list:
    """Return variables that tf.train.Checkpoint may miss."""
    if _of_keras_3(component):
        variables = getattr(component, "variables", ())
        if not isinstance(variables, (list, tuple)):
            return []
        return list(variables)
    generators = [
        compat.generator_of_layer(layer) for layer, _ in compat.layers_that_draw(component)
    ]
    return [generator.state for generator in generators if generator is not None]


def _of_keras_3(component: Any) -> bool:
    # The base tells the Keras, also of a subclass in the script.
    modules = [cls.__module__ for cls in type(component).__mro__]
    roots = {module.partition(".")[0] for module in modules}
    return "keras" in roots and compat.of_keras_3(component)


def _is_optimizer(component: Any) -> bool:
    return hasattr(component, "apply_gradients")


def variables_of(root: Any, with_optimizers: bool = True) -> dict[str, Any]:
    """Return the variables of a ``tf.train.Checkpoint`` by the paths on which it reaches them."""
    variables = {}
    # Objects refer to each other in circles.
    visited = {id(root)}
    pending = [("", root)]
    while pending:
        path, parent = pending.pop()
        # In sorted order, a variable that is reached on two paths gets the same path on every rank.
        children = tf.train.TrackableView.children(parent)
        for name, child in sorted(children.items()):
            if id(child) in visited or (_is_optimizer(child) and not with_optimizers):
                continue
            visited.add(id(child))
            child_path = f"{path}/{name}" if path else name
            # A variable of Keras 3 is no ``tf.Variable``, and has what counts.
            if all(hasattr(child, attribute) for attribute in ("assign", "dtype", "shape")):
                variables[child_path] = child
            else:
                pending.append((child_path, child))
    return variables


class RankState:
    """The state in a ``JobCheckpoint`` that is of one rank: trackables and random generators by name."""

    def __init__(self, components: Mapping[str, Any]) -> None:
        plain = (random.Random, np.random.Generator)
        self._generators = {}
        self.callbacks = CallbackStates()
        self._trackables = {}
        for name, component in components.items():
            if isinstance(component, plain):
                self._generators[name] = component
            elif isinstance(component, CallbackStates):
                self.callbacks = component
            else:
                self._trackables[name] = trackable(component, name)

    def next_samples(self) -> dict[str, int] | None:
        """Return the checksums of the next batches of iterators by name; None, with a warning, if one can't be read."""
        try:
            return next_samples.look_ahead(self._iterators())
        except (OSError, tf.errors.OpError) as error:
            _log.warning(_UNKNOWN_NEXT, error)
            return None

    def begin_anew(
        self, world: World | None, step: int, samples: Sequence[dict[str, int]]
    ) -> list[str]:
        """Begin without this rank's state, in another number of ranks; return a sentence on each loss.

        Iterators are moved to their places if ``samples`` are what the ranks would have read next after the step.
        """
        moved = {}
        if samples:
            moved = self._iterators()
        lost = next_samples.move_on(world, moved, step, samples)
        names = [*self._trackables, *self._generators]
        states = [name for name in names if name not in moved]
        if states:
            listed = ", ".join(states)
            lost.append(
                f"{listed} (per_rank): as this script has made them; an optimizer begins at step 0"
            )
        return lost

    def _iterators(self) -> dict[str, Any]:
        iterators = {}
        for name, component in self._trackables.items():
            if isinstance(component, tf.data.Iterator):
                iterators[name] = component
        return iterators

    def expect(self, prefix: Path | None, callbacks: str) -> None:
        """Give callbacks the states that are about to be restored: this rank's own, or without a file given ones."""
        if prefix is not None:
            record = from_json(Path(f"{prefix}.json").read_text(encoding="utf-8"))
            callbacks = record.get("callbacks", callbacks)
        self.callbacks.expect(callbacks)

    def write(
        self, prefix: Path, differing: Mapping[str, Any], partial_sums: Sequence[str]
    ) -> None:
        """Write everything, and the shared variables whose values differ from those written there, by path.

        ``partial_sums`` are the paths of the partial sums among them.
        """
        if self._trackables:
            tf.train.Checkpoint(**self._trackables).write(str(prefix))
        if differing:
            tensors = list(map(tf.convert_to_tensor, differing.values()))
            tf.raw_ops.SaveV2(
                prefix=f"{prefix}.differing",
                tensor_names=list(differing),
                shape_and_slices=[""] * len(differing),
                tensors=tensors,
            )
        text = self._record(list(differing), partial_sums)
        Path(f"{prefix}.json").write_text(text, encoding="utf-8")

    def _record(self, differing: Sequence[str], partial_sums: Sequence[str]) -> str:
        states: dict[str, Any] = {}
        for name, generator in self._generators.items():
            if isinstance(generator, random.Random):
                states[name] = generator.getstate()
            else:
                states[name] = generator.bit_generator.state
        record = {
            "random": random_states(),
            "callbacks": self.callbacks.text,
            "generators": states,
            "differing": list(differing),
            "parts": list(partial_sums),
        }
        return to_json(record)

    def files(self, name: str) -> dict[str, bytes]:
        """Return what ``write`` writes under a name, without any shared variables.

        Raises:
            OSError, tf.errors.OpError: the trackables don't fit into the directory for temporary files.
        """
        files = {f"{name}.json": self._record([], []).encode()}
        if self._trackables:
            with tempfile.TemporaryDirectory() as directory:
                tf.train.Checkpoint(**self._trackables).write(f"{directory}/{name}")
                for path in sorted(Path(directory).iterdir()):
                    files[path.name] = path.read_bytes()
        return files

    def read(self, prefix: Path, variables: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Read what ``write`` has written, given the shared variables by path.

        Return what could not be kept, and the paths of the partial sums that this rank has read.
        """
        record = from_json(Path(f"{prefix}.json").read_text(encoding="utf-8"))
        lost = []
        if self._trackables:
            if Path(f"{prefix}.index").exists():
                status = tf.train.Checkpoint(**self._trackables).read(str(prefix))
                status.assert_existing_objects_matched()
            else:
                lost.append(f"{', '.join(self._trackables)}: not in the checkpoint")
        for name, generator in self._generators.items():
            state = record["generators"].get(name)
            if state is None:
                lost.append(f"{name}: not in the checkpoint")
            elif isinstance(generator, random.Random):
                generator.setstate(state)
            else:
                generator.bit_generator.state = state
        existing = {}
        for path in record["differing"]:
            if path in variables:
                existing[path] = variables[path]
            else:
                lost.append(f"{path}: it doesn't exist yet")
        if existing:
            dtypes = [tf.as_dtype(variable.dtype) for variable in existing.values()]
            tensors = tf.raw_ops.RestoreV2(
                prefix=f"{prefix}.differing",
                tensor_names=list(existing),
                shape_and_slices=[""] * len(existing),
                dtypes=dtypes,
            )
            for variable, tensor in zip(existing.values(), tensors):
                variable.assign(tensor)
        set_random_states(record["random"])
        return lost, record.get("parts", [])
