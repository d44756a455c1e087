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
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Callable, Optional

from npu_device._src import environment
from npu_device._src.cluster import time_limits
from npu_device._src.cluster.rank_errors import ClusterError, PeerError
from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.collectives.job import Job
from npu_device._src.compat import keras_models
from npu_device._src.world.world import World

METHODS = ("save", "save_weights", "export")
"""The methods of a model that write."""

_IS_REPLACED = "_npu_writes_once"
_OVER = "save is over"
_SEES = "sees file"
_REMEMBERED = 1000  # paths

_log = logging.getLogger("npu_device")
_own = threading.local()
_BY_FUNCTION = (
    "%s saves the model %r by a function, such as keras.saving.save_model or tf.saved_model.save: each rank writes the "
    "file then, perhaps at the same time.\nWhat to do: model.save(path) or model.export(path), which write once; or "
    "call the function under `if npu.distribute.is_main():` only. A copy of the model in memory needs no change."
)

_Moment = tuple[
    int, int
]  # number of collectives before a save, and of saves of the path since then
_Outcome = tuple[
    bool, Optional[tuple[str, str]]
]  # whether the rank has written the path; its error's type and text


@dataclass
class _Save:
    """The newest save of a path by a rank."""

    moment: _Moment  # of its beginning
    is_over: bool = False
    wrote: bool = False  # this rank has written the file, and hasn't waited for another one
    error: tuple[str, str] | None = None  # type and text

    @property
    def outcome(self) -> _Outcome:
        return self.wrote, self.error


class Saves:
    """The saves of this rank in a job, and its answers to ranks that wait for them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rank = job.cluster.rank
        self._calls = job.counts.of(job.group(WORLD_GROUP))
        self._numbers = itertools.count()  # so that no two questions are the same to the hub
        self._lock = threading.Lock()
        self._saves: dict[str, _Save] = {}
        self._asked: dict[int, tuple[str, _Moment, Future[_Outcome]]] = {}  # by the rank that waits
        job.health.on_question(_OVER, self._answer)
        job.health.on_question(_SEES, lambda body: os.path.exists(body[0]))

    def close(self) -> None:
        """Leave what this rank has written to ranks that come to the place of a save after it has left the job."""
        with self._lock:
            wrote = {path: save.outcome for path, save in self._saves.items() if save.wrote}
        if wrote:
            with contextlib.suppress(ClusterError):
                self._job.store.set(f"{_OVER} {self._rank}", json.dumps(wrote))

    def save(self, path: str, write: Callable[[], Any]) -> Any:
        """Let rank 0 write a path. Others wait for it and return None, or write where they can't see its file."""
        with self._lock:
            begun, before = self._calls.started, self._saves.pop(path, None)
            count = 1 if before is None or before.moment[0] < begun else before.moment[1] + 1
            if len(self._saves) == _REMEMBERED:
                del self._saves[next(iter(self._saves))]
            save = self._saves[path] = _Save((begun, count))
        try:
            if not any(self._is_written_by(rank, path, save.moment) for rank in self._writers()):
                save.wrote = True
                return write()
        except BaseException as error:
            save.error = type(error).__name__, str(error)
            raise
        finally:
            self._end(path, save)
        return None

    def _end(self, path: str, save: _Save) -> None:
        answers = []
        with self._lock:
            save.is_over = True
            for rank, (asked, moment, answer) in list(self._asked.items()):
                outcome = self._outcome(path, moment) if asked == path else None
                if outcome is not None:
                    del self._asked[rank]
                    answers.append((answer, outcome))
        for answer, outcome in answers:
            answer.set_result(outcome)

    # On the rank that writes

    def _outcome(self, path: str, moment: _Moment) -> _Outcome | None:
        """Return how the save of a path that belongs to a moment has ended; None if that isn't known yet."""
        save, has_passed = self._saves.get(path), self._calls.started > moment[0]
        if save is None:
            return (False, None) if has_passed else None
        return save.outcome if save.is_over and (has_passed or save.moment >= moment) else None

    def _answer(self, body: Any) -> _Outcome | Future[_Outcome]:
        rank, path, begun, count, _ = body
        with self._lock:
            outcome = self._outcome(path, (begun, count))
            if outcome is not None:
                return outcome
            answer: Future[_Outcome] = Future()
            self._asked[rank] = (
                path,
                (begun, count),
                answer,
            )  # in place of one that this rank no longer waits for
        return answer

    # On a rank that waits

    def _writers(self) -> list[int]:
        """Return the ranks that may write for this one, in the order in which they are asked."""
        hosts = self._job.cluster.hosts
        return [rank for rank in sorted({0, hosts.index(hosts[self._rank])}) if rank < self._rank]

    def _is_written_by(self, writer: int, path: str, moment: _Moment) -> bool:
        """Wait for the save of another rank; return True if it has written the path where this rank sees it."""
        wrote, error = self._wait_for(writer, path, moment)
        if error is not None:
            kind, text = error
            failed = f"rank {writer} failed to write {path}: {kind}: {text}"
            raise _like(
                kind, f"rank {self._rank} waited for a file of another rank: {failed}"
            ) from PeerError(failed)
        return wrote and ("://" in path or self._sees_files_of(writer, path))

    def _wait_for(self, writer: int, path: str, moment: _Moment) -> _Outcome:
        limit = environment.NPU_DEVICE_STALL_TIMEOUT.get()
        until, seconds = time.monotonic() + limit, time_limits.FIRST_SAVE_CHECK_SECONDS
        while True:
            self._job.health.require_running()
            outcome = self._ask(writer, _OVER, [self._rank, path, *moment], seconds)
            if outcome is not None:
                return outcome
            if self._job.health.has_left(writer):
                left: dict[str, _Outcome] = {}
                with contextlib.suppress(TimeoutError):
                    left = json.loads(
                        self._job.store.get(f"{_OVER} {writer}", time_limits.SAVE_LEFT_SECONDS)
                    )
                return left.get(path, (False, None))
            if time.monotonic() >= until:
                raise TimeoutError(
                    f"rank {self._rank}: rank {writer} writes {path} for this one, and has neither finished nor gone "
                    f"on for {limit:g} s (NPU_DEVICE_STALL_TIMEOUT).\n"
                    f"Likely cause: rank {writer} doesn't save here, or it is slow or stopped.\n"
                    "What to do: let all ranks save to one path, or only rank 0 (`if npu.distribute.is_main():`); "
                    "set a larger limit if the file takes longer."
                )
            # The hub tells that a rank has left a moment after it stops to wait for it.
            time.sleep(time_limits.SAVE_PAUSE_SECONDS)
            seconds = min(2 * seconds, time_limits.LONGEST_SAVE_CHECK_SECONDS)

    def _ask(self, rank: int, kind: str, body: list[Any], seconds: float) -> Any:
        return self._job.health.ask(kind, [*body, next(self._numbers)], [rank], seconds).get(rank)

    def _sees_files_of(self, writer: int, path: str) -> bool:
        """Return True if this rank sees the same directory as another one: a new file of the one appears to both."""
        # A new name, because a network file system may remember that an old one wasn't there.
        name = f".npu_device-{secrets.token_hex(8)}"
        beside = os.path.join(
            os.path.dirname(path), name
        )  # relative to each rank's own working directory
        try:
            with open(beside, "x"):
                pass
        except OSError:  # this rank couldn't write here either
            return _exists(path)
        try:
            sees = self._ask(writer, _SEES, [beside], time_limits.SAVE_ANSWER_SECONDS)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(beside)
        return _exists(path) if sees is None else bool(sees)  # None: the rank has left


