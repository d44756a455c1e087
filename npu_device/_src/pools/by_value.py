"""Calls that travel by value: functions, classes and variables of a notebook, which the ranks can't import.

Large arrays aren't pickled: they lie in memory that all ranks map. Lines of cells travel, too, for tracebacks.
"""

from __future__ import annotations

import builtins
import io
import linecache
import marshal
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from npu_device._src import compat
from npu_device._src.collectives.engines.host.sharing import Offer
from npu_device._src.world.shared_arrays import (
    Address,
    Place,
    array_at,
    mapped,
    places_of,
    published,
)

_SHARED_BYTES = 10_000_000  # larger arrays are shared


class SentCall(NamedTuple):
    """What a rank gets."""

    pickled: bytes
    lines: dict[str, Any]  # lines of cells, by their names in tracebacks
    memory: Address
    places: list[Place]


def sent(function: Callable, arguments: tuple) -> tuple[SentCall, Offer]:
    """Return a call for ranks, and its memory, which they can map until it is withdrawn.

    Raises:
        ImportError: cloudpickle is missing.
        TypeError: the function, a variable that it uses, or an argument can't be sent.
    """
    # Without it, every variable would seem to be one that can't be sent.
    _cloudpickle()
    arrays: dict[int, np.ndarray] = {}
    try:
        pickled = _pickled((function, arguments), arrays)
    except Exception as error:
        name, kind = _culprit(function, arguments)
        raise TypeError(
            f"npu.run: {name} can't be sent to the ranks: it is {kind} ({error})\nWhat to do: make it in the function "
            "that runs on the ranks, and pass what it is made from, such as names of files or arrays."
        ) from error
    places = places_of([*arrays.values()])
    offer, address = published([*arrays.values()], places)
    # Only what was typed in has no time of change.
    lines = {name: entry for name, entry in linecache.cache.items() if entry[1:2] == (None,)}
    return SentCall(pickled, lines, address, places), offer


def call(sent: SentCall) -> bytes:
    """Make a call on a rank; return its result as it is sent."""
    linecache.cache.update(sent.lines)
    memory = mapped(sent.memory)
    arrays = [array_at(memory, place) for place in sent.places]

    class Unpickler(pickle.Unpickler):
        """Puts large arrays in."""

        def persistent_load(self, index: int) -> np.ndarray:
            """Return a large array."""
            return arrays[index]

    function, arguments = Unpickler(io.BytesIO(sent.pickled)).load()
    result = function(*arguments)
    try:
        return _pickled(result)
    except Exception as error:
        raise TypeError(
            f"the function returned {type(result).__name__}, which can't be sent: {error}\nWhat to do: return numbers, "
            "strings, numpy arrays, or lists and dictionaries of them."
        ) from error


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError:
        raise ImportError(
            "npu.run needs cloudpickle, which sends functions of notebooks.\n"
            "What to do: pip install 'npu_device[notebook]'"
        ) from None
    return cloudpickle


def _pickled(value: Any, arrays: dict[int, np.ndarray] | None = None) -> bytes:
    """Return a value as bytes without its large arrays, which are added to ``arrays``."""
    cloudpickle = _cloudpickle()

    class Pickler(cloudpickle.Pickler):  # type: ignore[name-defined]
        """Leaves large arrays out."""

        def persistent_id(self, value: Any) -> int | None:
            """Return the number of a large array."""
            is_array = type(value) in (np.ndarray, np.memmap)
            if arrays is None or not is_array or value.nbytes <= _SHARED_BYTES:
                return None
            if value.dtype.hasobject:
                return None
            # The same array may be found in several variables.
            arrays.setdefault(id(value), value)
            return list(arrays).index(id(value))

        def reducer_override(self, value: Any) -> Any:
            """Refuse open files, whose content would be copied; send functions of TensorFlow without graphs."""
            if isinstance(value, io.IOBase):
                raise TypeError("an open file")
            if isinstance(value, types.CodeType):
                # cloudpickle leaves out the file, without which tracebacks have no lines.
                return marshal.loads, (marshal.dumps(value),)
            if compat.is_function(value):
                return compat.reduced_function(value)
            return super().reducer_override(value)

    stream = io.BytesIO()
    Pickler(stream).dump(value)
    return stream.getvalue()


def _culprit(function: Callable, arguments: tuple) -> tuple[str, str]:
    """Return the name of the variable that can't be sent, and the name of its class."""
    used = [(f"argument {position}", argument) for position, argument in enumerate(arguments, 1)]
    found = next((pair for pair in used if not _can_be_sent(pair[1])), None)
    name, value = found or ("the function", function)
    seen = set()
    # A function that can't be sent uses a variable that can't.
    while id(value) not in seen:
        seen.add(id(value))
        for variable, content in _variables(value):
            if not _can_be_sent(content):
                name = f"the variable {variable!r}, which {getattr(value, '__name__', name)} uses,"
                value = content
                break
    return name, type(value).__name__


def _can_be_sent(value: Any) -> bool:
    try:
        _pickled(value, {})
    except Exception:
        return False
    return True


def _variables(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function uses, or the methods of a class."""
    if compat.is_function(value):
        value = value.python_function
    if isinstance(value, type):
        yield from vars(value).items()
    if not isinstance(value, types.FunctionType):
        return
    for name in _names(value.__code__):
        if name in value.__globals__ and not hasattr(builtins, name):
            yield name, value.__globals__[name]
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
        yield name, cell.cell_contents


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    # Inner functions and, before Python 3.12, comprehensions have code of their own.
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
