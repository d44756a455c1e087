"""Updates divided among the ranks: after 20 steps, weights and the state of the optimizer have the bits that they have
if each rank makes all updates.
"""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any, Callable

import job
import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of, warnings_of_package
from divided_bodies import (
    SHAPES,
    assert_divided,
    bits_of,
    body_fit,
    body_same_bits,
    body_saved,
    make_variables,
    optimizers,
    repeat,
    stepping,
    train,
    wrap,
)
from pool import Pool
from versions import needs_keras_3

import npu_device as npu
from hccl.manage.api import create_group, destroy_group
from npu_device._src import compat
from npu_device._src.training.sharding.shares import bytes_of, owners_of

QUICK = [(3, "dynamic"), (2, "overwritten, accumulated")]
pytestmark = needs_keras_3
full = pytest.mark.full

NAMES = [
    "plain",
    "momentum",
    "nesterov",
    "adam",
    "amsgrad",
    "adamw",
    "rmsprop",
    "lion",
    "nadam",
    "adagrad",
    "adadelta",
    "adamax",
    "ftrl",
    "lamb",
    "averages",
    "overwritten",
    "scaled",
    "dynamic",
    "npu dynamic",
    "accumulated",
    "dynamic, accumulated",
    "averages, accumulated",
    "overwritten, accumulated",
]


COUNTED = [
    pytest.param(count, name, marks=() if (count, name) in QUICK else full)
    for count in (1, 2, 3, 4)
    for name in NAMES
]


@pytest.mark.parametrize(("count", "name"), COUNTED)
def test_weights_have_the_same_bits(pool_with: Callable[..., Pool], count: int, name: str) -> None:
    graph = (NAMES.index(name) + count) % 2 == 0
    ranks = pool_with(count, "3")
    found = ranks.run(body_same_bits, name, graph, SHAPES, ["float32"], 1, False)
    assert_divided(found, name)


@pytest.mark.parametrize("graph", [pytest.param(False, marks=full), True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "without", "sparse"),
    [
        ("momentum", SHAPES, ["float32", "float64", "float16", "bfloat16"], None, True),
        pytest.param("nadam", [(3, 2)], ["float32"], None, False, marks=full),
        pytest.param("adam", [(3, 2), (2,)], ["float32"], 0, False, marks=full),
        pytest.param("averages", [(3, 2), (2,)], ["float32"], None, False, marks=full),
        pytest.param("overwritten", [(3, 2), (2,)], ["float32"], 1, False, marks=full),
        pytest.param("adam", SHAPES, ["float32"], None, True, marks=full),
        pytest.param("momentum", SHAPES, ["float32"], 0, True, marks=full),
    ],
)
def test_what_is_special_about_variables(
    pool_with: Callable[..., Pool],
    graph: bool,
    name: str,
    shapes: list[tuple[int, ...]],
    dtypes: list[str],
    without: int | None,
    sparse: bool,
) -> None:
    ranks = pool_with(3, "3")
    found = ranks.run(body_same_bits, name, graph, shapes, dtypes, without, sparse)
    assert all(weights == found[0][1] for _, weights in found)
    assert sum(slots for slots, _ in found) >= len(shapes)


def body_group() -> list[Any]:
    """Train in a group of the last two ranks without and with divided updates; return the bits of the weights, and of
    the state that the lowest rank of the group reads.
    """
    rank = npu.distribute.rank()
    if rank == 0:
        return []
    create_group("last two", 2, [1, 2])
    bits: list[Any] = []
    for shard_optimizer in (False, True):
        variables = make_variables(SHAPES, ["float32"])
        optimizer = wrap(optimizers()["adam"](), group="last two", shard_optimizer=shard_optimizer)
        train(optimizer, variables, False, 2, without=1)
        train(optimizer, variables, True, without=1)
        state = bits_of(optimizer.variables) if rank == 1 else []
        bits.append((bits_of(variables), state))
        npu.distribute.hccl_ops.allreduce(tf.constant(1.0), "sum", group="last two")
    destroy_group("last two")
    return bits


def test_divided_updates_within_a_group_end_in_the_bits_of_whole_ones(
    pool_with: Callable[..., Pool],
) -> None:
    [none, *bits] = pool_with(3, "3").run(body_group)
    assert none == []
    for whole, divided in bits:
        assert whole == divided


def _resnet50() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's variables."""
    shapes: list[tuple[int, ...]] = []

    def convolution(size: int, inputs: int, filters: int) -> None:
        shapes.extend([(size, size, inputs, filters), (filters,), (filters,), (filters,)])

    convolution(7, 3, 64)
    channels = 64
    for filters, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            if block == 0:
                convolution(1, channels, 4 * filters)
            convolution(1, channels, filters)
            convolution(3, filters, filters)
            convolution(1, filters, 4 * filters)
            channels = 4 * filters
    return [*shapes, (2048, 1000), (1000,)]


