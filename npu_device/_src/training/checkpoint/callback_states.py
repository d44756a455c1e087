"""What the callbacks of a ``fit`` remember: Keras's own, and a script's with ``get_state`` and ``set_state``.

Keras gives a callback no list of the others, so the list is found in the call that begins the training.
"""

from __future__ import annotations

import logging
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.world.sent_objects import from_json, to_json

_log = logging.getLogger("npu_device")
# Attributes that a training changes; some exist in one Keras only.
_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "CSVLogger": ("keys",),
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    "History": ("epoch", "history"),
    "ModelCheckpoint": (
        "best",
        "epochs_since_last_save",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    ),
    "OrbaxCheckpoint": (
        "best",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
        "_total_batches_seen",
    ),
    "ReduceLROnPlateau": ("wait", "cooldown_counter", "best"),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "TensorBoard": ("_global_train_batch", "_global_test_batch"),
}
NO_CALLBACKS = to_json({})
_WEIGHTS = "best_weights"
_ATTRIBUTE = "attributes"
_OWN = "state"
_CONTENT = "content"
_STEPS = "steps"
_SKIPPED = "%s isn't kept in checkpoints: its state %s\nWhat to do: let get_state return numbers, strings and arrays."


class CallbackStates:
    """The callbacks beside a ``FitCheckpoint`` whose state is kept, by class and number among those of a class.

    Attributes:
        arrays: the best weights, as variables while a checkpoint is saved or restored; most often equal on all ranks.
        text: what the callbacks remembered when it was last collected.
    """

    def __init__(self, checkpoint: Any = None) -> None:
        self.arrays: list[tf.Variable] = []
        self.text = NO_CALLBACKS
        # Without Keras's list, no callbacks have a state.
        self._list = list_with(checkpoint) or types.SimpleNamespace(callbacks=[])
        self._callbacks: dict[str, Any] = {}
        self._all_callbacks: list = self._list.callbacks
        self._saved_states: dict[str, Any] = {}
        self._warned = set[str]()
        for callback in self._all_callbacks:
            has_state = hasattr(callback, "get_state") and hasattr(callback, "set_state")
            if callback is not checkpoint and (has_state or _kind(callback) is not None):
                class_name = type(callback).__name__
                ordinal = sum(name.startswith(f"{class_name}.") for name in self._callbacks)
                self._callbacks[f"{class_name}.{ordinal}"] = callback

    # For the state of each rank in a checkpoint

    def collect(self) -> None:
        """Ask the callbacks what they remember; the best weights go to ``arrays`` until they are saved."""
        # A save that has failed may have left its weights.
        self.arrays.clear()
        states = {}
        for name, callback in self._callbacks.items():
            state = _state_of(callback)
            weights = state[_ATTRIBUTE].get(_WEIGHTS)
            if weights is not None:
                # The state has dtype and shape of each weight; the weights themselves are in ``arrays``.
                state[_ATTRIBUTE][_WEIGHTS] = list(map(_dtype_and_shape, weights))
            try:
                to_json(state)
            except TypeError as error:
                if name not in self._warned:
                    self._warned.add(name)
                    _log.warning(_SKIPPED, type(callback).__name__, error)
                continue
            self.arrays.extend(map(tf.Variable, weights or ()))
            states[name] = state
        self.text = to_json(states)

    def expect(self, text: str) -> None:
        """Take the states of a checkpoint, and make the variables into which its best weights are going to be read."""
        self._saved_states = from_json(text)
        self.arrays.clear()
        for state in self._saved_states.values():
            for dtype, shape in state[_ATTRIBUTE].get(_WEIGHTS) or ():
                self.arrays.append(tf.Variable(tf.zeros(shape, dtype)))

    # In a resumed ``fit``, in this order

    def begin_files(self) -> None:
        """Give files that grow with the training the content that they had at the checkpoint, if there is one."""
        for name, callback in self._callbacks.items():
            if _kind(callback) != "CSVLogger":
                continue
            content = self._saved_states.get(name, {}).get(_CONTENT)
            if not callback.append:
                # Keras has emptied it, or will do so with this write. Ranks that share it write the same bytes.
                callback.csv_file.write(content or "")
                callback.csv_file.flush()
                callback.append_header = not content
            elif content is not None:
                callback.csv_file.close()
                with tf.io.gfile.GFile(callback.filename, "w") as file:
                    file.write(content)
                # ``on_train_begin`` opens the file again, at its end.
                callback.on_train_begin()

    def hide(self) -> None:
        """Let Keras not call the callbacks: the steps that are passed over are in their states already."""
        hidden = [self._callbacks.get(name) for name in self._saved_states]
        hidden_ids = set(map(id, hidden))
        called = [callback for callback in self._all_callbacks if id(callback) not in hidden_ids]
        # Keras gets a new list, since it may be in a loop over the old one.
        self._list.callbacks = called

    def show(self) -> None:
        """Let Keras call all callbacks again."""
        self._list.callbacks = self._all_callbacks

    def end(self) -> None:
        """Let callbacks begin their files with a header again, in another ``fit``."""
        for callback in self._callbacks.values():
            if _kind(callback) == "CSVLogger":
                callback.append_header = True

    def resume(self, step: int) -> list[str]:
        """Give the callbacks their states, within a step of the epoch; return what isn't kept, a sentence each."""
        lost_names = [name for name in self._callbacks if name not in self._saved_states]
        lost = [name.partition(".")[0] for name in lost_names]
        arrays = iter(self.arrays)
        for name, state in self._saved_states.items():
            attributes = dict(state[_ATTRIBUTE])
            if attributes.get(_WEIGHTS) is not None:
                attributes[_WEIGHTS] = [next(arrays).numpy() for _ in attributes[_WEIGHTS]]
            if name in self._callbacks:
                _set_state_of(self._callbacks[name], {**state, _ATTRIBUTE: attributes}, step)
        self.arrays.clear()
        if not lost:
            return []
        return [f"{', '.join(lost)}: not in the checkpoint; begins afresh"]


