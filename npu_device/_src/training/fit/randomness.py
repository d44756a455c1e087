"""Random numbers in a training step: each rank draws its own for its samples, as one process does for all of them.

Generators keep the same state on all ranks, so that it can be saved; the rank is mixed in at the draw. Operations that
keep their state to themselves (``tf.random.normal``, most of tf-keras) get a seed per rank while the step is traced.

Exceptions are found in the graph that is traced, see ``draws``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.fit.draws import EAGER, Draw, draws_of
from npu_device._src.training.fit.random_operations import MARK
from npu_device._src.training.fit.replaced import Replaced
from npu_device._src.wording import shortened
from npu_device._src.world.world import World

# Distance between the seeds of neighbouring ranks; the seeds of a script are closer together.
_SEED_DISTANCE = 1_000_003
_SHOWN = 4


class RandomNumbers:
    """Lets a training step that begins, eager or traced, draw the numbers of this rank: mixes the rank into what
    generators return, and into the seed of the graph that is being traced.
    """

    def __init__(self, world: World, generators: Sequence, replaced: Replaced) -> None:
        self._offset = world.rank * _SEED_DISTANCE
        for generator in generators:
            # The methods that return the state to draw from, and move it on.
            name = "next"
            if isinstance(generator, tf.random.Generator):
                name = "skip"
            replaced.replace(generator, name, self._mixed)
        self._state = compat.random_state()  # of eager operations before the step
        self._graph: Any = None  # the graph that is being traced
        graph = compat.graph_being_built()
        # Only the graph of a function is a step that is traced; others keep their seed.
        if isinstance(graph, compat.FuncGraph):
            self._graph = graph
            self._first_operation = len(graph.get_operations())  # where the step begins
            self._graph_seed = graph.seed
            if graph.seed is not None:
                replaced.callback(setattr, graph, "seed", graph.seed)
                graph.seed += self._offset

    def make_common(self, share: Any, model_weights: Sequence) -> list[Draw]:
        """Give all ranks the same numbers where a traced step draws once for the whole batch; return its draws."""
        if self._graph is None and self._state == compat.random_state():
            return []
        if self._graph is None:
            # All that an eager step took from TensorFlow's own state.
            return [Draw("tf.random", is_stateful=True, common=EAGER)]
        leaves = tf.nest.flatten(share, expand_composites=True)
        samples = [leaf for leaf in leaves if tf.is_tensor(leaf)]
        weight_shapes = {tuple(weight.shape) for weight in model_weights}
        draws = draws_of(self._graph, self._first_operation, samples, weight_shapes)
        for draw in draws:
            if draw.common:
                self._make_common(draw)
        return draws

    def _make_common(self, draw: Draw) -> None:
        """Take the rank out of a draw again."""
        operation = draw.operation
        if draw.is_stateful:
            if self._graph_seed is not None:
                compat.set_seed_of(operation, self._graph_seed)
            return
        [mixed] = operation.outputs
        compat.replace_inputs(mixed.consumers(), mixed, operation.inputs[0])

    def _mixed(self, draw: Callable[..., tf.Tensor], *args: Any, **kwargs: Any) -> tf.Tensor:
        """Return the state to draw from; the generator itself moves on by the same on all ranks."""
        state = draw(*args, **kwargs)
        # A Keras generator's seed and count, or a TensorFlow generator's count and key.
        offset = [0] * int(state.shape[0])
        offset[0] = self._offset
        if isinstance(getattr(draw, "__self__", None), tf.random.Generator):
            offset.reverse()
        return tf.add(state, tf.constant(offset, state.dtype), name=MARK)


def lines(model: Any, draws: Sequence[Draw]) -> list[str]:
    """Return how the ranks draw the random numbers of a step, for rank 0 to say (``engine_text.say``)."""
    of_ranks = [draw for draw in draws if not draw.common]
    texts = [f"npu_device: random numbers in the step of {type(model).__name__} {model.name!r}"]
    texts += _line("each rank its own    {}", of_ranks)
    for reason in dict.fromkeys(draw.common for draw in draws if draw.common):
        common = [draw for draw in draws if draw.common == reason]
        texts += _line(f"same on all ranks    {{}}: {reason}", common)
    texts += _line(
        "each rank decides    {}: in a function that the step calls; drawn in the step, it is shared",
        [draw for draw in draws if draw.decides_alone],
    )
    texts += _line(
        "not in a checkpoint  {}: the operation keeps its state to itself",
        [draw for draw in draws if draw.is_stateful],
    )
    return texts


def _line(text: str, draws: Iterable[Draw]) -> list[str]:
    """Return a line that names draws; no line without any."""
    names = list(dict.fromkeys(draw.name for draw in draws))
    if not names:
        return []
    return [f"  {text.format(shortened(names, _SHOWN))}"]
