"""Random numbers in a training step: each rank draws its own for its samples, as one process does for all of them.

Generators keep the same state on all ranks, so that it can be saved; the rank is mixed in at the draw. Operations that
keep their state to themselves (``tf.random.normal``, most of tf-keras) get a seed per rank while the step is traced.
``draws`` finds the exceptions: what is drawn once for a whole batch stays the same on all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Callable

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.training.fit.draws import EAGER, MARK, Draw, draws_of
from npu_device._src.training.world import World

if TYPE_CHECKING:
    from npu_device._src.training.fit.step import Replaced

_APART = 1_000_003  # between the seeds of neighbouring ranks; scripts' own seeds are closer together
_SHOWN = 4


class NumbersOfRank:
    """Lets a model's training step draw the numbers of this rank, eagerly or while it is traced, from ``begin`` to
    ``end``.
    """

    def __init__(self, world: World, generators: Sequence[Any], replaced: Replaced) -> None:
        self._offset = world.rank * _APART
        self._generators = generators
        self._replaced = replaced
        self._graph: Any = None
        self._first = 0
        self._seed: int | None = None
        self._before: Any = None

    def begin(self) -> None:
        """Mix the rank into what generators return, and into the seed of the graph that is being traced."""
        if environment.NPU_DEVICE_STEP_RANDOM.get() == "same":
            return
        for generator in self._generators:
            name = "skip" if isinstance(generator, tf.random.Generator) else "next"
            self._replaced.replace(generator, name, self._mixed)
        if tf.executing_eagerly():
            self._before = compat.random_state()
            return
        graph = tf.compat.v1.get_default_graph()
        if isinstance(graph, compat.FuncGraph):
            self._graph, self._first, self._seed = graph, len(graph.get_operations()), graph.seed
            if self._seed is not None:
                graph.seed = self._seed + self._offset

    def end(self) -> None:
        if self._graph is not None:
            self._graph.seed = self._seed

    def settle(self, share: Any, weights: Sequence[Any]) -> list[Draw]:
        """Give all ranks the same numbers where a step that has been traced draws once for the whole batch.

        Return the step's draws; of an eager step only that it draws by ``tf.random``, the same on all ranks.
        """
        if self._graph is None:
            drew = self._before is not None and self._before != compat.random_state()
            return [Draw("tf.random", stateful=True, shared=EAGER)] if drew else []
        samples = [leaf for leaf in tf.nest.flatten(share, expand_composites=True) if tf.is_tensor(leaf)]
        shapes = {tuple(weight.shape) for weight in weights}
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
        offset = (
            [*zeros, self._offset]
            if isinstance(getattr(own, "__self__", None), tf.random.Generator)
            else [self._offset, *zeros]
        )
        return tf.add(state, tf.constant(offset, state.dtype), name=MARK)


def _replace_output(operation: tf.Operation, tensor: tf.Tensor) -> None:
    [before] = operation.outputs
    for user in before.consumers():
        for place, each in enumerate(user.inputs):
            if each is before:
                compat.replace_input(user, place, tensor)


def report(model: Any, draws: Sequence[Draw]) -> None:
    """Write to stderr how the ranks draw the random numbers of a step, if it draws any (see ``statement``)."""
    if draws and environment.NPU_DEVICE_STATEMENT.get() == "on":
        print("\n".join(lines(model, draws)), file=sys.stderr, flush=True)


def lines(model: Any, draws: Sequence[Draw]) -> list[str]:
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
    names = list(dict.fromkeys(draw.name for draw in draws))
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
