"""Files that a replicated model writes: rank 0 writes each once, and the others wait until it is complete.

Rank 0 may save alone, or more often than the others, so that saving is no collective: rank 0 never waits. Another rank
asks rank 0, on the control channel, for the save that belongs to its own. Collectives are the clock: two ranks that
have called the same number of them are at the same place of the script. The save that belongs to the n-th save of a
path since a collective is rank 0's n-th one since the same collective, or any later one of that path. If rank 0 has
gone past that place without it, the call is made on some ranks only, and the rank writes by itself, unless the path is
one that rank 0 has written before.

Where the file of rank 0 can't be seen, since the hosts have no common file system, the first rank of the host writes,
and the others of that host wait for it.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import glob
import json
import logging
import os
import secrets
import threading
import time
from concurrent.futures import Future
from typing import Any, Callable, Optional

from npu_device._src import environment
from npu_device._src.cluster import time_limits
from npu_device._src.cluster.rank_errors import ClusterError, PeerError
from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.collectives.job import Job
from npu_device._src.compat import keras_models
from npu_device._src.threads import ThreadSwitch
from npu_device._src.training.fit.replaced import Replaced
from npu_device._src.world.world import World

METHODS = ("save", "save_weights", "export")
"""The methods of a model that write."""

_IS_REPLACED = "_npu_writes_once"
_SAVE_OVER = "save is over"
_SEES = "sees file"
_REMEMBERED = 1000  # most paths whose saves are remembered

_log = logging.getLogger("npu_device")
_by_method = ThreadSwitch()  # on while a method of a model saves
_BY_FUNCTION = (
    "%s saves the model %r by a function, such as keras.saving.save_model or tf.saved_model.save: each rank writes the "
    "file then, perhaps at the same time.\nWhat to do: model.save(path) or model.export(path), which write once; or "
    "call the function under `if npu.distribute.is_main():` only. A copy of the model in memory needs no change."
)

# How many collectives came before a save, and how many saves of the path came since then.
_Moment = tuple[int, int]
# Whether the rank has written the path, and the type and text of the error if there was one.
_SaveOutcome = tuple[bool, Optional[tuple[str, str]]]


class Saves:
    """The saves of this rank in a job, and its answers to ranks that wait for them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rank = job.cluster.rank
        self._collectives = job.counts.of(job.group(WORLD_GROUP))
        self._lock = threading.Lock()
        # By path, when its newest save by this rank began, and how that has ended, once it has.
        self._saves: dict[str, tuple[_Moment, Future[_SaveOutcome]]] = {}
        self._next_begin = Future[None]()  # ends when this rank begins another save
        # Whether this rank sees the files of a writer in a directory.
        self._shared: dict[tuple[int, str], bool] = {}
        job.health.on_question(_SAVE_OVER, self._answer)
        job.health.on_question(_SEES, lambda body: os.path.exists(body[0]))

    def close(self) -> None:
        """Leave what this rank has written to ranks that come to the place of a save after it has left the job."""
        wrote = {}
        with self._lock:
            for path, (_, outcome) in self._saves.items():
                # A save that hasn't ended is none to read.
                if outcome.done() and outcome.result()[0]:
                    wrote[path] = outcome.result()
        if wrote:
            with contextlib.suppress(ClusterError):
                self._job.control.set(f"{_SAVE_OVER} {self._rank}", json.dumps(wrote))

    def save(self, path: str, write: Callable[[], Any]) -> Any:
        """Let rank 0 write a path. Others wait for it and return None, or write where they can't see its file."""
        with self._lock:
            collectives = self._collectives.started
            # Ranks that have made the same collectives are at the same place of the script.
            count = 1
            if path in self._saves:
                earlier, _ = self._saves.pop(path)
                # After a collective, the count starts anew.
                if earlier[0] >= collectives:
                    count = earlier[1] + 1
            # Insertion order is the order of saves, so the first path is the one saved longest ago.
            if len(self._saves) == _REMEMBERED:
                del self._saves[next(iter(self._saves))]
            moment = (collectives, count)
            outcome = Future[_SaveOutcome]()
            self._saves[path] = (moment, outcome)
            begin = self._next_begin
            self._next_begin = Future()
        # Ends outside of the lock, since a future runs its callbacks at once.
        begin.set_result(None)
        wrote = False
        failure = None
        try:
            writers = self._writers()
            wrote = not any(self._wait_until_written_by(rank, path, moment) for rank in writers)
            if wrote:
                return write()
        except BaseException as error:
            failure = (type(error).__name__, str(error))
            raise
        finally:
            # The end is told also after an error, which the waiting ranks raise, too.
            outcome.set_result((wrote, failure))
        return None

    # The rank that writes

    def _answer(self, body: Any) -> _SaveOutcome | Future:
        """Return how the save of a path that belongs to a moment ends; None at the next save if it isn't known."""
        path, collectives, count, _ = body
        with self._lock:
            has_passed = self._collectives.started > collectives
            if path in self._saves:
                moment, outcome = self._saves[path]
                if has_passed or moment >= (collectives, count):
                    return outcome
            elif has_passed:
                return False, None
            return self._next_begin

    # A rank that waits

    def _writers(self) -> list[int]:
        """Return the ranks that may write for this one, in the order in which they are asked."""
        hosts = self._job.cluster.hosts
        # Ranks wait for lower ones only, so that no two ever wait for each other.
        first_of_host = hosts.index(hosts[self._rank])
        return [rank for rank in sorted({0, first_of_host}) if rank < self._rank]

    def _wait_until_written_by(self, writer: int, path: str, moment: _Moment) -> bool:
        """Wait for the save of another rank; return True if it has written the path where this rank sees it."""
        wrote, error = self._wait_for(writer, path, moment)
        if error is not None:
            class_name, text = error
            failure = f"rank {writer} failed to write {path}: {class_name}: {text}"
            raise _like(
                class_name, f"rank {self._rank} waited for a file of another rank: {failure}"
            ) from PeerError(failure)
        # A path with a scheme, such as gs://, names the same file on all hosts.
        if not wrote or "://" in path:
            return wrote
        directory = os.path.dirname(path)
        sees = self._sees_files_of(writer, directory)
        # Without an answer, the rank has left.
        if sees is None:
            sees = self._shared.get((writer, directory))
        if sees is None:
            # What is there may be a file that the first rank of this host hasn't finished.
            for rank in self._writers():
                if rank > writer:
                    self._wait_for(rank, path, moment)
            # A checkpoint of TensorFlow is several files, with suffixes.
            return os.path.exists(path) or bool(glob.glob(f"{glob.escape(path)}.*"))
        self._shared[writer, directory] = sees
        return sees

    def _wait_for(self, writer: int, path: str, moment: _Moment) -> _SaveOutcome:
        limit = environment.NPU_DEVICE_STALL_TIMEOUT.get()
        deadline = time.monotonic() + limit
        seconds = time_limits.FIRST_SAVE_CHECK_SECONDS
        attempt = 0
        while True:
            self._job.health.require_running()
            # The number makes questions different, since the hub takes equal ones for one.
            attempt += 1
            outcome = self._ask(writer, _SAVE_OVER, [path, *moment, attempt], seconds)
            if outcome is not None:
                return outcome
            if self._job.health.has_left(writer):
                outcomes = {}
                with contextlib.suppress(TimeoutError):
                    outcomes = json.loads(
                        self._job.control.get(
                            f"{_SAVE_OVER} {writer}", time_limits.SAVE_LEFT_SECONDS
                        )
                    )
                return outcomes.get(path, (False, None))
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"rank {self._rank}: rank {writer} writes {path} for this one, and has neither finished nor gone "
                    f"on for {limit:g} s (NPU_DEVICE_STALL_TIMEOUT).\n"
                    f"Likely cause: rank {writer} doesn't save here, or it is slow or stopped.\n"
                    "What to do: let all ranks save to one path, or only rank 0 (`if npu.distribute.is_main():`); "
                    "set a larger limit if the file takes longer."
                )
            # The hub tells that a rank has left a moment after it stops to wait for it.
            time.sleep(time_limits.SAVE_PAUSE_SECONDS)
            # Short at first, for small files; long ones need no answer within milliseconds.
            seconds = min(2 * seconds, time_limits.LONGEST_SAVE_CHECK_SECONDS)

    def _ask(self, rank: int, topic: str, body: list, seconds: float) -> Any:
        return self._job.health.ask(topic, body, [rank], seconds).get(rank)

    def _sees_files_of(self, writer: int, directory: str) -> bool | None:
        """Return whether this rank sees the same directory as another one: a new file of the one appears to both.

        None if this rank can't write there, or the other one has left.
        """
        # A new name, because a network file system may remember that an old one wasn't there.
        name = f".npu_device-{secrets.token_hex(8)}"
        # The path stays relative to each rank's own working directory.
        neighbour = os.path.join(directory, name)
        try:
            with open(neighbour, "x"):
                pass
        except OSError:
            return None
        try:
            sees: bool | None = self._ask(
                writer, _SEES, [neighbour], time_limits.SAVE_ANSWER_SECONDS
            )
        finally:
            with contextlib.suppress(OSError):
                os.unlink(neighbour)
        return sees


