"""``npu.distribute.load_once``: data exist once on each host, also while a replicated model trains on them."""

from __future__ import annotations

import dataclasses
import gc
import signal
import time
from collections import OrderedDict, namedtuple
from functools import partial
from pathlib import Path
from typing import Any, Callable

import job
import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of, warnings_of_package
from fit_models import CLASS_WEIGHT, compile_model, make_model, outcome, samples
from launcher import script, start
from pool import Pool
from rank_comparison import same_bits
from ranks import all_through, time_limits

import npu_device as npu
from npu_device._src.testing.hosts import address, can_be_made, hosts, on_host
from npu_device._src.world.shared_arrays import is_shared

_MIB = 1 << 20


def _pss() -> float:
    """Return the memory of this process in MiB; what several processes map counts in parts."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("Pss:")]
    return int(line.split()[1]) / 1024


@dataclasses.dataclass(frozen=True)
class Part:
    """Data as scripts keep them."""

    images: np.ndarray
    names: list[str]


@dataclasses.dataclass
class Parts:
    """Data of a script that nests them."""

    part: Part
    made_later: Any = dataclasses.field(init=False)


Pair = namedtuple("Pair", "x y")
RECORD = np.dtype([("id", "i4"), ("name", "U3")])


def _parts(rank_of_loader: int) -> Any:
    assert npu.distribute.rank() == rank_of_loader
    images = np.arange(24, dtype="f4").reshape(2, 3, 4)
    return {
        "parts": Parts(Part(images, ["a", "b"])),
        "pair": Pair(images.T, images[:, ::2]),
        "list": [np.array(3), (np.zeros([0, 2]), images), None],
        "ordered": OrderedDict(labels=images[0] > 3, again=images[:]),
        "kinds": {
            "text": np.array(["ä", "b"]),
            "bytes": np.array([b"a", b"bc"]),
            "bfloat16": images.astype(tf.bfloat16.as_numpy_dtype),
            "days": np.array(["2026-11-27"], "M8[D]"),
            "records": np.array([(1, "one")], RECORD),
            "big-endian": images.astype(">f4"),
        },
        "masked": np.ma.array([1.0]),
    }


def _failing() -> None:
    raise ValueError("no such file")


def body_results() -> Any:
    """Return what the ranks get, and how they fail."""
    loaded = npu.distribute.load_once(_parts, 0)
    images = loaded["parts"].part.images
    labels, again = loaded["ordered"].values()
    arrays = [images, *loaded["pair"], labels, *loaded["list"][1], *loaded["kinds"].values()]
    types = [type(loaded[name]) for name in ("parts", "pair", "ordered", "masked")]
    assert types == [Parts, Pair, OrderedDict, np.ma.MaskedArray]
    # The same array in several places lies in the memory once.
    assert len({array.ctypes.data for array in (images, again, loaded["list"][1][1])}) == 1
    assert npu.distribute.size() == 1 or all(map(is_shared, [*arrays, loaded["list"][0]]))
    writes = {error_of(lambda one=array: one.__setitem__(..., 0)) for array in arrays}
    thaw = error_of(setattr, arrays[0].flags, "writeable", True)
    failed = error_of(npu.distribute.load_once, _failing)
    objects = error_of(npu.distribute.load_once, lambda: {"rows": [np.array([print])]})
    again = npu.distribute.load_once(lambda: "no arrays")
    contents = [loaded["parts"].part.names]
    contents += [(array.tolist(), str(array.dtype), array.flags.f_contiguous) for array in arrays]
    return contents, writes, thaw, failed, objects, again


def test_every_rank_gets_the_result_and_its_errors(several_ranks: Pool, single: Pool) -> None:
    read_only = {"ValueError: assignment destination is read-only"}
    [alone] = single.run(body_results)
    for rank, found in enumerate(several_ranks.run(body_results)):
        contents, writes, thaw, failed, objects, again = found
        assert contents == alone[0] and writes == alone[1] == read_only
        assert again == "no arrays" and "WRITEABLE" in thaw
        assert "TypeError: load_once: the result['rows'][0] is an array of Python obj" in objects
        assert "What to do: convert it to numbers" in objects
        assert alone[4] in objects and alone[3] in failed
        if rank:
            assert "function that load_once called failed on rank 0:\nTraceback" in failed
            assert ", in _failing\n" in failed and "What to do: fix the error on rank 0." in failed


def _train(load: Callable[[Callable[[], Any]], Any], kind: str) -> Any:
    def prepared() -> Any:
        x, y = samples()
        if kind not in ("plain", "weights", "classes"):
            x = x.astype(tf.bfloat16.as_numpy_dtype if kind == "bfloat16" else kind)
        return x, y, np.linspace(0.5, 1.5, len(x)).astype("f4")

    x, y, weights = load(prepared)
    model = make_model("functional")
    compile_model(model, "adam")
    npu.distribute.replicate(model)
    given: dict[str, Any] = {"validation_split": 0.2}
    if kind == "weights":
        given = {"sample_weight": weights, "validation_data": (x[50:], y[50:], weights[50:])}
    elif kind == "classes":
        given["class_weight"] = CLASS_WEIGHT
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, **given)
    scores = model.evaluate(x[3:], y[3:], batch_size=20, verbose=0, return_dict=True)
    predicted = model.predict(x, batch_size=10, verbose=0)
    return outcome(model, history, scores=scores, predicted=predicted)


def body_fit(*kinds: str) -> Any:
    """Train on shared arrays and on arrays of each rank."""
    npu.open()
    return [
        [_train(load, kind) for load in (npu.distribute.load_once, lambda function: function())]
        for kind in kinds
    ]


@pytest.mark.parametrize(
    "kinds",
    [
        ["plain"],
        ["float64"],
        pytest.param(["weights", "classes"], marks=pytest.mark.full),
        pytest.param(["bfloat16", ">f4", "int8", "bool"], marks=pytest.mark.full),
    ],
    ids=" and ".join,
)
def test_training_on_shared_arrays_has_the_same_bits(
    keras_two_ranks: Pool, kinds: list[str]
) -> None:
    for ranks in zip(*keras_two_ranks.run(body_fit, *kinds)):
        for shared, own in ranks:
            same_bits(shared, own)


_FITS: dict[str, dict[str, Any]] = {
    "list": {},
    "dict": {},
    "in order": {"shuffle": False},
    "within batches": {"shuffle": "batch"},
    "steps": {"batch_size": None, "steps_per_epoch": 4},
    "few steps": {"batch_size": 8, "steps_per_epoch": 3},
    "later epochs": {"initial_epoch": 1},
}


def _fit_of_two_inputs(load: Callable[[Callable[[], Any]], Any], kind: str) -> Any:
    keras = tf.keras
    keras.utils.set_random_seed(3)
    random = np.random.default_rng(1)
    left, right, y = load(
        lambda: [random.normal(size=[90, width]).astype("f4") for width in (6, 2, 1)]
    )
    first, second = keras.Input([6], name="first"), keras.Input([2], name="second")
    hidden = keras.layers.Concatenate()([keras.layers.Dense(4)(first), second])
    model = keras.Model([first, second], keras.layers.Dense(1)(keras.layers.Dropout(0.3)(hidden)))
    model.compile("adam", "mse")
    npu.distribute.replicate(model)
    x: Any = [left, right]
    if kind == "dict":
        x = {"first": left, "second": right}
    history = model.fit(x, y, **{"epochs": 3, "batch_size": 16, "verbose": 0, **_FITS[kind]})
    return outcome(model, history, epochs=history.epoch, steps=history.params["steps"])


def body_fits() -> Any:
    """Fit in each way on shared arrays and on arrays of each rank."""
    loads = (npu.distribute.load_once, lambda function: function())
    return {kind: [_fit_of_two_inputs(load, kind) for load in loads] for kind in _FITS}


@pytest.mark.full
def test_each_kind_of_fit_has_the_same_bits(keras_two_ranks: Pool) -> None:
    for fits in keras_two_ranks.run(body_fits):
        for shared, own in fits.values():
            same_bits(shared, own)


def body_strings() -> list[str]:
    """Predict from shared strings, which TensorFlow copies; return what the package warns of."""
    names = npu.distribute.load_once(lambda: np.array([["a"], ["b"], ["c"]] * 4))
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [layers.Input((1,), dtype="string"), layers.Hashing(8, output_mode="one_hot")]
    )
    npu.distribute.replicate(model)
    with warnings_of_package() as said:
        problem = error_of(model.predict, names, verbose=0)
    return [problem, *said]


def test_strings_are_not_copied_without_a_word(keras_two_ranks: Pool) -> None:
    """Keras 3 refuses arrays of fixed-length strings; tf-keras makes a tensor of them."""
    [[problem, text], other] = keras_two_ranks.run(body_strings)
    assert text.startswith("load_once: x is an array of strings (<U1, shape (12, 1)), of which")
    assert "convert strings to numbers" in text and other == [problem]
    assert problem in ("", "ValueError: Invalid dtype: str32")


def body_memory(mebibytes: int) -> Any:
    """Return the growth of this rank with loaded data and in a ``fit``, and what is mapped after the last array."""
    keras = tf.keras
    model = keras.Sequential([keras.layers.Input((256,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    npu.distribute.replicate(model)
    # What TensorFlow makes once at the first such fit doesn't count.
    small = npu.distribute.load_once(lambda: (np.zeros([2048, 256], "f4"), np.zeros(2048, "i4")))
    model.fit(*small, batch_size=32, verbose=0)
    del small
    grown = []

    class Look(keras.callbacks.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 10:
                grown.append(_pss() - before)

    npu.distribute.barrier()
    before = _pss()
    rows = mebibytes << 10
    x, y = npu.distribute.load_once(lambda: (np.ones([rows, 256], "f4"), np.ones(rows, "i4")))
    assert x.min() == 1  # has read all of it
    npu.distribute.barrier()
    grown.append(_pss() - before)
    npu.distribute.barrier()
    model.fit(x, y, batch_size=32, steps_per_epoch=40, verbose=0, callbacks=[Look()])
    model.evaluate(x, y, batch_size=32, steps=2, verbose=0)
    npu.distribute.barrier()
    assert _mapped() >= mebibytes
    del x, y
    gc.collect()
    return [*grown, _mapped()]


def _mapped() -> float:
    """Return how much memory of ``load_once`` this process maps, in MiB."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if "r--s" in line and "memfd:" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in spans) / _MIB


