"""Arrays in memory that several processes of a host map, none of which can write to it.

The memory is an anonymous file (``sharing.Offer``), which the others open through ``/proc/<pid>/fd``: at the start of a
job its ranks have proved that they can (``host_detection``), so that no socket has to hand descriptors around.
It lives as long as an array, in whichever process, and no SIGKILL leaves anything behind.
"""

from __future__ import annotations

import copy
import dataclasses
import mmap
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from npu_device._src.collectives.engines.host.sharing import (
    FIRST_BYTE,
    Offer,
    ReadOnlyMemory,
    attach,
)

ALIGNMENT = 64
"""TensorFlow copies arrays that begin elsewhere: the strictest that its builds ask for."""

_DICTS = (dict, OrderedDict, defaultdict)


class Place(NamedTuple):
    """Where an array lies in the memory, made of values that any job can send."""

    offset: int
    shape: tuple[int, ...]
    order: str  # "C" or "F"
    dtype: np.ndarray  # an empty array: dtypes alone can't be sent without a pickle
    byte_order: str  # byte order of the dtype, which a pickled array loses


class Address(NamedTuple):
    """How another process of this host finds the memory."""

    path: str
    size: int
    token: str


def places_of(arrays: Sequence[np.ndarray]) -> list[Place]:
    """Return places for arrays one after the other."""
    places = []
    offset = FIRST_BYTE
    for array in arrays:
        flags = array.flags
        order = "F" if flags.f_contiguous and not flags.c_contiguous else "C"
        kind = np.empty(0, array.dtype)
        places.append(Place(offset, array.shape, order, kind, array.dtype.byteorder))
        offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return places


def published(
    arrays: Sequence[np.ndarray], places: Sequence[Place], content: bytes = b""
) -> tuple[Offer, Address]:
    """Copy arrays to their places in new memory, and any bytes behind them."""
    end = FIRST_BYTE
    if places:
        end = places[-1].offset + arrays[-1].nbytes
    offer = Offer(end + len(content))
    for array, place in zip(arrays, places):
        array_at(offer.memory, place)[...] = array
    offer.memory[end:] = content
    # From here on, this process has no more access than the others.
    offer.memory.close()
    return offer, Address(offer.path, end + len(content), offer.token)


def mapped(address: Address) -> mmap.mmap:
    """Map published memory; raise OSError or ValueError if it is gone."""
    return attach(*address, read_only=True)


def array_at(memory: mmap.mmap, place: Place) -> np.ndarray:
    dtype = place.dtype.dtype.newbyteorder(place.byte_order)  # type: ignore[arg-type]
    return np.ndarray(tuple(place.shape), dtype, memory, place.offset, order=place.order)  # type: ignore[arg-type]


def is_shared(array: Any) -> bool:
    """Return True for an array that lies in such memory, also for a part or another shape of one."""
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, ReadOnlyMemory)


def with_arrays(
    value: Any, replace: Callable[[np.ndarray, str], Any], name: str = "the result"
) -> Any:
    """Return a value whose arrays are replaced: it may be one, or tuples, lists, dicts and dataclasses of them.

    ``replace`` gets each array, and its name in the value. Subclasses of arrays may hold more than numbers, and stay.
    """
    if type(value) in (np.ndarray, np.memmap):
        return replace(value, name)
    if type(value) in _DICTS:
        # A copy keeps the factory of a defaultdict.
        copied = copy.copy(value)
        for key, inner in value.items():
            copied[key] = with_arrays(inner, replace, f"{name}[{key!r}]")
        return copied
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = zip(value._fields, value)
        content = [with_arrays(inner, replace, f"{name}.{field}") for field, inner in fields]
        return type(value)._make(content)  # type: ignore[attr-defined]
    if type(value) in (list, tuple):
        return type(value)(
            with_arrays(inner, replace, f"{name}[{index}]") for index, inner in enumerate(value)
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        replaced = copy.copy(value)
        for attribute in dataclasses.fields(value):
            # A field that ``__init__`` leaves out may have no value.
            if hasattr(value, attribute.name):
                content = getattr(value, attribute.name)
                inner = with_arrays(content, replace, f"{name}.{attribute.name}")
                # The dataclass may be frozen.
                object.__setattr__(replaced, attribute.name, inner)
        return replaced
    return value


def require_numbers(array: np.ndarray, name: str) -> None:
    """Raise TypeError for an array of Python objects, which have no place in shared memory."""
    if array.dtype.hasobject:
        raise TypeError(
            f"load_once: {name} is an array of Python objects ({array.dtype}, shape {array.shape}), which can't lie in "
            "shared memory.\nWhat to do: convert it to numbers or fixed-length strings in the function, for instance "
            "array.astype('U'); or return a list."
        )
