"""Bodies of ``test_callbacks_resume.py``: a ``fit`` whose callbacks decide, interrupted and not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fit_checkpoint_bodies as bodies
import numpy as np
import tensorflow as tf

import npu_device as npu
from npu_device._src import compat

EPOCHS = 8
NEVER = 100.0  # an improvement that no epoch brings


class Count(tf.keras.callbacks.Callback):
    """A callback of a script, which counts the steps that it has seen from their begin to their end."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self._begun = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._begun = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert self._begun
        self.steps += 1
        self._begun = False

    def get_state(self) -> Any:
        return {"steps": self.steps, "array": np.arange(3)}

    def set_state(self, state: Any) -> None:
        assert state["array"].tolist() == [0, 1, 2]
        self.steps = state["steps"]


class Steps:
    """Keeps an empty file for each step, as Orbax a folder: a step that exists is an error."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def checkpoints(self) -> list[SimpleNamespace]:
        names = [path.name for path in self._folder.glob("*.orbax")]
        return [SimpleNamespace(step=int(name.partition(".")[0])) for name in names]

    def _path(self, step: int) -> Path:
        return self._folder / f"{step}.orbax"

    def save(self, step: int) -> None:
        self._path(step).touch(exist_ok=False)

    def delete(self, step: int) -> None:
        self._path(step).unlink()

    def wait(self) -> None: ...


def orbax(folder: Path) -> Any:
    """Keras's ``OrbaxCheckpoint``, which counts and decides, without Orbax; None in a Keras without it."""
    keras_class = getattr(tf.keras.callbacks, "OrbaxCheckpoint", None)
    if keras_class is None:
        return None

    class Orbax(keras_class):  # type: ignore[misc]
        def __init__(self) -> None:
            super(keras_class, self).__init__("loss")
            self.save_freq = 4
            self.save_best_only = False
            self._batches_seen_since_last_saving = 0
            self._last_batch_seen = None
            self._total_batches_seen = 0
            self.checkpointer = Steps(folder)

        def _save_checkpoint(self, step: int, logs: Any = None) -> None:
            self.checkpointer.save(step)

        def on_train_end(self, logs: Any = None) -> None: ...

    return Orbax()


def fit(place: Path, copies: Any = None, last: bool = True) -> dict[str, Any]:
    """One run of a script; its files are beside the checkpoints, so that a copy has them, too."""
    callbacks = tf.keras.callbacks
    is_main = npu.distribute.is_main()
    # Of two ranks, each with a file of its own.
    rank = npu.distribute.rank()
    files = place / f"files{rank}"
    files.mkdir(parents=True, exist_ok=True)
    suffix = "weights.h5"
    stopping = callbacks.EarlyStopping(
        "loss", patience=4, min_delta=NEVER, restore_best_weights=True
    )
    plateau = callbacks.ReduceLROnPlateau(
        "loss", patience=1, cooldown=1, min_delta=NEVER, min_lr=1e-9
    )
    best = callbacks.ModelCheckpoint(
        str(files / f"best.{suffix}"), "loss", save_best_only=True, save_weights_only=True
    )
    often = callbacks.ModelCheckpoint(
        str(files / ("{epoch}-{batch}." + suffix)), save_freq=4, save_weights_only=True
    )
    table = callbacks.CSVLogger(str(files / "table.csv"))
    board = callbacks.TensorBoard(str(files / "board"), update_freq=1)
    count = Count()
    named = [plateau, best, often, table, board, count, stopping]
    swaps = getattr(callbacks, "SwapEMAWeights", None)
    if swaps is not None:
        named.insert(0, swaps(swap_on_epoch=True))
    saving = orbax(files)
    if saving is not None:
        named.insert(0, saving)
    model = bodies.make_model(3, wrapped=False)
    if swaps is not None:
        model.optimizer.use_ema = True
    checkpoint = npu.train.FitCheckpoint(place, every=3, preemption=False)
    named.insert(len(named) * last, checkpoint)
    if copies is not None:
        named += [copies, FailedSave(checkpoint, step=10)]
    data = bodies.make_data("dataset", 3)
    history = model.fit(**data, epochs=EPOCHS, verbose=0, callbacks=named)
    state = compat.optimizer_variables(model.optimizer, model.weights)
    return {
        "values": [*map(np.asarray, model.get_weights()), *map(np.asarray, state)],
        "history": history.history,
        "epochs": history.epoch,
        "stopped": stopping.stopped_epoch,
        "plateau": [plateau.wait, plateau.cooldown_counter, plateau.best],
        "best": best.best,
        "steps": count.steps,
        "table": (files / "table.csv").read_text() if is_main else "",
        "files": sorted(path.name for path in files.glob("*.*") if path.suffix != ".csv"),
        "board": points(files / "board") if is_main else {},
        "not_kept": checkpoint.not_kept,
    }


def points(board: Path) -> dict[str, float]:
    """What TensorBoard shows: of the points of a curve and step, the one that was written last."""
    from tensorflow.core.util import event_pb2

    found = {}
    for path in sorted(board.glob("*/events*"), key=lambda path: path.stat().st_mtime):
        for record in tf.data.TFRecordDataset(str(path)):
            event = event_pb2.Event.FromString(record.numpy())
            for value in event.summary.value:
                if value.HasField("tensor") and value.tensor.dtype == 1:
                    number = float(tf.make_ndarray(value.tensor))
                    found[f"{path.parent.name} {value.tag} {event.step}"] = number
    return found


class Copies(tf.keras.callbacks.Callback):
    """Keep what a fit has written after some steps, as if all ranks had been killed."""

    def __init__(self, place: Path, names: dict[int, str]) -> None:
        super().__init__()
        self._place = place
        self._names = names
        self._steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        if self._steps in self._names:
            # Files of other ranks grow, too.
            npu.distribute.barrier()
            bodies.copy(self._place, self._names[self._steps])
            npu.distribute.barrier()


class FailedSave(tf.keras.callbacks.Callback):
    """Let the checkpoint of a step fail: a file is in the place of the folder in which it is written."""

    def __init__(self, checkpoint: Any, step: int) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._failing = step
        self._steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        partial = self._checkpoint._job._storage.partial(self._failing)
        if self._steps == self._failing - 1 and npu.distribute.is_main():
            partial.touch()
        # The state after an epoch is saved when the next step begins.
        if self._steps == self._failing + 1:
            assert self._checkpoint._callbacks.arrays == [], "weights are kept after a failed save"
            if npu.distribute.is_main():
                assert not any(partial.parent.glob("step-*10")), "it has not failed"
                partial.unlink()


def body(directory: str, *resumed: str) -> dict[str, Any]:
    """Train without a break, and with one within the third epoch, with one after it, or once more when it has ended.

    The checkpoint before the one within the third epoch fails.
    """
    place = bodies.fresh(directory)
    copies = Copies(place, {13: "within", 16: "between"})
    results = {"whole": fit(place / "whole", copies)}
    for name in resumed:
        folder = "whole" if name == "ended" else name
        results[name] = fit(place / folder, last=name != "between")
    return results
