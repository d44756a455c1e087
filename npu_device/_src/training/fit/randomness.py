"""Random numbers in a training step: each rank draws its own for its samples, as one process does for all of them.

Generators keep the same state on all ranks, so that it can be saved; the rank is mixed in at the draw. Operations that
keep their state to themselves (``tf.random.normal``, most of tf-keras) get a seed per rank while the step is traced.
``draws`` finds the exceptions: what is drawn once for a whole batch stays the same on all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Callable

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.training import training_state
from npu_device._src.training.fit.draws import MARK, Draw, draws_of
from npu_device._src.training.world import World

if TYPE_CHECKING:
    from npu_device._src.training.fit.step import Replaced

_APART = 1_000_003  # between the seeds of neighbouring ranks; scripts' own seeds are closer together
_SHOWN = 4


class NumbersOfRank:
    """Lets a model's training step draw this rank's numbers, eagerly or while it is traced, from ``begin`` to ``end``.

    Args:
        world: the ranks.
        model: the model.
        replaced: replaces methods of generators, and restores them.
    """

    def __init__(self, world: World, model: Any, replaced: Replaced) -> None:
        self._offset = world.rank * _APART
        self._model = model
        self._replaced = replaced
        self._graph: Any = None
        self._first = 0
        self._seed: int | None = None

    def begin(self) -> None:
        """Mix the rank into what generators return, and into the seed of the graph that is being traced."""
        if environment.NPU_DEVICE_STEP_RANDOM.get() == "same":
            return
        for generator in _generators(self._model):
            name = "skip" if isinstance(generator, tf.random.Generator) else "next"
            self._replaced.replace(generator, name, self._mixed)
        # An eager step's tf.random stays the same on all ranks: what its Python code decides by isn't known.
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if isinstance(graph, compat.FuncGraph):
            self._graph, self._first, self._seed = graph, len(graph.get_operations()), graph.seed
            if self._seed is not None:
                graph.seed = self._seed + self._offset

    def end(self) -> None:
        """Give the graph its seed back."""
        if self._graph is not None:
            self._graph.seed = self._seed

    def settle(self, share: Any) -> list[Draw]:
        """Give all ranks the same numbers where a step that has been traced draws once for the whole batch.

        Args:
            share: the step's argument on this rank.

        Returns:
            The step's draws; none of an eager step.
        """
        if self._graph is None:
            return []
        samples = [leaf for leaf in tf.nest.flatten(share, expand_composites=True) if tf.is_tensor(leaf)]
        shapes = {tuple(weight.shape) for weight in training_state.weights(self._model)}
        draws = draws_of(self._graph, self._first, samples, shapes)
        for draw in draws:
            if draw.shared and not draw.stateful:
                _replace_output(draw.operation, draw.operation.inputs[0])
            elif draw.shared and self._seed is not None:
                compat.set_seed_of(draw.operation, self._seed)
        return draws

    def _mixed(self, own: Callable[..., tf.Tensor], *args: Any, **kwargs: Any) -> tf.Tensor:
        """Return the state to draw from: a Keras generator's seed and count, or a TensorFlow generator's count and key.
        The generator itself moves on by the same on all ranks.
        """
        state = own(*args, **kwargs)
        zeros = [0] * (int(state.shape[0]) - 1)
        offset = [*zeros, self._offset] if _is_of_tensorflow(own) else [self._offset, *zeros]
        return tf.add(state, tf.constant(offset, state.dtype), name=MARK)


def _replace_output(operation: tf.Operation, tensor: tf.Tensor) -> None:
    [before] = operation.outputs
    for user in before.consumers():
        for place, each in enumerate(user.inputs):
            if each is before:
                compat.replace_input(user, place, tensor)


def _is_of_tensorflow(own: Callable[..., Any]) -> bool:
    return isinstance(getattr(own, "__self__", None), tf.random.Generator)


def _generators(model: Any) -> list[Any]:
    """Return the generators that a model's step draws from, as far as they can be found: of its layers, among its and
    their attributes, and those of the process.
    """
    found = [compat.random_generator_of_process(), compat.seed_generator_of_keras_3()]
    for layer in [model, *compat.layers_of(model)]:
        found.append(compat.generator_of_layer(layer))
        found += training_state.attributes(layer)
    return training_state.unique(each for each in found if _is_generator(each))


def _is_generator(thing: Any) -> bool:
    if isinstance(thing, tf.random.Generator):
        return True
    return type(thing).__name__ == "SeedGenerator" and hasattr(thing, "next") and hasattr(thing, "state")


def report(model: Any, draws: Sequence[Draw]) -> None:
    """Write to stderr how the ranks draw the random numbers of a step, if it draws any (see ``statement``)."""
    if draws and environment.NPU_DEVICE_STATEMENT.get() == "on":
        print("\n".join(lines(model, draws)), file=sys.stderr, flush=True)


def lines(model: Any, draws: Sequence[Draw]) -> list[str]:
    """Return the lines of ``report``."""
    text = [f"npu_device: random numbers in the step of {type(model).__name__} {model.name!r}"]
    if any(not draw.shared for draw in draws):
        text.append(f"  each rank its own    {_names(draw for draw in draws if not draw.shared)}")
    for why in dict.fromkeys(draw.shared for draw in draws if draw.shared):
        named = _names(draw for draw in draws if draw.shared == why)
        text.append(f"  same on all ranks    {named}: {why}")
    if any(draw.decides_alone for draw in draws):
        named = _names(draw for draw in draws if draw.decides_alone)
        text.append(
            f"  each rank decides    {named}: in a function that the step calls; drawn in the step, it is shared"
        )
    if any(draw.stateful for draw in draws):
        named = _names(draw for draw in draws if draw.stateful)
        text.append(f"  not in a checkpoint  {named}: the operation keeps its state to itself")
    return text


def _names(draws: Iterable[Draw]) -> str:
    names = list(_distinct(draws))
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _distinct(draws: Iterable[Draw]) -> Iterator[str]:
    """Yield the names of what draws, without the operations inside a layer."""
    seen = set()
    for draw in draws:
        name = draw.operation.name
        place = name.rpartition("/")[0] if "/" in name else name.replace(MARK, "a generator")
        if place not in seen:
            seen.add(place)
            yield place
