"""What functions being traced do besides computing: the random numbers they draw, and the variables they set."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.framework.func_graph import FuncGraph

from npu_device._src.compat.graph_walk import walk
from npu_device._src.compat.graphs import (
    dtype_of_variable,
    graph_being_built,
    handle_of,
    is_stateful,
    replace_inputs,
)

_CALLING = re.compile(r"(Stateful|Stateless|^)(PartitionedCall|If|While|Case|SymbolicGradient)$")
_READS = re.compile(
    r"ReadVariableOp|ResourceGather|VariableShape|LookupTable(Find|Size|Export)|.*IsInitialized"
)
_SETS = re.compile(
    r"Assign.*Variable|Resource(Scatter|Apply|SparseApply|StridedSliceAssign)|Stateful|Rng"
)
# What random numbers are held at, by the types of their operations; None for the least integer that may be drawn.
_NUMBERS = {
    "RandomUniform StatelessRandomUniform StatelessRandomUniformV2 StatefulUniform": 0.5,
    "RandomStandardNormal TruncatedNormal StatelessRandomNormal StatelessRandomNormalV2 StatelessTruncatedNormal "
    "StatelessTruncatedNormalV2 StatefulTruncatedNormal StatefulStandardNormal StatefulStandardNormalV2": 0.3,
    "StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2 StatefulUniformFullInt": 1,
    "RandomUniformInt StatefulUniformInt StatelessRandomUniformInt StatelessRandomUniformIntV2": None,
}
_HELD = {name: constant for names, constant in _NUMBERS.items() for name in names.split()}
_DRAWS = re.compile(
    "(Stateless|Stateful)?(Multinomial|Random(Gamma(V[23])?|Poisson(V2)?|Binomial|Shuffle|Crop|IndexShuffle)|Shuffle|"
    "ParameterizedTruncatedNormal|.*CandidateSampler)$"
)
_HARMLESS = re.compile(r"Assert|PrintV2|NoOp|Placeholder|VarHandleOp|Cudnn|Timestamp|EnsureShape")


def is_in_graph(graph: Any, tensor: Any) -> bool:
    """Return True for a tensor of a graph itself, not of a branch or a loop in it, and not an eager one."""
    return bool(tf.is_symbolic_tensor(tensor)) and tensor.graph is graph


def without_noise(graph: Any) -> None:
    """Let each random number of a function being traced be the same constant, and silence its ``tf.print``.

    Numbers that branches and loops draw stay; see ``what_remains``.
    """
    for operation in list(graph.get_operations()):
        # The user would see each printed line once more.
        if operation.type == "PrintV2":
            operation._set_attr("output_stream", attr_value_pb2.AttrValue(s=b"file:///dev/null"))
        if operation.type in _HELD:
            output = operation.outputs[0]
            # The users are looked up before the constant becomes one.
            users = output.consumers()
            held_number = _HELD[operation.type]
            if held_number is None:
                # An integer draw is held at the least integer that it may draw.
                held_number = operation.inputs[-2]
            held = tf.cast(held_number, output.dtype)
            constant = tf.fill(tf.shape(output), held)
            replace_inputs(users, output, constant)


def what_remains(graph: Any) -> tuple[str, Any] | None:
    """Return what a traced function does that can't be undone or repeated, and the operation; None if nothing."""
    # The graph's own operations first, since the error can point at their lines.
    for operation in graph.get_operations():
        if _DRAWS.match(operation.type):
            return "draws random numbers that can't be held fixed", operation
        if not _is_known(operation.type) and is_stateful(operation):
            return f"runs {operation.type}, which can't be undone", operation
    for inner_type, call in _inside(graph):
        if inner_type in _HELD or _DRAWS.match(inner_type):
            return "draws random numbers in a branch or a loop", call
        if re.match("PyFunc|EagerPyFunc|Collective|Write", inner_type):
            return f"runs {inner_type}, which can't be undone", call
    for outer, setter in changed_by(graph):
        if dtype_of_variable(outer) is None:
            return f"changes what can't be restored ({setter.type})", setter
    return None


def _is_known(operation_type: str) -> bool:
    if operation_type in _HELD:
        return True
    return any(pattern.match(operation_type) for pattern in (_CALLING, _READS, _SETS, _HARMLESS))


def _inside(graph: Any) -> Iterator[tuple[str, Any]]:
    """Yield the types of the operations in the functions that a graph calls, each with the operation that calls."""
    library = graph.as_graph_def().library.function
    functions = {function.signature.name: function for function in library}

    def called(node: Any) -> list:
        names = []
        for attribute in node.attr.values():
            names += [function.name for function in (attribute.func, *attribute.list.func)]
        return [functions[name] for name in names if name in functions]

    def called_by(function: Any) -> Iterator:
        return itertools.chain.from_iterable(map(called, function.node_def))

    for operation in graph.get_operations():
        if not _CALLING.match(operation.type):
            continue
        starts = called(operation.node_def)
        for function in walk(starts, called_by, lambda function: function.signature.name):
            for node in function.node_def:
                yield node.op, operation


def changed_by(graph: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the handles of the variables and other resources that a traced function may set, each with an operation
    that does.
    """
    for outer, inner in graph.captures:
        # Nothing can set what a captured tensor holds.
        if inner.dtype == tf.resource:
            setters = [user for user in inner.consumers() if _sets(user, inner)]
            for setter in setters[:1]:
                yield outer, setter


def may_be_set(variables: Iterable) -> list[bool]:
    """Return for each variable whether the function being traced may have set it so far; True outside of one."""
    graph = graph_being_built()
    handles = {}
    if isinstance(graph, FuncGraph):
        handles = {id(outer): inner for outer, inner in graph.captures}
    found = []
    for variable in variables:
        handle = handles.get(id(handle_of(variable)))
        found.append(handle is None or any(_sets(user, handle) for user in handle.consumers()))
    return found


def _sets(operation: Any, handle: Any) -> bool:
    if _READS.match(operation.type):
        return False
    # An operation that isn't a call may set the variable itself.
    if not _CALLING.match(operation.type):
        return True
    try:
        only_read = set(operation.get_attr("_read_only_resource_inputs"))
    except ValueError:
        # TensorFlow lacks the attribute where it hasn't looked into the function.
        return True
    positions = [index for index, tensor in enumerate(operation.inputs) if tensor is handle]
    return not only_read.issuperset(positions)
