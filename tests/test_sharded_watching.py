"""What the checks of equal ranks, the message at the start and the memory of each rank show of divided updates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Callable

import job
import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of, hears, settings
from divided_bodies import SHAPES, make_variables, optimizers, train, wrap
from pool import Pool
from versions import needs_keras_3

import npu_device as npu
from npu_device._src import compat
from npu_device._src.training.opening.current_world import current_world
from npu_device._src.training.sharding.remote_slots import assign_training_state

_RANKS = re.compile(r"^  rank (\d) on host ", re.MULTILINE)


@hears
def body_disturbed(said: list[str]) -> tuple[list[str], list[str]]:
    """Train while the last rank changes a variable alone: first a slot before the first step, then a weight, then the
    learning rate. Return the warnings, and the error of the step after each.
    """
    changes = npu.distribute.rank() == npu.distribute.size() - 1
    errors = []
    for changed in ("slot", "weight", "rate"):
        variables = make_variables(SHAPES, ["float32"])
        optimizer = wrap(optimizers()["adam"](), shard_optimizer=True)
        compat.build_optimizer(optimizer, variables)
        slot = optimizer.variables[-1]
        if changes and changed == "slot":
            slot.assign(tf.fill(slot.shape, 0.5))
        with settings(NPU_DEVICE_AUDIT="1"):
            train(optimizer, variables, False, 3)
            if changes and changed == "weight":
                variables[4].assign(variables[4] * 2.0)
            if changes and changed == "rate":
                optimizer.learning_rate = 0.5
            errors.append(error_of(train, optimizer, variables, False, 1))
    return list(said), errors


@pytest.mark.parametrize("keras", [pytest.param("3", marks=needs_keras_3), "2"])
def test_a_rank_that_changes_divided_training_alone_is_named(
    pool_with: Callable[..., Pool], keras: str
) -> None:
    for rank, (said, errors) in enumerate(pool_with(2, keras).run(body_disturbed)):
        if rank == 0:
            [warning] = said
            assert "the ranks begin training with different values of 1 of " in warning
            assert _RANKS.findall(warning) == ["0", "1"]
        else:
            assert said == []
        of_slot, of_weight, of_rate = errors
        assert of_slot == "", "all ranks have the slot of rank 0 then, and no audit complains"
        for error, name in ((of_weight, "v4"), (of_rate, "learning_rate")):
            assert "drifted apart: seen after step 3 (after step 2 they were equal)" in error
            assert "in 1 of " in error and name in error
            assert _RANKS.findall(error) == ["0", "1"], error


def body_averages() -> list[bool]:
    """Give all ranks the state of rank 0 before the first step; return whether each average has the memory of its
    weight, with the value of rank 0.
    """
    variables = [tf.Variable(tf.fill([300, 5], 1.0 + npu.distribute.rank())) for _ in range(4)]
    optimizer = wrap(optimizers()["averages"](), shard_optimizer=True)
    optimizer.build(variables)
    world = current_world()
    assert world is not None
    assign_training_state(world, [*variables, *optimizer.variables], 0)
    found = []
    for average, weight in zip(compat.averages_of(optimizer), variables):
        arrays = [compat.to_array(tf.convert_to_tensor(variable)) for variable in (average, weight)]
        found.append(np.shares_memory(*arrays) and bool(np.all(arrays[0] == 1.0)))
    return found


def test_averages_of_tf_keras_have_no_memory_of_their_own_before_the_first_step(
    pool_with: Callable[..., Pool],
) -> None:
    assert pool_with(2, "2").run(body_averages) == [[True] * 4] * 2


LARGE = """
import numpy as np, tensorflow as tf
import npu_device as npu
npu.open()
keras = tf.keras

def memory(which):
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith(which)]
    return int(line.split()[1]) / 1e3

layers = [keras.layers.Dense(2048, use_bias=False) for _ in range(4)]
with open("/proc/self/clear_refs", "w") as highest_mark:
    highest_mark.write("5")
before = memory("VmRSS")
model = keras.Sequential([keras.Input([2048]), *layers])
model.compile(keras.optimizers.Adam(1e-4, use_ema=True), "mse")
model = npu.distribute.replicate(model, shard_optimizer=DIVIDES)
x = np.ones([4, 2048], np.float32)
model.fit(x, x, batch_size=2, verbose=0)
model.save("FOLDER/model.keras")
print("grown by", memory("VmHWM") - before, "MB")
if DIVIDES and npu.distribute.rank() == 1:
    model.weights[2].assign(model.weights[2] * 2.0)
"""


@pytest.mark.parametrize("keras", [pytest.param("3", marks=[needs_keras_3, pytest.mark.full]), "2"])
def test_each_rank_holds_its_share_from_the_start_to_the_first_file(
    tmp_path: Path, keras: str
) -> None:
    grown: list[list[float]] = []
    for divides in ("False", "True"):
        text = LARGE.replace("DIVIDES", divides).replace("FOLDER", str(tmp_path))
        # With a fixed threshold, the C library gives freed tensors back at once, so that peaks repeat to a MB.
        outputs = job.outputs(tmp_path, 2, text, keras=keras, MALLOC_MMAP_THRESHOLD_="1048576")
        grown.append([float(output.split("grown by ")[1].split()[0]) for output in outputs])
    for whole, divided in zip(*grown):
        # Half of two moments and an average of 67 MB each, less what rank 0 fetches while it saves.
        assert divided < whole - 40, grown
    assert "  optimizer      divided over 2 ranks (Adam: 101 of 201 MB on this one)" in outputs[0]
    together = "".join(outputs)
    # The last word names the weight that rank 1 has changed after the last step.
    [said] = re.findall(r"the ranks ended with different values for 1 of .*", together)
    assert "kernel" in said and _RANKS.findall(together.split(said)[1])[:2] == ["0", "1"], together
