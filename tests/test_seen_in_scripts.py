"""Single things that ported scripts in TensorFlow 2 style do, each as a script would do it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import job
import numpy as np
import pytest
from pool import Pool
from ranks import table_environment


def body_batch_sizes() -> Any:
    import tensorflow as tf
    from absl import flags

    import npu_device as npu

    dataset = tf.data.Dataset.range(12)
    values = flags.FlagValues()
    _, batch_size = npu.distribute.shard_and_rebatch_dataset(dataset, np.int32(6))
    _, tokens = npu.distribute.shard_and_rebatch_dataset(dataset, 4096 * npu.open().workers_num)
    flags.DEFINE_integer("batch_size", batch_size, "of this rank", flag_values=values)
    values.mark_as_parsed()
    return values.batch_size, tokens


def test_batch_sizes_from_numpy_go_into_integer_flags(several_ranks: Pool) -> None:
    for batch_size, tokens in several_ranks.run(body_batch_sizes):
        assert batch_size == 6 // several_ranks.size  # absl refuses numpy's integers
        assert tokens == 4096


def body_tuples() -> Any:
    import tensorflow as tf

    import npu_device as npu

    rank = npu.open().worker_id
    first, second = tf.Variable(float(rank)), tf.Variable(float(rank))
    npu.distribute.broadcast((first, second))
    optimizer = npu.distribute.npu_distributed_keras_optimizer_wrapper(tf.keras.optimizers.SGD(1.0), "sum")
    gradients = npu.distribute.all_reduce((tf.constant(1.0), tf.constant(rank + 1.0)), "sum")
    optimizer.apply_gradients(((tf.constant(1.0), first), (tf.constant(2.0), second)))
    return [float(gradient) for gradient in gradients], float(first), float(second)


def test_tuples_where_lists_are_expected(keras_two_ranks: Pool) -> None:
    assert keras_two_ranks.run(body_tuples) == [([2.0, 3.0], -2.0, -4.0)] * 2


def body_frozen() -> Any:
    import tensorflow as tf

    import npu_device as npu

    rank = npu.open().worker_id
    tf.keras.utils.set_random_seed(rank)
    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(2), tf.keras.layers.Dense(1)])
    model.layers[0].trainable = False
    frozen = model.layers[0].get_weights()
    npu.distribute.broadcast(model.trainable_variables)
    kept = all(np.array_equal(a, b) for a, b in zip(frozen, model.layers[0].get_weights()))
    model.trainable = False
    npu.distribute.broadcast(model.trainable_variables, root_rank=0)
    return kept, model.layers[1].get_weights()[0].tolist()


def test_broadcast_leaves_frozen_parts_alone(keras_two_ranks: Pool) -> None:
    (kept, sent), (also_kept, received) = keras_two_ranks.run(body_frozen)
    assert kept and also_kept
    assert sent == received


def body_clip(graph: bool) -> Any:
    import tensorflow as tf

    import npu_device as npu

    rank = npu.open().worker_id
    table, dense, unused = tf.Variable(tf.ones([4, 2])), tf.Variable(tf.ones([2])), tf.Variable(1.0)

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [rank]) * dense)
        gradients = npu.distribute.all_reduce(tape.gradient(loss, [table, dense, unused]))
        gradients, norm = tf.clip_by_global_norm(gradients, 1.0)
        return tf.convert_to_tensor(gradients[0]), gradients[1], norm, gradients[2]

    first, second, norm, none = (tf.function(step) if graph else step)()
    return first.numpy(), second.numpy(), float(norm), none


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_mixed_gradients_are_clipped_by_their_global_norm(two_ranks: Pool, graph: bool) -> None:
    # Half a row of ones on each of two ranks (norm 1 together), and a dense gradient of ones (norm √2).
    for table, dense, norm, none in two_ranks.run(body_clip, graph):
        assert norm == pytest.approx(3**0.5)
        np.testing.assert_allclose(table, np.array([[1, 1], [1, 1], [0, 0], [0, 0]]) / 2 / 3**0.5, rtol=1e-6)
        np.testing.assert_allclose(dense, np.ones(2) / 3**0.5, rtol=1e-6)
        assert none is None


def body_places() -> Any:
    import threading

    import tensorflow as tf

    import npu_device as npu

    rank = npu.open().worker_id
    found: dict[str, Any] = {}
    metric = tf.keras.metrics.Mean()
    metric.update_state(rank + 1.0)
    found["numpy"] = npu.distribute.all_reduce(np.float32(rank + 1), "sum")
    found["metric"] = npu.distribute.all_reduce([metric.result()], "sum")[0]
    strategies = {
        "one": tf.distribute.OneDeviceStrategy("CPU:0"),
        "mirrored": tf.distribute.MirroredStrategy(["CPU:0"]),
    }
    for name, strategy in strategies.items():

        def replica(strategy: Any = strategy) -> Any:
            return npu.distribute.all_reduce(tf.constant(rank + 1.0), "sum")

        with strategy.scope():
            found[f"{name} eager"] = strategy.run(replica)
            found[f"{name} graph"] = tf.function(lambda run=strategy.run, replica=replica: run(replica))()

    def work() -> None:
        found["thread"] = npu.distribute.all_reduce(tf.constant(rank + 1.0), "sum")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    return {name: float(value) for name, value in found.items()}


def test_wherever_all_reduce_is_called(keras_two_ranks: Pool) -> None:
    for found in keras_two_ranks.run(body_places):
        assert set(found.values()) == {3.0}, found
        assert len(found) == 7


def body_thrown_away() -> list[float]:
    import tensorflow as tf

    import npu_device as npu

    rank = npu.open().worker_id

    @tf.function
    def step(value: Any) -> Any:
        reduced = npu.distribute.all_reduce([value, value * 2], "sum")
        return reduced[0] if rank else value  # rank 0 looks at none of them

    results = [float(step(tf.constant(rank + 1.0))) for _ in range(3)]
    npu.distribute.all_reduce(tf.constant(1.0))  # nor here
    return [*results, float(npu.distribute.all_reduce(rank + 1.0, "sum"))]


def test_a_result_that_a_rank_throws_away(two_ranks: Pool) -> None:
    assert two_ranks.run(body_thrown_away) == [[1.0, 1.0, 1.0, 3.0], [3.0, 3.0, 3.0, 3.0]]


def body_own_optimizer(when: str) -> Any:
    import tensorflow as tf

    import npu_device as npu

    base = tf.keras.optimizers.SGD if hasattr(tf.keras, "ops") else tf.keras.optimizers.legacy.SGD

    class WithDecay(base):  # type: ignore[misc, valid-type]
        """An optimizer of a script's own, as the model garden's AdamWeightDecay is one."""

        def apply_gradients(self, grads_and_vars: Any, **keywords: Any) -> Any:
            gradients, variables = zip(*list(grads_and_vars))
            gradients, _ = tf.clip_by_global_norm(gradients, clip_norm=0.2)
            return super().apply_gradients(zip(gradients, variables), **keywords)

    rank, size = npu.open().worker_id, npu.open().workers_num
    random = np.random.default_rng(0)
    x = random.standard_normal([4 * size, 3]).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)

    def train(x: Any, y: Any, wrapped: bool) -> list[Any]:
        def wrap(optimizer: Any) -> Any:
            if not wrapped:
                return optimizer
            return npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer, "sum")

        tf.keras.utils.set_random_seed(0)
        model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])
        if when == "before":
            model.compile(optimizer=wrap(WithDecay(0.1)), loss=loss)
        else:
            model.compile(optimizer=WithDecay(0.1), loss=loss)
            wrap(model.optimizer)
        for _ in range(3):
            model.train_on_batch(x, y)
        return list(model.get_weights())

    def loss(expected: Any, predicted: Any) -> Any:
        return tf.reduce_sum(tf.square(expected - predicted)) / (4 * size)

    mine, whole = train(x[rank::size], y[rank::size], True), train(x, y, False)
    return max(float(np.max(np.abs(a - b))) for a, b in zip(mine, whole))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scripts_own_optimizer_wrapped_before_or_after_compile(keras_two_ranks: Pool, when: str) -> None:
    assert max(keras_two_ranks.run(body_own_optimizer, when)) < 1e-6


STARTED_LATE = """
from hccl.split.api import set_split_strategy_by_idx, set_split_strategy_by_size
set_split_strategy_by_size([50, 50])
set_split_strategy_by_idx([0, 1, 2])
set_split_strategy_by_size([60, 20, 20])
import sys
assert "tensorflow" not in sys.modules
import npu_device as npu
npu.global_options().precision_mode = "allow_mix_precision"
npu.global_options().modify_mixlist = "not/even/there/ops_info.json"
npu.global_options().dump_config.enable_dump = False
handle = npu.open().as_default()

import tensorflow as tf
from absl import app, flags
flags.DEFINE_integer("steps", 1, "")

def main(argv):
    del argv
    assert npu.global_options().precision_mode.value == "allow_mix_precision"
    gradients = [tf.fill([4], handle.worker_id + 1.0) for _ in range(3)]
    for _ in range(flags.FLAGS.steps):
        reduced = npu.distribute.all_reduce(gradients, "sum")
    print("total", float(tf.reduce_sum(reduced)), handle.workers_num)

if __name__ == "__main__":
    app.run(main)
"""


@pytest.mark.slow
def test_split_options_and_open_come_before_everything(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STARTED_LATE)
    command = [sys.executable, str(script)]
    for result in job.run_anew([command] * 2, [table_environment(tmp_path, 2, rank) for rank in range(2)]):
        assert result.code == 0, result.output
        assert "total 36.0 2" in result.output