def save_parts_once(world: World, model: Any, replaced: Replaced) -> None:
    """Let the models that a model consists of write as it does: a script may save its encoder only."""
    if not world.is_main:
        _notice_other_saves(world, model, replaced)
    for layer in keras_models.all_layers(model):
        for name in METHODS:
            # A layer may have a setting of this name.
            if layer is not model and callable(getattr(layer, name, None)):
                replaced.set(layer, name, saving(world, getattr(layer, name)))


def _notice_other_saves(world: World, model: Any, replaced: Replaced) -> None:
    """Warn, once, if this rank saves a model by functions of Keras or TensorFlow, which every rank does by itself."""
    is_warned = False

    def noticing(method: Callable, *formats: str) -> Callable:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_warned
            by_function = not _by_method.is_on
            if by_function and formats:
                by_function = not {*args, *kwargs.values()}.isdisjoint(formats)
            if by_function and not is_warned:
                is_warned = True
                rank_name = world.job.cluster.name_of(world.rank)
                _log.warning(_BY_FUNCTION, rank_name, model.name)
            return method(*args, **kwargs)

        return call

    for name, formats in (("save_own_variables", ()), ("_trackable_children", ("savedmodel",))):
        replaced.set(model, name, noticing(getattr(model, name), *formats))


def saving(world: World, method: Callable) -> Callable:
    """Return one of the methods of a model that write (``METHODS``) as one that every rank may call, or only rank 0."""
    if hasattr(method, _IS_REPLACED):
        return method
    write = _by_method.on()(method)
    job = world.job
    # One object serves the whole job, whatever the number of models: paths are counted together.
    saves = job.component_or_new(Saves, job)

    @functools.wraps(method)
    def save(*args: Any, **kwargs: Any) -> Any:
        first_argument = next(iter([*args, *kwargs.values()]), None)
        path = kwargs.get("filepath", first_argument)
        # A file object, for instance, is this rank's own, and written as usual.
        if job.in_fork or not isinstance(path, (str, os.PathLike)):
            return write(*args, **kwargs)
        if not job.health.is_closed:
            # Only an open job can be asked: a script may save after its end.
            return saves.save(os.fsdecode(path), lambda: write(*args, **kwargs))
        if world.is_main:
            return write(*args, **kwargs)
        return None

    setattr(save, _IS_REPLACED, True)
    return save


def _like(class_name: str, text: str) -> Exception:
    """Return an error of a type of Python's own, so that a script that handles it does so on all ranks."""
    error_class = getattr(builtins, class_name, None)
    if isinstance(error_class, type) and issubclass(error_class, Exception):
        # The constructor of the error may take other arguments.
        with contextlib.suppress(TypeError):
            return error_class(text)
    return RuntimeError(text)