def _bert() -> list[tuple[int, ...]]:
    """Return the shapes of the variables of BERT-base."""
    normalization = [(768,)] * 2
    layer = [*[(768, 768), (768,)] * 4, *normalization]
    layer += [(768, 3072), (3072,), (3072, 768), (768,), *normalization]
    ends = [(768, 768), (768,), (768, 2), (2,)]
    return [(30522, 768), (512, 768), *normalization, *layer * 12, *ends]


@pytest.mark.parametrize(
    ("shapes", "count"),
    [*((_resnet50, count) for count in (2, 4, 8)), *((_bert, count) for count in (2, 4))],
)
def test_shares_are_about_equal(shapes: Callable[[], list[tuple[int, ...]]], count: int) -> None:
    variables = [tf.TensorSpec(shape) for shape in shapes()]
    held = [0] * count
    for variable, owner in zip(variables, owners_of(variables, count)):
        held[owner] += bytes_of(variable)
    assert max(held) <= 1.1 * sum(held) / count


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=full)])
@pytest.mark.parametrize(
    ("name", "compiled", "built"),
    [
        ("nesterov", {"steps_per_execution": 3}, True),
        pytest.param("adam", {}, False, marks=full),
        pytest.param("momentum", {"run_eagerly": True}, False, marks=full),
        pytest.param("overwritten", {}, True, marks=full),
        pytest.param("averages", {"jit_compile": True}, False, marks=full),
        ("averages", {"swaps": True}, False),
        pytest.param("overwritten", {"swaps": True, "run_eagerly": True}, False, marks=full),
        pytest.param("dynamic", {}, False, marks=full),
        pytest.param("accumulated", {}, False, marks=full),
        pytest.param("dynamic, accumulated", {}, False, marks=full),
        pytest.param("averages, accumulated", {"swaps": True}, False, marks=full),
        pytest.param("overwritten, accumulated", {"swaps": True}, True, marks=full),
    ],
)
def test_divided_updates_in_fit_end_in_the_bits_of_whole_ones(
    pool_with: Callable[..., Pool], name: str, compiled: dict[str, Any], built: bool, count: int
) -> None:
    assert_divided(pool_with(count, "3").run(body_fit, name, compiled, built), name)


