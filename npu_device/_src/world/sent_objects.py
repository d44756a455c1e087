"""Python objects as bytes that the ranks send each other: pickled if only the job's ranks can have sent them, else as
JSON with arrays, since whoever sends a pickled object can run any code where it is read.
"""

from __future__ import annotations

import base64
import json
import math
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src.cluster.rank_errors import ClusterError

_HEADER = struct.Struct("<cQ")  # kind, length
_PICKLED = b"p"
_PLAIN = b"j"
_REFUSED = b"r"
_REMEDY = (
    "This job has no secret, and other hosts can reach its ports, so objects that could run code are neither sent nor "
    "read.\nWhat to do: set NPU_DEVICE_SECRET_FILE, or NPU_DEVICE_SECRET, to the same random text on every rank; or "
    "send numbers, strings, bytes, arrays, tensors, and lists, tuples, dictionaries and sets of them."
)


_COLLECTIONS: dict[str, Any] = {
    collection.__name__: collection for collection in (list, tuple, set, frozenset)
}
_BYTES: dict[str, Any] = {"bytes": bytes, "bytearray": bytearray}


class _CannotBeSentError(TypeError):
    pass


def packed(value: Any, trusted: bool) -> bytes:
    """Return an object as bytes, pickled if only the job's ranks are ``trusted`` to send; else they may raise there."""
    try:
        if trusted:
            form = _PICKLED
            content = pickle.dumps(value)
        else:
            form = _PLAIN
            content = to_json(value).encode()
    except _CannotBeSentError as error:
        # A refusal is sent, so that all ranks raise the same error.
        form = _REFUSED
        content = str(error).encode(errors="replace")
    except RecursionError:
        form = _REFUSED
        content = b"can't be sent: it is nested too deeply, or contains itself."
    return _HEADER.pack(form, len(content)) + content


def unpacked(data: bytes, ranks: Sequence[str], trusted: bool) -> list:
    """Return the objects in bytes that ``packed`` has made, one after the other, given the names of the ranks."""
    values = []
    position = 0
    for rank in ranks:
        try:
            form, length = _HEADER.unpack_from(data, position)
            start = position + _HEADER.size
            position = start + length
            content = data[start:position]
            if len(content) < length or form not in (_PICKLED, _PLAIN, _REFUSED):
                raise ValueError("cut off, or of no known kind")
            sent = None
            if form == _PLAIN:
                sent = from_json(content)
        except Exception as error:
            # Anything may be wrong with bytes of another process.
            raise ClusterError(
                f"{rank} has sent an object that can't be read.\n"
                "Likely cause: a different program sends to the ports of this rank, or the ranks have different "
                "versions.\nWhat to do: let only the hosts of the job reach them (npurun docs security); install the "
                "same version everywhere."
            ) from error
        if form == _REFUSED:
            raise ClusterError(
                f"an object of {rank} {content[:1000].decode(errors='replace')}\n{_REMEDY}"
            )
        if form == _PICKLED and not trusted:
            raise ClusterError(f"{rank} has sent a pickled object, which isn't read.\n{_REMEDY}")
        if form == _PICKLED:
            sent = pickle.loads(content)
        values.append(sent)
    return values


def to_json(value: Any) -> str:
    """Return an object of those that ``_REMEDY`` lists as text; raise TypeError for others."""
    return json.dumps(_plain(value), separators=(",", ":"))


def from_json(text: str | bytes) -> Any:
    return _value(json.loads(text))


def _plain(value: Any) -> Any:
    # Single values are sent as they are, others as a list of their kind and contents. Subclasses would arrive as
    # something else.
    if value is None or type(value) in (bool, float, str):
        return value
    if type(value) is int:
        if abs(value) < 1 << 63:
            return value
        return ["int", hex(value)]
    if type(value) in _COLLECTIONS.values():
        return [type(value).__name__, [_plain(content) for content in value]]
    if type(value) is dict:
        return ["dict", [[_plain(key), _plain(content)] for key, content in value.items()]]
    if type(value) in _BYTES.values():
        return [type(value).__name__, base64.b64encode(value).decode()]
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        return ["tensor", _plain(np.asarray(value.numpy()))]
    if isinstance(value, np.generic):
        return ["number", _plain(np.asarray(value))]
    if type(value) is np.ndarray:
        text = base64.b64encode(value.tobytes()).decode()
        return ["array", _dtype_name(value.dtype), list(value.shape), text]
    raise _CannotBeSentError(
        f"can't be sent: it is, or contains, a {type(value).__module__}.{type(value).__name__}."
    )


def _dtype_name(dtype: np.dtype) -> str:
    # numpy's own text is preferred, since it has the byte order, too.
    if dtype.kind not in "OV" and np.dtype(dtype.str) == dtype:
        return dtype.str
    try:
        # TensorFlow names dtypes that numpy lacks, such as bfloat16.
        name = tf.as_dtype(dtype).name
    except TypeError:
        name = "string"
    if name in ("string", "resource", "variant"):
        raise _CannotBeSentError(f"can't be sent: it is, or contains, an array of {dtype}.")
    return str(name)


def _value(plain: Any) -> Any:
    if isinstance(plain, dict):
        raise ValueError("no kind")
    if not isinstance(plain, list):
        return plain
    type_name, *contents = plain
    if type_name == "array":
        return _array(*contents)
    (content,) = contents
    if type_name == "int":
        return int(content, 16)
    if type_name in _COLLECTIONS:
        return _COLLECTIONS[type_name](map(_value, content))
    if type_name == "dict":
        return {_value(key): _value(inner) for key, inner in content}
    if type_name in _BYTES:
        return _BYTES[type_name](base64.b64decode(content, validate=True))
    array = _value(content)
    if not isinstance(array, np.ndarray):
        raise ValueError("no such kind")
    if type_name == "tensor":
        return tf.constant(array)
    if type_name != "number" or array.shape:
        raise ValueError("no such kind")
    return array[()]


def _array(name: str, shape: list[int], text: str) -> np.ndarray:
    # Other names are TensorFlow's, of bfloat16 for instance.
    is_numpy = name[:1] in "<>|="
    dtype = np.dtype(name if is_numpy else tf.as_dtype(name).as_numpy_dtype)
    # Objects would run code when they are read, and items without a size hold nothing.
    if dtype.hasobject or not dtype.itemsize:
        raise ValueError("no numbers")
    data = base64.b64decode(text, validate=True)
    size = math.prod(shape) * dtype.itemsize
    if len(data) != size or min(shape, default=0) < 0:
        raise ValueError("not as many numbers")
    # Copied, as the buffer can't be written to.
    return np.frombuffer(data, dtype).reshape(shape).copy()