def save_parts_once(world: World, model: Any) -> None:
    """Let the models that a model consists of write as it does: a script may save its encoder only."""
    if not world.is_main:
        _notice_other_saves(world, model)
    for part in keras_models.all_layers(model):
        for name in METHODS:
            if part is not model and hasattr(part, name):
                object.__setattr__(part, name, saving(world, getattr(part, name)))


def _notice_other_saves(world: World, model: Any) -> None:
    """Warn, once, if this rank saves a model by functions of Keras or TensorFlow, which every rank does by itself."""
    said: list[bool] = []

    def noticing(own: Callable[..., Any], *kinds: str) -> Callable[..., Any]:
        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            by_function = not getattr(_own, "save", False) and (
                not kinds or {*args, *kwargs.values()} & {*kinds}
            )
            if by_function and not said:
                said.append(True)
                _log.warning(_BY_FUNCTION, world.job.cluster.name_of(world.rank), model.name)
            return own(*args, **kwargs)

        return call

    for name, kinds in (("save_own_variables", ()), ("_trackable_children", ("savedmodel",))):
        object.__setattr__(model, name, noticing(getattr(model, name), *kinds))


def saving(world: World, own: Callable[..., Any]) -> Callable[..., Any]:
    """Return one of the methods of a model that write (``METHODS``) as one that every rank may call, or only rank 0."""
    if hasattr(own, _IS_REPLACED):
        return own
    own, job = _by_method()(own), world.job
    saves = job.part(Saves)
    if saves is None:
        saves = Saves(job)
        job.add(saves)

    @functools.wraps(own)
    def save(*args: Any, **kwargs: Any) -> Any:
        given = [kwargs["filepath"]] if "filepath" in kwargs else [*args, *kwargs.values()]
        if job.in_fork or not given or not isinstance(given[0], (str, os.PathLike)):
            return own(*args, **kwargs)  # a file object, for instance, is this rank's
        if job.health.is_closed:
            return own(*args, **kwargs) if world.is_main else None
        return saves.save(os.fsdecode(given[0]), lambda: own(*args, **kwargs))

    setattr(save, _IS_REPLACED, True)
    return save


@contextlib.contextmanager
def _by_method() -> Iterator[None]:
    before, _own.save = getattr(_own, "save", False), True
    try:
        yield
    finally:
        _own.save = before


def _exists(path: str) -> bool:
    return os.path.exists(path) or bool(glob.glob(f"{glob.escape(path)}.*"))


def _like(kind: str, text: str) -> Exception:
    """Return an error of a type of Python's own, so that a script that handles it does so on all ranks."""
    python = getattr(builtins, kind, None)
    if isinstance(python, type) and issubclass(python, Exception):
        with contextlib.suppress(TypeError):  # it takes other arguments
            return python(text)
    return RuntimeError(text)