@pytest.mark.parametrize("mebibytes", [256, pytest.param(1024, marks=pytest.mark.full)])
def test_memory_of_four_ranks(pool_with: Callable[..., Pool], mebibytes: int) -> None:
    loaded, fitting, mapped = map(sum, zip(*pool_with(4, "3").run(body_memory, mebibytes)))
    assert loaded < 1.1 * mebibytes and fitting < 1.1 * mebibytes, (loaded, fitting)
    assert mapped == 0


def body_hosts(kind: str) -> Any:
    """Load on ranks that share no memory, as ranks of several hosts."""
    calls = []

    def load() -> Any:
        calls.append(1)
        rank = npu.distribute.rank() if kind == "different" else 0
        many = {place: np.full([2], rank) for place in range(20)}
        return {"same": np.ones(3), "x": np.full([2, 2 + rank], rank), **many}

    problem = error_of(npu.distribute.load_once, load)
    return len(calls), problem


def test_hosts_are_compared(pool_with: Callable[..., Pool]) -> None:
    ranks = pool_with(2, "3", **all_through("tensorflow"))
    assert ranks.run(body_hosts, "equal") == [(1, "")] * 2
    for count, problem in ranks.run(body_hosts, "different"):
        assert count == 1 and "the hosts have loaded different arrays:\n" in problem
        lines = [line for line in problem.splitlines() if "rank " in line]
        assert len(lines) == 2 and "same" not in problem.replace("the same files", "")
        assert "the result['x'] is int64 of shape (2, 2), checksum " in lines[0]
        assert "(2, 3), checksum " in lines[1] and "What to do: seed generators" in problem
        assert problem.count("checksum") == 20 and lines[1].endswith(" and 11 more")


