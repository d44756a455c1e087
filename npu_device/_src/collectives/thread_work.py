"""What a thread does, in terms that are the same on all ranks: its function and arguments, or the work that a pool gave
it. Nothing here communicates.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import itertools
import re
import sys
import threading
import types
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src.cluster.tracebacks import is_user_file

# Names that Python gives to threads: with numbers of a process, which differ among the ranks.
_COUNTED_NAME = re.compile(r"^(Thread|ThreadPoolExecutor|asyncio)[-_]\d+(?:_\d+)?")
_NUMBER_IN_POOL = re.compile(r"_\d+$")
# The modules whose functions the threads of pools run.
_POOLS = (
    "concurrent.futures.thread",
    "multiprocessing.pool",
)
_OWN_PACKAGE = "npu_device-"

_ATTRIBUTES = frozenset(vars(threading.Thread()))
_PLAIN = (bool, int, float, complex, str, bytes)
_MOST_ELEMENTS = 64  # parts of a list, or an object, that are compared
_MOST_LEVELS = 4
_MOST_NUMBERS = 1024  # a larger array is compared by its shape only

Place = tuple[CodeType, int]
"""The instruction of the script that a thread is at."""


# Names


def own_name(thread: threading.Thread) -> str:
    """Return the name of a thread without the numbers that depend on what else the process has started."""
    counted = _COUNTED_NAME.match(thread.name)
    if counted is not None and counted[1] == "Thread":
        # The name of the function is added here: Python 3.9 leaves it out, and every version leaves out that of a
        # class.
        target = _function_of(_target(thread) or type(thread))
        return f"Thread ({getattr(target, '__name__', '')})"
    name = _COUNTED_NAME.sub(r"\1", thread.name)
    if is_pooled(thread):
        return _NUMBER_IN_POOL.sub("", name)
    return name


def _target(thread: threading.Thread) -> Any:
    """Return the function that a thread runs; None if its class has ``run``, or when it has returned."""
    return getattr(thread, "_target", None)


def is_foreign(thread: threading.Thread) -> bool:
    """Return True for a thread that TensorFlow has started."""
    return isinstance(thread, threading._DummyThread)


def is_clear(thread: threading.Thread) -> bool:
    """Return True for a thread that the ranks can't mix up: the main one, and those of this package."""
    return thread is threading.main_thread() or thread.name.startswith(_OWN_PACKAGE)


def is_pooled(thread: threading.Thread) -> bool:
    """Return True for a thread of a pool, in which chance decides which thread gets which work."""
    return getattr(_target(thread), "__module__", None) in _POOLS


# Where a thread is


def _frames(thread: threading.Thread) -> Iterator[FrameType]:
    """Generate the frames of a thread, innermost first."""
    is_this = thread is threading.current_thread()
    frame: FrameType | None = sys._getframe(1)
    if not is_this:
        frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frames_of_script(thread: threading.Thread) -> Iterator[FrameType]:
    return (frame for frame in _frames(thread) if is_user_file(frame.f_code.co_filename))


def place_of(thread: threading.Thread) -> Place | None:
    return next(((frame.f_code, frame.f_lasti) for frame in _frames_of_script(thread)), None)


def is_at(thread: threading.Thread, place: Place | None) -> bool:
    """Return True if a thread is still in the call of a function that it has made at a place of the script."""
    return place is not None and place_of(thread) == place


def is_at_work(thread: threading.Thread) -> bool:
    """Return True unless a thread waits in a library, such as a timer, or has ended."""
    code = _code_of(thread)
    # A thread may have been started, and not run anything yet.
    is_of_script = code is not None and is_user_file(code.co_filename)
    is_at_work = is_pooled(thread) or is_of_script or any(_frames_of_script(thread))
    return thread.is_alive() and is_at_work


def _code_of(thread: threading.Thread) -> CodeType | None:
    """Return the code of what a thread runs, in a library or in the script."""
    target = _function_of(_target(thread) or type(thread).run)
    return getattr(target, "__code__", None)


