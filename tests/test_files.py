"""What a replicated model writes: once, by rank 0, which never waits; the others can read it in their next line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import job
import numpy as np
import pytest
import tensorflow as tf
from caught_messages import error_of, warnings_of_package
from pool import Pool
from ranks import table_environment

import npu_device as npu


def make(value: float = 0.0) -> Any:
    """Return a replicated model whose weights all have a value, and the paths for which this rank's own methods are
    called; these take a while.
    """
    keras = tf.keras
    part = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(2, activation="tanh")], name="part"
    )
    model = keras.Sequential([keras.Input((3,)), part])
    model.compile("sgd", keras.losses.MeanSquaredError())
    fill(model, value)
    written: list[str] = []

    def slow(own: Any) -> Any:
        def write(path: Any, *args: Any, **kwargs: Any) -> Any:
            time.sleep(0.2)
            written.append(os.path.basename(path))
            return own(path, *args, **kwargs)

        return write

    for name in ("save", "save_weights", "export"):
        for each in (model, part):
            object.__setattr__(each, name, slow(getattr(each, name)))
    return npu.distribute.replicate(model), written


def fill(model: Any, value: float) -> None:
    model.set_weights([np.full_like(weight, value) for weight in model.get_weights()])


def value_in(weights: Any) -> float:
    [value] = {float(entry) for weight in weights for entry in np.ravel(weight)}
    return value


def body_next_line(keras_version: str, directory: str) -> Any:
    """The next line reads each kind of file, on every rank."""
    kinds = [
        ("save", "model.keras"),
        ("save", "model.h5"),
        ("save", "part.keras"),
        ("save_weights", "a.weights.h5"),
    ]
    kinds += [("export", "exported")] * 2  # the second one over the first one
    if keras_version == "2":  # a directory; TensorFlow's format
        kinds += [("save", "saved_model"), ("save_weights", "prefix")]
    found = []
    for number, (method, name) in enumerate(kinds):
        model, written = make(number)
        path = f"{directory}/{name}"
        getattr(model.get_layer("part") if name == "part.keras" else model, method)(path)
        if method == "export":
            weights = [variable.numpy() for variable in tf.saved_model.load(path).variables]
        elif method == "save":
            weights = tf.keras.models.load_model(path).get_weights()
        else:
            fill(model, -1)
            model.load_weights(path)
            weights = model.get_weights()
        found.append((name, value_in(weights), len(written)))
    return found


def body_other_numbers_of_saves(directory: str) -> Any:
    """Rank 0 saves alone and more often; each rank reads what its own save stands for."""
    main, rank = npu.distribute.is_main(), npu.distribute.rank()
    model, written = make(0)
    path = f"{directory}/model.keras"

    def value() -> float:
        return value_in(tf.keras.models.load_model(path).get_weights())

    found = {}
    if main:
        began = time.monotonic()
        model.save(path)
        found["seconds"] = time.monotonic() - began
    npu.distribute.barrier()
    fill(model, 1)
    model.save(path)
    found["after one of rank 0"] = value()
    for number in (2, 3):  # nothing in between, but that they differ
        npu.distribute.barrier()
        fill(model, number)
        model.save(path)
        fill(model, number + 0.5)
        model.save(path)
        found[f"second of {number}"] = value()
    with npu.distribute.rank_zero_first():
        model.save(f"{directory}/first.keras")
    if not main:
        model.save(f"{directory}/other{rank}.keras")
    model.save(Path(directory) / f"own{rank}.keras")
    npu.distribute.barrier()
    found["written"] = written
    return found


def body_fails_and_apart(directory: str) -> Any:
    """Return each rank's error when rank 0 can't write, and the value that is read after another try; what is said when
    the model is saved twice by a function, to a path of each rank; then the value, what has been written, and the files
    of each rank in a directory of its own, as on hosts without a common file system.
    """
    model, written = make(4)
    (Path(directory) / "file").touch()
    error = error_of(model.save, f"{directory}/file/model.keras")
    path = f"{directory}/model.keras"
    with warnings_of_package() as said:
        model.save(path)
        assert said == []
        for _ in range(2):
            tf.keras.models.save_model(model, f"{directory}/{npu.distribute.rank()}.keras")
    value = value_in(tf.keras.models.load_model(path).get_weights())
    here, mine = os.getcwd(), Path(directory) / str(npu.distribute.rank())
    mine.mkdir()
    os.chdir(mine)
    try:
        written.clear()
        model.save("model.keras")
        apart = (
            value_in(tf.keras.models.load_model("model.keras").get_weights()),
            written,
            os.listdir(),
        )
    finally:
        os.chdir(here)
    return error, value, said, apart


def body_in_fit(keras_version: str, directory: str) -> Any:
    """Callbacks: files in a new directory, read in the same call; what is printed; callbacks that write."""
    keras = tf.keras
    model, written = make(0)
    x = np.linspace(0, 1, 24).reshape(8, 3).astype(np.float32)
    read = []

    class Look(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.predict(x)
            self.model.evaluate(x, x[:, :2])
            path = f"{directory}/look.keras"
            self.model.save(path)
            same = map(
                np.array_equal,
                keras.models.load_model(path).get_weights(),
                self.model.get_weights(),
            )
            read.append(all(same))

    kinds = keras.callbacks
    given = [
        kinds.ModelCheckpoint(
            f"{directory}/new/best.keras", monitor="loss", save_best_only=True, verbose=1
        ),
        kinds.ModelCheckpoint(
            f"{directory}/new/{{epoch}}.weights.h5", save_weights_only=True, save_freq=1
        ),
        kinds.ReduceLROnPlateau(monitor="loss", min_delta=100.0, patience=1, verbose=1),
        kinds.EarlyStopping(monitor="loss", min_delta=100.0, patience=5, verbose=1),
        kinds.LearningRateScheduler(lambda epoch, rate: rate, verbose=1),
        kinds.CSVLogger(f"{directory}/log.csv", append=True),
        kinds.TensorBoard(f"{directory}/board"),
        Look(),
    ]
    if keras_version == "2":
        given.append(kinds.ModelCheckpoint(f"{directory}/new/prefix", save_weights_only=True))
        given.append(kinds.ModelCheckpoint(f"{directory}/new/saved_model"))
    elif hasattr(kinds, "SwapEMAWeights"):
        model.compile(keras.optimizers.SGD(use_ema=True, ema_momentum=0.5), "mse")
        given.insert(0, kinds.SwapEMAWeights(swap_on_epoch=True))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model.fit(x, x[:, :2], batch_size=4, epochs=2, verbose=2, callbacks=given)
    assert all(
        callback.verbose == 1
        for callback in given
        if hasattr(callback, "verbose") and callback.verbose
    )
    speaking = sum(bool(getattr(callback, "verbose", 0)) for callback in given)
    rows = len(Path(f"{directory}/log.csv").read_text().splitlines())
    files = sorted(path.name for path in Path(directory, "new").iterdir())
    npu.distribute.barrier()
    boards = len(list(Path(directory, "board", "train").glob("events*")))
    return bool(printed.getvalue()), written, read, speaking, rows, boards, files


def body_own_list(directory: str) -> Any:
    """Keras's own list of callbacks, twice."""
    keras = tf.keras
    model, _ = make(0)
    x = np.ones((8, 3), np.float32)
    stop = lambda epoch, logs: setattr(model, "stop_training", npu.distribute.is_main())  # noqa: E731
    stops = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    logger = keras.callbacks.CSVLogger(f"{directory}/log.csv", append=True)
    given = keras.callbacks.CallbackList([logger, stops], model=model, add_history=True)
    for _ in range(2):
        history = model.fit(x, x[:, :2], batch_size=4, epochs=3, verbose=0, callbacks=given)
    npu.distribute.barrier()
    assert any(isinstance(callback, keras.callbacks.CSVLogger) for callback in given.callbacks)
    return history.epoch, len(Path(f"{directory}/log.csv").read_text().splitlines())