_ON_HOSTS = """
    import numpy as np
    import npu_device as npu

    npu.open()
    rank = npu.distribute.rank()

    def load(differs):
        print("loads", flush=True)
        return {"same": np.ones(3), "x": np.full([2], rank if differs else 7)}

    print("sum", npu.distribute.load_once(load, False)["x"].sum(), flush=True)
    npu.distribute.load_once(load, True)
"""


@pytest.mark.full
@pytest.mark.skipif(not can_be_made(), reason="needs root, ip and tc")
def test_each_host_loads_once(tmp_path: Path) -> None:
    """Two hosts in network namespaces, with two ranks each."""
    job_of_two = ("-n", "2", "--nnodes", "2", "--master-addr", address(0), "--master-port", "29711")
    with hosts(2, gbit=1.0):
        launchers = [
            start(
                *("--node-rank", str(node), *job_of_two, script(tmp_path, _ON_HOSTS)),
                on=partial(on_host, node),
                NPU_DEVICE_SECRET="known to both",
            )
            for node in range(2)
        ]
        outputs = [launcher.communicate(timeout=200) for launcher in launchers]
    for node, output in enumerate(outputs):
        printed, said = (text.decode() for text in output)
        assert printed.count("loads\n") == printed.count(f"[{2 * node}] loads\n") == 2
        assert printed.count("sum 14\n") == 2
        for host in range(2):
            assert f"rank {2 * host} on host node{host}: the result['x'] is int64" in said
        assert ("load_once  40 B once on each of 2 hosts" in said) == (node == 0)


_SLOW = """
import os, signal, time
import npu_device as npu
npu.open()
if npu.distribute.rank() == 1:
    time.sleep(2)
npu.distribute.load_once(str)
def load():
    print("loads", flush=True)
    time.sleep(1.5)
    os.kill(os.getpid(), signal.SIGKILL)
npu.distribute.load_once(load)
"""


@pytest.mark.full
def test_the_others_wait_until_the_loading_rank_ends(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    began = time.monotonic()
    limits = time_limits(LOAD_NOTICE_SECONDS=0.4, LOAD_CHECK_SECONDS=0.2)
    ended = job.run(tmp_path, 3, _SLOW, NPU_DEVICE_STALL_WARNING="1", **limits)
    # Rank 1 was late at the first call.
    assert "rank 0 has waited 1 s in group 'hccl_world_group'" in ended[0].output
    assert ended[0].code == -signal.SIGKILL and ended[1].code == ended[2].code == 1
    assert "have waited 1 s for the function on rank 0" in ended[1].output
    assert "have waited" not in ended[2].output
    for rank in ended[1:]:
        assert "rank 0" in rank.output and "is gone" in rank.output
    assert time.monotonic() - began < 60
    assert set(Path("/dev/shm").iterdir()) <= before
