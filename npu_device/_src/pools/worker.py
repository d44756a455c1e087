"""One rank of a pool (``pool.py``): opens the device, then calls what it is told to until the connection ends."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src.collectives import job
from npu_device._src.pools.answers import Answer
from npu_device._src.pools.short_path import short_path
from npu_device._src.report.timeline import ask_for_timeline
from npu_device._src.training.opening import device


def _restorer() -> Callable[[], None]:
    """Return a function that undoes what a call may change for the next one, to what it is now."""
    environment = dict(os.environ)
    directory = os.getcwd()
    python_random = random.getstate()
    numpy_random = np.random.get_state()
    loaded = [sys.modules[name] for name in ("keras", "tf_keras") if name in sys.modules]
    settings = [_settings_of(keras) for keras in loaded]

    def restore() -> None:
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        os.chdir(directory)
        random.setstate(python_random)
        np.random.set_state(numpy_random)
        tf.random.set_seed(None)
        # Otherwise, the next call couldn't set a seed: the same one would have no effect, and a
        # different one would be an error.
        device.forget_seed()
        tf.config.run_functions_eagerly(False)
        for keras, floatx, image_format, policy in settings:
            try:
                # A collection of garbage can take long.
                keras.backend.clear_session(free_memory=False)
            except TypeError:
                # Keras 2 and the first versions of Keras 3 lack the argument.
                keras.backend.clear_session()
            keras.backend.set_floatx(floatx)
            keras.backend.set_image_data_format(image_format)
            keras.mixed_precision.set_global_policy(policy)

    return restore


def _settings_of(keras: Any) -> tuple[Any, str, str, str]:
    policy = (
        getattr(keras.mixed_precision, "global_policy", None) or keras.mixed_precision.dtype_policy
    )
    return keras, keras.backend.floatx(), keras.backend.image_data_format(), policy().name


def answer_to(call: bytes) -> tuple[Answer, BaseException | None]:
    """Make a call; what came of it, and the error."""
    error: BaseException | None = None
    try:
        function, arguments = pickle.loads(call)
        answer = function(*arguments)
        if not isinstance(answer, Answer):
            answer = Answer(True, answer)
        elif not answer.succeeded:
            error = RuntimeError("the test has failed on this rank")
    except BaseException as caught:
        # The caller waits for an answer, also after an error of any type.
        error = caught
        goes_on = not isinstance(caught, (SystemExit, KeyboardInterrupt))
        answer = Answer(False, _traceback(caught), goes_on, _pickled(caught))
    return answer._replace(goes_on=answer.goes_on and not job.is_closed()), error


def _traceback(error: BaseException) -> str:
    frames = error.__traceback__
    # The traceback begins with the function's own frames: the frames of this folder are the same in each error.
    while (
        frames is not None
        and os.path.dirname(frames.tb_frame.f_code.co_filename) == os.path.dirname(__file__)
        and frames.tb_next is not None
    ):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def _pickled(error: BaseException) -> bytes:
    """Return an error as bytes; none if it can't be sent."""
    # An error of a class of a notebook needs cloudpickle, which has brought the class here.
    pickler: Any = sys.modules.get("cloudpickle", pickle)
    with contextlib.suppress(Exception):
        return pickler.dumps(error)
    return b""


def packed(answer: Answer) -> bytes:
    """Return an answer as it is sent; one whose result can't be is an error."""
    try:
        return pickle.dumps(answer)
    except Exception as error:
        text = (
            f"the function returned {type(answer.value).__name__}, which can't be sent to the test: {error}\n"
            "What to do: return numbers, strings, numpy arrays, or lists and dictionaries of them."
        )
        return pickle.dumps(Answer(False, text, answer.goes_on))


_calls: Connection
_is_over = False  # there are no more calls
_error: BaseException | None = None  # error of the last call


def is_rank() -> bool:
    """Return True on a rank of a pool, also if it is a single process."""
    return "_calls" in globals()


def answer_calls(restore: Callable[[], None] = lambda: None) -> None:
    """Answer until there are no more calls; ``restore`` is called before each."""
    global _is_over, _error
    with contextlib.suppress(EOFError, OSError):
        while call := _calls.recv_bytes():
            restore()
            answer, error = answer_to(call)
            if _is_over:
                # The function has answered calls itself, to the last.
                return
            _error = error
            _calls.send_bytes(packed(answer))
    _is_over = True


def answer_this_and_more(answer: Answer) -> None:
    """Answer a call before its function has returned, and calls that come until there are no more."""
    _calls.send_bytes(packed(answer))
    answer_calls()


def main() -> None:
    global _calls
    address, stacks, ends_as_script = sys.argv[1:]
    with short_path(address) as name:
        _calls = Client(name, family="AF_UNIX")
    with _calls:
        is_script = ends_as_script == "True"
        if is_script:
            # The copy of the trace is made at exit.
            ask_for_timeline()
        handle = device.open().as_default()
        with open(f"{stacks}{handle.worker_id}", "w") as file:
            # A pool asks by this signal where a rank is that doesn't answer.
            faulthandler.register(signal.SIGUSR1, file)
            _calls.send((handle.worker_id, os.getpid()))
            answer_calls(_restorer())
            if (
                _error is not None
                and not isinstance(_error, SystemExit)
                and job.current() is not None
            ):
                # The others may be waiting for this rank.
                job.abandon(_error)
            if is_script:
                return
            device.close()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            # Python would take seconds to free all graphs. How a rank ends is tested by jobs, not by pools of tests.
            os._exit(0)


if __name__ == "__main__":
    # Python puts this file's folder there, which isn't a folder of modules.
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]
    # Imported as a module of its own name, so that functions that the test sends find the same globals.
    importlib.import_module("npu_device._src.pools.worker").main()
