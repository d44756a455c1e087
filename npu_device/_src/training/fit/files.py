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
import itertools
import json
import logging
import os
import secrets
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Callable, Optional

from npu_device._src import environment
from npu_device._src.cluster import time_limits
from npu_device._src.cluster.rank_errors import ClusterError, PeerError
from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.collectives.job import Job
from npu_device._src.compat import keras_models
from npu_device._src.threads import ThreadSwitch
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
# Whether the rank has written the path; its error's type and text.
_SaveOutcome = tuple[bool, Optional[tuple[str, str]]]


@dataclass
class _Save:
    """The newest save of a path by a rank."""

    moment: _Moment  # when the save began
    is_over: bool = False
    wrote: bool = False  # this rank has written the file, and hasn't waited for another one
    error: tuple[str, str] | None = None  # type and text of the error of the save

    @property
    def outcome(self) -> _SaveOutcome:
        return self.wrote, self.error


class Saves:
    """The saves of this rank in a job, and its answers to ranks that wait for them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rank = job.cluster.rank
        self._calls = job.counts.of(job.group(WORLD_GROUP))
        # Numbers make questions different, since the hub takes equal ones for one.
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._saves: dict[str, _Save] = {}
        # Whether this rank sees the files of a writer in a directory.
        self._shared: dict[tuple[int, str], bool] = {}
        # The saves that wait for an answer, by the rank that asks.
        self._asked: dict[int, tuple[str, _Moment, Future[_SaveOutcome]]] = {}
        job.health.on_question(_SAVE_OVER, self._answer)
        job.health.on_question(_SEES, lambda body: os.path.exists(body[0]))

    def close(self) -> None:
        """Leave what this rank has written to ranks that come to the place of a save after it has left the job."""
        with self._lock:
            wrote = {path: save.outcome for path, save in self._saves.items() if save.wrote}
        if wrote:
            with contextlib.suppress(ClusterError):
                self._job.control.set(f"{_SAVE_OVER} {self._rank}", json.dumps(wrote))

    def save(self, path: str, write: Callable[[], Any]) -> Any:
        """Let rank 0 write a path. Others wait for it and return None, or write where they can't see its file."""
        with self._lock:
            collectives = self._calls.started
            # Ranks that have made the same collectives are at the same place of the script.
            count = 1
            earlier = self._saves.pop(path, None)
            # After a collective, the count starts anew.
            if earlier is not None and earlier.moment[0] >= collectives:
                count = earlier.moment[1] + 1
            # Insertion order is the order of saves, so the first path is the one saved longest ago.
            if len(self._saves) == _REMEMBERED:
                del self._saves[next(iter(self._saves))]
            save = self._saves[path] = _Save((collectives, count))
        try:
            moment = save.moment
            if not any(self._wait_until_written_by(rank, path, moment) for rank in self._writers()):
                save.wrote = True
                return write()
        except BaseException as error:
            save.error = type(error).__name__, str(error)
            raise
        finally:
            # The end is told also after an error, which the waiting ranks raise, too.
            self._end(path, save)
        return None

    def _end(self, path: str, save: _Save) -> None:
        answers = []
        with self._lock:
            save.is_over = True
            for rank, (asked_path, moment, answer) in list(self._asked.items()):
                outcome = self._outcome(path, moment)
                if asked_path == path and outcome is not None:
                    del self._asked[rank]
                    answers.append((answer, outcome))
        # Answered outside of the lock, since a future runs its callbacks at once.
        for answer, outcome in answers:
            answer.set_result(outcome)

    # The rank that writes

    def _outcome(self, path: str, moment: _Moment) -> _SaveOutcome | None:
        """Return how the save of a path that belongs to a moment has ended; None if that isn't known yet."""
        save = self._saves.get(path)
        has_passed = self._calls.started > moment[0]
        if save is None and has_passed:
            return False, None
        if save is not None and save.is_over and (has_passed or save.moment >= moment):
            return save.outcome
        return None

    def _answer(self, body: Any) -> _SaveOutcome | Future[_SaveOutcome]:
        rank, path, collectives, count, _ = body
        moment = (collectives, count)
        with self._lock:
            outcome = self._outcome(path, moment)
            if outcome is not None:
                return outcome
            answer = Future[_SaveOutcome]()
            # This replaces a question for which the rank no longer waits.
            self._asked[rank] = (path, moment, answer)
        return answer

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
            return _exists(path)
        self._shared[writer, directory] = sees
        return sees

    def _wait_for(self, writer: int, path: str, moment: _Moment) -> _SaveOutcome:
        limit = environment.NPU_DEVICE_STALL_TIMEOUT.get()
        deadline = time.monotonic() + limit
        seconds = time_limits.FIRST_SAVE_CHECK_SECONDS
        while True:
            self._job.health.require_running()
            outcome = self._ask(writer, _SAVE_OVER, [self._rank, path, *moment], seconds)
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
        question = [*body, next(self._numbers)]
        answers = self._job.health.ask(topic, question, [rank], seconds)
        return answers.get(rank)

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


def save_parts_once(world: World, model: Any) -> None:
    """Let the models that a model consists of write as it does: a script may save its encoder only."""
    if not world.is_main:
        _notice_other_saves(world, model)
    for layer in keras_models.all_layers(model):
        for name in METHODS:
            if layer is not model and hasattr(layer, name):
                # Keras's own ``__setattr__`` would track a function as a part of the layer.
                object.__setattr__(layer, name, saving(world, getattr(layer, name)))


def _notice_other_saves(world: World, model: Any) -> None:
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
        object.__setattr__(model, name, noticing(getattr(model, name), *formats))


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


def _exists(path: str) -> bool:
    # A checkpoint of TensorFlow is several files, with suffixes.
    return os.path.exists(path) or bool(glob.glob(f"{glob.escape(path)}.*"))


def _like(class_name: str, text: str) -> Exception:
    """Return an error of a type of Python's own, so that a script that handles it does so on all ranks."""
    error_class = getattr(builtins, class_name, None)
    if isinstance(error_class, type) and issubclass(error_class, Exception):
        # The constructor of the error may take other arguments.
        with contextlib.suppress(TypeError):
            return error_class(text)
    return RuntimeError(text)