_looking = threading.Lock()


def _names_in(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a frame."""
    # Until Python 3.12 a function's frame keeps the dictionary, for all who look, and with it all that was in the
    # variables.
    with _looking:
        names = frame.f_locals
        copied = dict(names)
        if type(names) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            names.clear()
    return copied


# What a thread does


@dataclass(frozen=True)
class Work:
    """What a thread does, whether it has begun it or not.

    Attributes:
        identity: the same for the same work in this process. A thread of a pool has one after the other.
        function: the name of what it runs, the same on all ranks.
        digest: of function and arguments, as far as they can be compared: equal for equal ones, on all ranks.
        is_told: whether the arguments tell threads of one function apart, or there are none.
    """

    identity: Hashable
    function: str = field(compare=False)
    digest: int = field(compare=False)
    is_told: bool = field(compare=False)


IDLE = Work("idle", "", 0, True)
"""The work of a thread of a pool that has none."""

_works = weakref.WeakKeyDictionary[threading.Thread, Work]()


def work_of(thread: threading.Thread) -> Work | None:
    """Return what a thread does, as it was when this was first asked; None for one of a pool that starts, ends, or is
    about to get some work.
    """
    if is_pooled(thread):
        return _work_in_pool(thread)
    # The work is read from what a thread was given, not from what it runs: a thread that has just been started has all
    # this, too.
    if thread not in _works:
        extra_attributes = {
            name: vars(thread)[name] for name in list(vars(thread)) if name not in _ATTRIBUTES
        }
        arguments = [*getattr(thread, "_args", ()), *_values(getattr(thread, "_kwargs", {}))]
        # A timer has its function as an attribute.
        target = _target(thread) or getattr(thread, "function", type(thread).run)
        _works[thread] = _described(
            (), target, [*arguments, *[extra_attributes] * bool(extra_attributes)]
        )
    return _works[thread]


def _described(identity: Hashable, function: Any, arguments: Sequence) -> Work:
    words = [*_words(list(arguments))]
    is_told = not arguments or any(is_distinctive for _, is_distinctive in words)
    digest = _digest([*_texts(function), *(text for text, _ in words)])
    return Work(identity, _name_of(function), digest, is_told)


def digest_of_variables(thread: threading.Thread) -> int:
    """Return a digest of the plain variables of the script's functions that the calling thread is in, such as what it
    has got from a queue.
    """
    plain = []
    for frame in _frames_of_script(thread):
        names = _names_in(frame)
        plain.append({name: names[name] for name in names if type(names[name]) in _PLAIN})
    return _digest(_texts(plain))


def _digest(texts: Iterable[str]) -> int:
    """Return a digest of texts that fits into an int64."""
    digest = hashlib.blake2b("\n".join(texts).encode(errors="replace"), digest_size=8).digest()
    # One bit is dropped, so that the digest fits into a signed integer of 64 bits.
    return int.from_bytes(digest, "little") >> 1


def _texts(value: Any) -> list[str]:
    return [text for text, _ in _words(value)]


def _words(value: Any, level: int = 0) -> Iterator[tuple[str, bool]]:
    """Generate texts of a value that don't depend on the process, and whether each tells it from others of its type."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind in _PLAIN or isinstance(value, np.generic):
        yield repr(value), True
    elif isinstance(value, enum.Enum):
        yield f"{name}.{value.name}", True
    elif isinstance(value, (np.ndarray, tf.Tensor)):
        yield from _words_of_array(value, name)
    elif isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
        yield getattr(value, "__qualname__", value.__name__), True
    elif isinstance(value, types.MethodType):
        yield from _words([value.__func__, value.__self__], level)
    elif level > _MOST_LEVELS:
        yield name, False
    else:
        yield f"{name} {sorted(map(str, value))}" if kind is dict else name, False
        for inner in itertools.islice(_contents(value), _MOST_ELEMENTS):
            yield from _words(inner, level + 1)


def _words_of_array(value: Any, name: str) -> Iterator[tuple[str, bool]]:
    dtype = np.dtype(getattr(value.dtype, "as_numpy_dtype", value.dtype))
    is_small = not tf.is_symbolic_tensor(value) and np.prod(value.shape) <= _MOST_NUMBERS
    if is_small and dtype.kind in "biufc":
        yield f"{dtype} {np.asarray(value).tolist()}", True
    else:
        yield f"{name} {dtype} {value.shape}", False


def _contents(value: Any) -> Iterator:
    """Generate what a value consists of, in an order that doesn't depend on the process."""
    if isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, (set, frozenset)):
        yield from sorted(map(str, map(_texts, value)))
    elif isinstance(value, dict):
        yield from _values(value)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.FunctionType):
        yield f"{value.__module__}.{value.__qualname__}:{value.__code__.co_firstlineno}"
        yield from (value.__defaults__, value.__kwdefaults__)
        yield _plain_values_of_closure(value)
    else:
        attributes = {}
        if hasattr(value, "__dict__"):
            attributes = vars(value)
        # Only plain attributes are compared: what an object refers to says less about it, and may have no end.
        plain = [
            (key, attribute)
            for key, attribute in list(attributes.items())
            if type(attribute) in _PLAIN
        ]
        yield from sorted(plain, key=str)