COMMON = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import npu_device as npu
rank = npu.open().worker_id
from test_files import make, value_in
import tensorflow as tf
model, written = make(7)
"""


def test_the_next_line_reads_the_file(keras_two_ranks: Pool, tmp_path: Path) -> None:
    for rank, found in enumerate(
        keras_two_ranks.run(body_next_line, keras_two_ranks.keras, str(tmp_path))
    ):
        assert len(found) == (8 if keras_two_ranks.keras == "2" else 6)
        for number, (name, value, written) in enumerate(found):
            assert (value, written) == (number, int(rank == 0)), (rank, name)


@pytest.mark.once
def test_ranks_that_save_more_often_than_others(several_keras_ranks: Pool, tmp_path: Path) -> None:
    for rank, found in enumerate(
        several_keras_ranks.run(body_other_numbers_of_saves, str(tmp_path))
    ):
        assert rank or found.pop("seconds") < 10
        others = [f"other{rank}.keras"] if rank else ["model.keras"] * 6 + ["first.keras"]
        assert found.pop("written") == [*others, f"own{rank}.keras"]
        assert found == {"after one of rank 0": 1, "second of 2": 2.5, "second of 3": 3.5}


def test_a_save_that_fails_and_directories_of_each_rank(
    keras_two_ranks: Pool, tmp_path: Path
) -> None:
    for rank, found in enumerate(keras_two_ranks.run(body_fails_and_apart, str(tmp_path))):
        error, value, said, apart = found
        assert rank == 0 or f"rank 0 failed to write {tmp_path}/file/model.keras: " in error
        assert error and value == 4, "the next save is another one"
        assert apart == (4, ["model.keras"], ["model.keras"])
        assert [text.startswith("rank 1 ") and "model.save(path)" in text for text in said] == [
            True
        ] * rank


@pytest.mark.once
def test_callbacks_write_and_print_on_rank_0(keras_two_ranks: Pool, tmp_path: Path) -> None:
    keras = keras_two_ranks.keras
    for rank, found in enumerate(keras_two_ranks.run(body_in_fit, keras, str(tmp_path))):
        printed, written, read, speaking, rows, boards, files = found
        assert printed == bool(written) == (rank == 0)
        assert read == [True, True]
        assert speaking == 4, "the callbacks get their setting back"
        assert (rows, boards) == (3, 1)
        assert {"best.keras", "1.weights.h5", "2.weights.h5"} <= set(files)
        assert keras == "3" or {"prefix.index", "saved_model"} <= set(files)


def test_keras_own_list_of_callbacks(keras_two_ranks: Pool, tmp_path: Path) -> None:
    """Ranks stop together, and rank 0 alone writes."""
    for found in keras_two_ranks.run(body_own_list, str(tmp_path)):
        assert found == ([0], 3)


def test_hosts_without_a_common_file_system(tmp_path: Path) -> None:
    """The first rank of the second host writes for it."""
    text = """
