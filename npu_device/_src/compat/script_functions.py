"""How functions of the script (``tf.function``) run when a step calls them: traced for that step alone, or inline."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.ops import control_flow_ops as _control_flow_ops

from npu_device._src.compat.graphs import graph_being_built
from npu_device._src.compat.live_objects import live_objects


class _OwnTraces(_control_flow_ops.XLAControlFlowContext):
    """The block in which functions are called, as TensorFlow compares it before it reuses a trace of one."""

    def __init__(self) -> None:
        super().__init__()
        self._caches: dict[int, Any] = {}

    def IsXLAContext(self) -> bool:
        # XLA has a part in this only inside functions that it compiles. Without this, they would enter a context of
        # their own, which is the same for all callers.
        return _is_compiled_by_xla()

    def AddOp(self, op: tf.Operation) -> None:
        # An operation of the block belongs to what is around it. TensorFlow keeps the order of those with effects only
        # if they are in no context.
        op._set_control_flow_context(self.outer_context)
        if self.outer_context is not None:
            self.outer_context.AddOp(op)

    def RequiresUniqueFunctionRetracing(self) -> bool:
        # Called by ``make_function_context`` for a function that is called in the block.
        cache = sys._getframe(2).f_locals["tracing_options"].function_cache
        # TensorFlow's own functions, such as those around control flow under a persistent tape, are in none.
        if cache is not None:
            self._caches[id(cache)] = cache
        return True

    def drop_traces(self) -> None:
        """Let functions forget what they have traced in the block, which nothing can call any more."""
        for cache in self._caches.values():
            for contexts, context_of in (
                (cache._dispatch_dict, lambda key: key),
                (cache._primary, lambda key: key[0]),
            ):
                for key in list(contexts):
                    if context_of(key).context.xla_context_id == id(self):
                        del contexts[key]


def _is_compiled_by_xla() -> bool:
    """Return True if this thread traces a function that XLA is to compile."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__call__":
            function = frame.f_locals.get("self")
            if type(function) is Function and function._jit_compile:
                return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def own_traces() -> Iterator[None]:
    """Let functions of the script that are called in the block have traces of their own, which no other block reuses.

    TensorFlow keeps the trace of a ``tf.function`` for all callers that it takes for alike: those in one XLA context
    that asks for it (``make_function_context``). An eager caller has none, so that functions run inline there.
    """
    if graph_being_built() is None:
        with functions_inline():
            yield
        return
    context = _OwnTraces()
    context.Enter()
    try:
        yield
    finally:
        context.Exit()
        context.drop_traces()


def call_rewritten(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function as AutoGraph rewrites it."""
    with ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED) as status:
        return tf.__internal__.autograph.tf_convert(function, status)(*args, **kwargs)


_one_block = threading.RLock()
"""Held while the calls of functions are replaced."""


@contextlib.contextmanager
def expanded_functions() -> Iterator[None]:
    """Add what functions of the script do to the graph of their caller, for calls by this thread.

    AutoGraph rewrites them as in a trace of their own. Functions that are made in the block are called as usual.
    """
    thread = threading.get_ident()

    def expand(function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return type(function)._call(function, *args, **kwargs)
        if not function._autograph:
            return function._python_function(*args, **kwargs)
        return call_rewritten(function._python_function, *args, **kwargs)

    with _one_block:
        functions = live_objects([Function])
        for function in functions:
            vars(function)["_call"] = functools.partial(expand, function)
        try:
            yield
        finally:
            for function in functions:
                vars(function).pop("_call", None)


_changing = threading.Lock()
_settings: list[bool] = []
"""For each block in which functions run inline, in any thread, the setting that it has found: first, the script's."""


@contextlib.contextmanager
def functions_inline() -> Iterator[None]:
    """Run functions of the script as plain Python, where nothing builds a graph."""
    # TensorFlow has no setting per function; the switch is for the whole process.
    with _changing:
        _settings.append(tf.config.functions_run_eagerly())
        tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        # Blocks of two threads may end in any order: the last one to end takes the first setting.
        with _changing:
            tf.config.run_functions_eagerly(_settings.pop())