@pytest.mark.parametrize("graph", [pytest.param(False, marks=full), True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    "savers", [[0], pytest.param([2], marks=full), pytest.param([0, 1, 2], marks=full)]
)
def test_files_hold_what_they_hold_without(
    pool_with: Callable[..., Pool], tmp_path: Any, savers: list[int], graph: bool
) -> None:
    ranks = pool_with(3, "3")
    assert ranks.run(body_saved, "overwritten", str(tmp_path), savers, graph) == [[]] * 3


def body_job_checkpoint(directory: str) -> bool:
    """Restore a checkpoint of 10 steps with divided updates, with and without those; return whether all go on alike."""
    directory = npu.distribute.broadcast_object(tempfile.mkdtemp(dir=directory))
    ends = []
    for place, shard_optimizer in enumerate((True, True, False)):
        variables = make_variables(SHAPES, ["float32"])
        optimizer = wrap(optimizers()["adam"](), shard_optimizer=shard_optimizer)
        optimizer.build(variables)
        checkpoint = npu.train.JobCheckpoint(
            directory, preemption=False, optimizer=optimizer, variables=variables
        )
        if place == 0:
            train(optimizer, variables, True)
            checkpoint.save(1)
        else:
            assert checkpoint.restore() == 1
        train(optimizer, variables, place != 1)
        checkpoint.close()
        ends.append(bits_of(variables))
    return ends[0] == ends[1] == ends[2]


@full
def test_job_checkpoints_hold_all_state(pool_with: Callable[..., Pool], tmp_path: Any) -> None:
    assert pool_with(3, "3").run(body_job_checkpoint, str(tmp_path)) == [True] * 3


def body_other_assignments() -> tuple[list[bool], str]:
    """Assign slots in other ways than by files; return whether the result is that of undivided updates, and the error
    of ranks that assign different values.
    """
    rank = npu.distribute.rank()
    found = []
    for shard_optimizer in (False, True):
        variables = make_variables(SHAPES, ["float32"])
        optimizer = wrap(optimizers()["momentum"](), shard_optimizer=shard_optimizer)
        train(optimizer, variables, False, 2)
        step = stepping(optimizer, variables, True)
        repeat(step, 1)
        for slot in optimizer.variables[2:]:
            slot.assign(slot * 0.5)  # on the owner, which counts, and on all others
        train(optimizer, variables, False, 3)
        if rank == 0 or not shard_optimizer:
            store: dict[str, Any] = {}
            optimizer.save_own_variables(store)
            optimizer.load_own_variables({key: np.asarray(store[key]) * 0 for key in store})
            optimizer.iterations.assign(6)
            optimizer.learning_rate = 0.05
        repeat(step, 3)
        found.append(bits_of(variables))
    error = ""
    for slot in optimizer.variables[2:]:
        if compat.is_share(slot) and not compat.has_memory(slot):
            slot.assign(tf.fill(slot.shape, 1.0 + rank))
    try:
        train(optimizer, variables, False, 1)
    except Exception as raised:
        error = str(raised)
    return found[0] == found[1], error


def test_different_assignments_to_a_share_are_an_error(pool_with: Callable[..., Pool]) -> None:
    found = pool_with(3, "3").run(body_other_assignments)
    assert all(is_same for is_same, _ in found), found
    errors = [error for _, error in found if "have assigned" in error]
    assert errors and "crc32" in errors[0] and "load the same file" in errors[0], found


ENDS_FIRST = """
import numpy as np, tensorflow as tf, time
import npu_device as npu
npu.open()
rank = npu.distribute.rank()
variables = [tf.keras.Variable(np.full([500, 3], 1.0 + place), dtype="float32") for place in range(4)]
optimizer = npu.distribute.DistributedOptimizer(tf.keras.optimizers.Adam(0.1), shard_optimizer=True)
for step in range(8):
    optimizer.apply([tf.sin(tf.convert_to_tensor(one) * (step + rank)) for one in variables], variables)
start = time.monotonic()
while rank == 0 and time.monotonic() < start + 3:
    norms = [float(tf.norm(tf.cast(tf.convert_to_tensor(one), tf.float64))) for one in optimizer.variables]
    assert all(norm > 0 for norm in norms), norms
if rank == 0:
    print("read", len(norms))
"""


def test_a_rank_that_ends_first_hands_its_slots_over(tmp_path: Any) -> None:
    outputs = job.outputs(tmp_path, 2, ENDS_FIRST)
    assert "read 10" in outputs[0]
    for output in outputs:
        assert "differ" not in output, output
        assert "rror" not in output.replace("INTERNAL: CUDA error", ""), output


SAVED_BY_ALL = """
import atexit, gc, threading, time
import numpy as np
import tensorflow as tf
import npu_device as npu
from hccl.manage.api import create_group, destroy_group
from npu_device._src.collectives.job import current
npu.open()
rank = npu.distribute.rank()

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

# Python 3.12 refuses by itself.
atexit.register(setattr, threading.Thread, "start", refuse)

def train(group):
    variables = [tf.keras.Variable(tf.fill([500, 3], 1.0 + place), dtype="float32") for place in range(6)]
    optimizer = npu.distribute.DistributedOptimizer(tf.keras.optimizers.Adam(0.1), group=group, shard_optimizer=True)
    for step in range(3):
        optimizer.apply([tf.sin(tf.convert_to_tensor(one) + step) for one in variables], variables)
    # Rank 0 ends first, then rank 2; so does the lowest rank of the group.
    time.sleep([0, 4, 2][rank] if group == "hccl_world_group" else 0)
    store = {}
    optimizer.save_own_variables(store)
    assert len(store) == 14 and all(np.any(value) for value in store.values()), store
    np.savez(f"FOLDER/{group}-{rank}.npz", **store)

for _ in range(2):
    create_group("all", 3, [0, 1, 2])
    npu.distribute.all_reduce(1.0, group="all")
    destroy_group("all")
if rank:
    create_group("pair", 2, [1, 2])
    train("pair")
create_group("all", 3, [0, 1, 2])
npu.distribute.all_reduce(1.0, group="all")
if rank == 0:
    destroy_group("all")
train("hccl_world_group")
gc.collect()
# Nobody takes rank 0, which has destroyed its group, for one that left before a call in it.
assert not current().health.has_failed
"""


def test_every_rank_saves_at_its_end_whichever_ends_first(tmp_path: Any) -> None:
    outputs = job.outputs(tmp_path, 3, SAVED_BY_ALL.replace("FOLDER", str(tmp_path)))
    for output in outputs:
        assert "rror" not in output.replace("INTERNAL: CUDA error", ""), output
    for group, ranks in (("hccl_world_group", (0, 1, 2)), ("pair", (1, 2))):
        contents = [np.load(tmp_path / f"{group}-{rank}.npz") for rank in ranks]
        for content in contents[1:]:
            assert all(
                content[key].tobytes() == contents[0][key].tobytes() for key in contents[0].files
            )


def body_undivided(kind: str) -> tuple[list[str], list[bytes]]:
    """Train with what can't be divided; return the warnings, and the weights."""
    kinds = tf.keras.optimizers
    made: dict[str, Callable[[], Any]] = {
        "Adafactor": lambda: kinds.Adafactor(0.1),
        "Own overrides apply": lambda: type("Own", (kinds.SGD,), {"apply": kinds.SGD.apply})(0.1),
    }
    variables = make_variables(SHAPES[:3], ["float32"])
    with warnings_of_package() as heard:
        optimizer = wrap(made[kind](), shard_optimizer=True)
    train(optimizer, variables, kind != "Adafactor", 3)
    return list(heard), bits_of(variables)


@pytest.mark.parametrize("kind", ["Adafactor", "Own overrides apply"])
def test_what_cannot_be_divided_is_not(pool_with: Callable[..., Pool], kind: str) -> None:
    (heard, weights), (nothing, others) = pool_with(2, "3").run(body_undivided, kind)
    assert len(heard) == 1 and kind in heard[0] and "has no effect" in heard[0], heard
    assert not nothing
    assert weights == others


def body_disagree() -> tuple[str, str, bool]:
    """Return the errors of two calls, and of two ranks, that don't agree on dividing an optimizer; and whether slots of
    a later one are read as they are without.
    """
    optimizer = wrap(tf.keras.optimizers.SGD(0.1), shard_optimizer=True)
    model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    model = npu.distribute.replicate(model, shard_optimizer=False)
    of_calls = error_of(
        partial(model.fit, np.ones([4, 2]), np.ones([4, 1]), batch_size=4, verbose=0)
    )
    variables = make_variables(SHAPES[:3], ["float32"])
    optimizer = wrap(tf.keras.optimizers.SGD(0.1), shard_optimizer=npu.distribute.rank() == 0)
    of_ranks = error_of(train, optimizer, variables, False)
    ends = []
    for shard_optimizer in (False, True):
        variables = make_variables(SHAPES, ["float32"])
        optimizer = wrap(optimizers()["adam"](), shard_optimizer=shard_optimizer)
        train(optimizer, variables, False, 3)
        ends.append(bits_of([*variables, *optimizer.variables]))
        npu.distribute.barrier()
    return of_calls, of_ranks, ends[0] == ends[1]


def test_calls_and_ranks_that_disagree_are_an_error(pool_with: Callable[..., Pool]) -> None:
    for of_calls, of_ranks, is_same in pool_with(2, "3").run(body_disagree):
        assert "What to do: pass the same value to both, or to one." in of_calls
        assert "called different collective operations" in of_ranks
        assert is_same


def body_file_of_shares(directory: str) -> list[bytes]:
    """Train 7 steps with divided updates, and save on rank 0; return the state of all slots."""
    variables = make_variables(SHAPES, ["float32"])
    optimizer = wrap(optimizers()["adam"](), shard_optimizer=True)
    train(optimizer, variables, True, 7)
    state = bits_of([*variables, *optimizer.variables])
    if npu.distribute.rank() == 0:
        tf.train.Checkpoint(optimizer=optimizer, variables=variables).write(f"{directory}/saved")
    npu.distribute.barrier()
    return state


def body_shares_of_file(directory: str, is_built: bool) -> list[bytes]:
    """Return the state that the file holds for this number of ranks."""
    variables = make_variables(SHAPES, ["float32"])
    optimizer = wrap(optimizers()["adam"](), shard_optimizer=True)
    if is_built:
        optimizer.build(variables)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, variables=variables)
    checkpoint.read(f"{directory}/saved")
    optimizer.build(variables)
    npu.distribute.barrier()
    state = bits_of([*variables, *optimizer.variables])
    npu.distribute.barrier()
    return state


@full
@pytest.mark.parametrize("is_built", [True, False], ids=["built", "not built"])
@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (4, 1), (1, 2)])
def test_files_are_loaded_on_another_number_of_ranks(
    pool_with: Callable[..., Pool], tmp_path: Any, saving: int, loading: int, is_built: bool
) -> None:
    saved = pool_with(saving, "3").run(body_file_of_shares, str(tmp_path))
    loaded = pool_with(loading, "3").run(body_shares_of_file, str(tmp_path), is_built)
    assert loaded == saved[:1] * loading
