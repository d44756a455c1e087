"""What is noticed while ranks train: gradients that aren't reduced, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from pool import Pool

APART = "the ranks apply gradients that were not reduced: the optimizer "


def body_trains(how: str, graph: bool, steps: int = 10) -> list[str]:
    """Train in one of several ways, and return what this rank said."""
    import logging

    import numpy as np
    import tensorflow as tf

    import npu_device as npu

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("npu_device").addHandler(handler)
    keras, rank = tf.keras, npu.distribute.rank()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([6]), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)])
    npu.distribute.broadcast(model.variables)
    optimizer = keras.optimizers.SGD(0.01)
    if how in ("wrapped", "loss scale"):
        optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer)
    if how == "loss scale":
        optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer)
    variables = model.trainable_variables
    sums = [tf.Variable(tf.zeros(variable.shape)) for variable in variables]

    def gradients_of(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - 1) ** 2)
        return loss, tape.gradient(loss, variables)

    def step(x: Any) -> None:
        loss, gradients = gradients_of(x)
        if how in ("by hand", "sum"):
            gradients = npu.distribute.all_reduce(gradients, "sum" if how == "sum" else "mean")
        elif how == "one by one":
            gradients = [npu.distribute.all_reduce(gradient) for gradient in gradients]
        elif how == "clipped":
            gradients, _ = tf.clip_by_global_norm(npu.distribute.all_reduce(gradients), 1e-3)
        elif how == "collected":
            for own, reduced in zip(sums, npu.distribute.all_reduce(gradients)):
                own.assign(0.5 * own + reduced)
            gradients = [own + 0.0 for own in sums]
        elif how == "discarded":
            npu.distribute.all_reduce(gradients)
        elif how == "loss only":
            npu.distribute.all_reduce(loss)
        optimizer.apply_gradients(zip(gradients, variables))

    def step_on_rank_0(x: Any) -> None:
        _, gradients = gradients_of(x)
        if rank == 0:
            optimizer.apply_gradients(zip(gradients, variables))

    call: Any = step_on_rank_0 if how == "on rank 0" else step
    call = tf.function(call) if graph else call
    rng = np.random.default_rng(rank)
    try:
        for _ in range(steps):
            call(tf.constant(rng.normal(size=(4, 6)), tf.float32))
        npu.distribute.barrier()
        return said
    finally:
        logging.getLogger("npu_device").removeHandler(handler)


REDUCED = ["wrapped", "loss scale", "by hand", "sum", "one by one", "clipped", "collected", "on rank 0"]


@pytest.mark.alternating
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("how", REDUCED)
def test_there_is_no_false_alarm(several_keras_ranks: Pool, how: str, graph: bool) -> None:
    assert not any(several_keras_ranks.run(body_trains, how, graph))


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("how", ["discarded", "loss only"])
def test_gradients_that_are_not_reduced_are_named_within_ten_steps(keras_ranks: Pool, how: str, graph: bool) -> None:
    said = [text for texts in keras_ranks.run(body_trains, how, graph) for text in texts]
    if len(keras_ranks.run(body_trains, "wrapped", graph, 1)) == 1:
        assert said == []
        return
    [text] = said
    assert text.startswith(f"{APART}SGD has made ")
    discarded = "gradients = npu.distribute.all_reduce(gradients), and apply those" in text
    assert discarded is (how == "discarded")
    assert discarded or "a loss that is reduced for printing reduces no gradient" in text