import os
os.makedirs(f"{sys.argv[0]}.{min(rank, 1)}", exist_ok=True)
os.chdir(f"{sys.argv[0]}.{min(rank, 1)}")
model.save("model.keras")
print(value_in(tf.keras.models.load_model("model.keras").get_weights()), written)
"""
    ended = job.finish(job.start_each(tmp_path, COMMON + text, two_hosts(tmp_path)))
    assert [end.code for end in ended] == [0, 0, 0], ended
    assert [said(end) for end in ended] == [
        "7.0 ['model.keras']",
        "7.0 ['model.keras']",
        "7.0 []",
    ], ended


def test_the_file_of_a_host_is_read_when_it_is_complete(tmp_path: Path) -> None:
    """Rank 0 has left before the last rank asks, and the first rank of that host is in the middle of its file."""
    text = """
import os
os.makedirs(f"{sys.argv[0]}.{min(rank, 1)}", exist_ok=True)
os.chdir(f"{sys.argv[0]}.{min(rank, 1)}")
pause = time.sleep
def begin(seconds):
    if sys._getframe(1).f_code.co_name == "write":
        open("model.keras", "w").close()
        pause(4)
    pause(seconds)
if rank == 1:
    time.sleep = begin
if rank == 2:
    pause(2)
model.save("model.keras")
if rank > 0:
    print(value_in(tf.keras.models.load_model("model.keras").get_weights()), written)
"""
    ended = job.finish(job.start_each(tmp_path, COMMON + text, two_hosts(tmp_path)))
    assert [end.code for end in ended] == [0, 0, 0], ended
    assert [said(end) for end in ended[1:]] == ["7.0 ['model.keras']", "7.0 []"], ended


def said(end: job.Ended) -> str:
    """Return what a rank has read and written, among its warnings."""
    [line] = [line for line in end.output.splitlines() if line.startswith("7.0 ")]
    return line


def two_hosts(directory: Path) -> list[dict[str, str]]:
    """Return the environments of three ranks on this machine, the last two of which call it another host."""
    environments = [
        {**table_environment(directory, 3, rank), "NPU_DEVICE_SECRET": "ours"} for rank in range(3)
    ]
    path = Path(environments[0]["RANK_TABLE_FILE"])
    table = json.loads(path.read_text())
    [first, *others] = table["server_list"][0]["device"]
    for number, device in enumerate(others):
        device["device_id"] = environments[number + 1]["ASCEND_DEVICE_ID"] = str(number)
    servers = [
        {"server_id": "127.0.0.1", "device": [first]},
        {"server_id": "127.0.0.2", "device": others},
    ]
    path.write_text(json.dumps({**table, "server_count": "2", "server_list": servers}))
    return environments


def test_a_rank_writes_a_file_after_rank_0_has_left(tmp_path: Path) -> None:
    text = """
path = sys.argv[0] + ".keras"
if rank:
    from npu_device._src.collectives.job import current
    while not current().health.has_left(0):
        time.sleep(0.05)
model.save(path)
print(value_in(tf.keras.models.load_model(path).get_weights()), written)
"""
    ended = job.run(tmp_path, 2, COMMON + text)
    assert [said(end) for end in ended] == ["7.0 ['script.py.keras']", "7.0 []"], ended


def test_rank_0_does_not_come_and_then_dies_while_it_writes(tmp_path: Path) -> None:
    text = """
import os
path = sys.argv[0] + ".keras"
if rank == 0:
    time.sleep(5)
    time.sleep = lambda seconds: os._exit(9)
else:
    try:
        model.save(path)
    except TimeoutError as error:
        print(error)
npu.distribute.barrier()
model.save(path)
"""
    ended = job.run(tmp_path, 2, COMMON + text, NPU_DEVICE_STALL_TIMEOUT="2")
    assert (ended[0].code, ended[1].code) == (9, 1)
    output = ended[1].output
    assert "rank 1: rank 0 writes" in output and "script.py.keras" in output
    assert "2 s (NPU_DEVICE_STALL_TIMEOUT)" in output and "`if npu.distribute.is_main():`" in output
    assert "PeerError: rank 0 on host" in output and ended[1].at - ended[0].at < 10