def _values(mapping: Mapping) -> list:
    """Return the values of a dictionary in the order of their keys."""
    return [mapping[key] for key in sorted(mapping, key=str)]


def _plain_values_of_closure(function: types.FunctionType) -> list:
    cells = [cell for cell in function.__closure__ or () if cell != types.CellType()]
    return [cell.cell_contents for cell in cells if type(cell.cell_contents) in _PLAIN]


def _function_of(target: Any) -> Any:
    """Return the function that a partial one or a method calls."""
    while isinstance(target, functools.partial):
        calls_other = not hasattr(target.func, "__code__") and target.args
        target = target.args[0] if calls_other and callable(target.args[0]) else target.func
    return getattr(target, "__func__", target)


# What a pool gives to its threads


def _work_in_pool(thread: threading.Thread) -> Work | None:
    """Return the work that a thread of a pool has got.

    A thread that has got its work, and waits for the interpreter, looks as if it had none to a look at its frames. The
    queue of the pool tells: it holds the work until its thread goes on.
    """
    code = getattr(_target(thread), "__code__", None)
    frame = next((frame for frame in _frames(thread) if frame.f_code is code), None)
    if frame is None:
        if thread.is_alive():
            return None
        return IDLE
    names = _names_in(frame)
    pool_item = names.get("work_item", names.get("task"))
    # The script may have the result, and go on, before the thread has dropped the work.
    future = getattr(pool_item, "future", None)
    is_done = names.get("result") is not None or (future is not None and future.done())
    if pool_item is None or is_done:
        queue = names.get("work_queue", names.get("inqueue"))
        if queue is not None and queue.empty():
            return IDLE
        return None
    # A tuple is the work of ``multiprocessing.pool``.
    if isinstance(pool_item, tuple):
        job, index, function, arguments, keywords = pool_item
        identity: Hashable = (job, index)
        if getattr(function, "__module__", None) in _POOLS and arguments:
            # The pool's ``map`` wraps the function of the script in one of its own.
            [(function, *arguments)] = arguments
    else:
        identity = weakref.ref(pool_item)
        function, arguments, keywords = pool_item.fn, pool_item.args, pool_item.kwargs
    work = _works.get(thread)
    if work is None or work.identity != identity:
        work = _described(identity, function, [*arguments, *_values(keywords)])
        _works[thread] = work
    return work


def _name_of(function: Any) -> str:
    function = _function_of(function)
    if isinstance(function, types.FunctionType):
        return f"{function.__module__}.{function.__qualname__}:{function.__code__.co_firstlineno}"
    return str(getattr(function, "__qualname__", type(function).__qualname__))
