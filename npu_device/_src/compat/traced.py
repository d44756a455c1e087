"""The private parts of TensorFlow's graphs that the first-step check uses: what a traced function changes and draws.

None of them has a public counterpart.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager import context as _context

_CALLS = re.compile(r"(Stateful|Stateless|^)(PartitionedCall|If|While|Case|SymbolicGradient)$")
_READS = re.compile(r"ReadVariableOp|ResourceGather|VariableShape|LookupTable(Find|Size|Export)|.*IsInitialized")
_SETS = re.compile(r"Assign.*Variable|Resource(Scatter|Apply|SparseApply|StridedSliceAssign)|Stateful|Rng")
_HELD: dict[str, Any] = {  # what each number is held at; of integers the least
    **dict.fromkeys(("RandomUniform", "StatelessRandomUniform", "StatelessRandomUniformV2", "StatefulUniform"), 0.5),
    **dict.fromkeys(
        ("RandomStandardNormal", "TruncatedNormal", "StatelessRandomNormal", "StatelessRandomNormalV2"), 0.3
    ),
    **dict.fromkeys(("StatelessTruncatedNormal", "StatelessTruncatedNormalV2", "StatefulTruncatedNormal"), 0.3),
    **dict.fromkeys(("StatefulStandardNormal", "StatefulStandardNormalV2"), 0.3),
    **dict.fromkeys(("StatelessRandomUniformFullInt", "StatelessRandomUniformFullIntV2", "StatefulUniformFullInt"), 1),
    **dict.fromkeys(("RandomUniformInt", "StatefulUniformInt"), None),
    **dict.fromkeys(("StatelessRandomUniformInt", "StatelessRandomUniformIntV2"), None),
}
_DRAWS = re.compile(
    "(Stateless|Stateful)?(Multinomial|Random(Gamma(V[23])?|Poisson(V2)?|Binomial|Shuffle|Crop|IndexShuffle)|Shuffle|"
    "ParameterizedTruncatedNormal|.*CandidateSampler)$"
)
_HARMLESS = re.compile(r"Assert|PrintV2|NoOp|Placeholder|VarHandleOp|Cudnn|Timestamp|EnsureShape")


def is_in(graph: Any, tensor: Any) -> bool:
    """Return True for a tensor of a graph itself, not of a branch or a loop in it, and not an eager one."""
    return bool(tf.is_symbolic_tensor(tensor)) and tensor.graph is graph


def without_noise(graph: Any) -> None:
    """Let each random number of a function being traced be the same constant, and silence its ``tf.print``.

    Numbers that branches and loops draw stay; see ``what_remains``.
    """
    for operation in list(graph.get_operations()):
        if operation.type == "PrintV2":
            operation._set_attr("output_stream", attr_value_pb2.AttrValue(s=b"file:///dev/null"))
        if operation.type in _HELD:
            output = operation.outputs[0]
            users = output.consumers()  # before the constant is one
            constant = operation.inputs[-2] if _HELD[operation.type] is None else _HELD[operation.type]
            same = tf.fill(tf.shape(output), tf.cast(constant, output.dtype))
            for user in users:
                for place, given in enumerate(user.inputs):
                    if given is output:
                        user._update_input(place, same)


def what_remains(graph: Any) -> tuple[str, Any] | None:
    """Return what a traced function does that can't be undone or repeated, and the operation; None if nothing."""
    for operation in graph.get_operations():
        if _DRAWS.match(operation.type):
            return "draws random numbers that can't be held fixed", operation
        if not _is_known(operation.type) and _is_stateful(operation):
            return f"runs {operation.type}, which can't be undone", operation
    for kind, call in _inside(graph):
        if kind in _HELD or _DRAWS.match(kind):
            return "draws random numbers in a branch or a loop", call
        if re.match("PyFunc|EagerPyFunc|Collective|Write", kind):
            return f"runs {kind}, which can't be undone", call
    return None


def _is_stateful(operation: Any) -> bool:
    if operation.type not in _stateful:
        _stateful[operation.type] = bool(operation.op_def.is_stateful)  # read anew for each operation
    return _stateful[operation.type]


_stateful: dict[str, bool] = {}
"""By the type of an operation."""


def _is_known(kind: str) -> bool:
    return kind in _HELD or any(pattern.match(kind) for pattern in (_CALLS, _READS, _SETS, _HARMLESS))


def _inside(graph: Any) -> Iterator[tuple[str, Any]]:
    functions = {function.signature.name: function for function in graph.as_graph_def().library.function}
    for operation in graph.get_operations():
        if _CALLS.match(operation.type):
            waiting = _called(operation.node_def)
            seen: set[str] = set()
            while waiting:
                name = waiting.pop()
                if name not in seen and name in functions:
                    seen.add(name)
                    for node in functions[name].node_def:
                        yield node.op, operation
                        waiting += _called(node)


def _called(node: Any) -> list[str]:
    functions = [each for value in node.attr.values() for each in (value.func, *value.list.func)]
    return [function.name for function in functions if function.name]


def changed_by(graph: Any) -> tuple[list[Any], Any]:
    """Return the handles of the variables that a traced function may set, and an operation that changes something
    else, or None.
    """
    handles = []
    for outer, inner in graph.captures:
        if inner.dtype != tf.resource:
            continue
        setters = [user for user in inner.consumers() if _sets(user, inner)]
        if setters and _kind_of_variable(outer) is not None:
            handles.append(outer)
        elif setters:
            return handles, setters[0]
    return handles, None


def _sets(operation: Any, handle: Any) -> bool:
    if _READS.match(operation.type):
        return False
    if not _CALLS.match(operation.type):
        return True
    try:
        only_read = set(operation.get_attr("_read_only_resource_inputs"))
    except ValueError:
        return True
    return any(given is handle and place not in only_read for place, given in enumerate(operation.inputs))


def handle_of(variable: Any) -> Any:
    inner = variable if hasattr(variable, "handle") else getattr(variable, "_value", None)  # Keras 3.0 to 3.15
    return getattr(inner, "handle", None)


def value_of_handle(handle: Any) -> Any:
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=_kind_of_variable(handle))


def _kind_of_variable(handle: Any) -> Any:
    """Return the dtype of the variable behind an eager handle; None for another resource, such as a table."""
    data: Any = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    return tf.as_dtype(data.shape_and_type[0].dtype)


@contextlib.contextmanager
def without_rewriting() -> Iterator[None]:
    """Run functions as they have been traced in the block.

    TensorFlow's rewriting takes longer than a few samples, and fuses a convolution, a batch normalisation that doesn't
    train, and a tanh to what no CPU kernel supports (TensorFlow 2.20).
    """
    current = _context.context()
    before = dict(current._optimizer_experimental_options)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        current._optimizer_experimental_options = before
        current._thread_local_data.function_call_options = None