def list_with(callback: Any) -> Any:
    """Return Keras's list of callbacks that is calling one of them; None if something else calls it."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        owner = frame.f_locals.get("self")
        callbacks = getattr(owner, "callbacks", None)
        if isinstance(callbacks, list) and any(listed is callback for listed in callbacks):
            return owner
    return None


def list_of_fit() -> Any:
    """Return Keras's list of callbacks of the ``fit`` that is running; None if something else trains."""
    return next(lists_of_fits(), None)


def lists_of_fits() -> Iterator[Any]:
    """Yield Keras's list of callbacks of the ``fit`` that is running, then of those whose callbacks have called it."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        callbacks = frame.f_locals.get("callbacks")
        if hasattr(callbacks, "on_train_begin"):
            yield callbacks


def _dtype_and_shape(array: Any) -> list:
    return [array.dtype.name, list(array.shape)]


def _kind(callback: Any) -> str | None:
    """Return the name of the class of Keras whose state a callback has, also through a subclass in the script."""
    for cls in type(callback).__mro__:
        if cls.__name__ in _ATTRIBUTES and compat.belongs_to_keras(cls):
            return cls.__name__
    return None


def _state_of(callback: Any) -> dict[str, Any]:
    class_name = _kind(callback)
    names = _ATTRIBUTES.get(class_name or "", ())
    existing = [name for name in names if hasattr(callback, name)]
    attributes = {name: getattr(callback, name) for name in existing}
    state: dict[str, Any] = {_ATTRIBUTE: attributes}
    if class_name == "CSVLogger" and tf.io.gfile.exists(callback.filename):
        with tf.io.gfile.GFile(callback.filename) as file:
            state[_CONTENT] = file.read()
    if class_name == "TensorBoard":
        # A killed process would lose what the writers hold from before this checkpoint.
        for writer in callback._writers.values():
            writer.flush()
    if class_name == "OrbaxCheckpoint":
        # A killed process would lose what is still being written.
        callback.checkpointer.wait()
        state[_STEPS] = _saved_steps(callback)
    if hasattr(callback, "get_state"):
        state[_OWN] = callback.get_state()
    return state


def _saved_steps(callback: Any) -> list[int]:
    return [saved.step for saved in callback.checkpointer.checkpoints]


def _set_state_of(callback: Any, state: dict[str, Any], step: int) -> None:
    class_name = _kind(callback)
    if _OWN in state and hasattr(callback, "set_state"):
        # The step has begun while the callback was hidden, and it may measure from there.
        callback.on_train_batch_begin(step)
        callback.set_state(state[_OWN])
    for name, value in state[_ATTRIBUTE].items():
        setattr(callback, name, value)
    if class_name == "OrbaxCheckpoint":
        # Orbax refuses a step that it has, and this training is about to save the later ones again.
        for later in set(_saved_steps(callback)).difference(state[_STEPS]):
            callback.checkpointer.delete(later)
    if class_name == "TensorBoard" and callback._global_train_batch > 0:
        # The graph is in a file of the training that is resumed, and no step has made one here.
        callback._should_write_train_graph = False
        # TensorBoard's writer is told the number of a step when the step begins, and counts it then.
        callback._global_train_batch -= 1
        callback.on_train_batch_begin(step)
