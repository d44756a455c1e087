"""The wrapper on the methods through which Keras optimizers apply gradients, while a job is open."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any, Callable

from npu_device._src import compat
from npu_device._src.collectives.job import Job, current_component
from npu_device._src.training.watching.applied_gradients import AppliedGradients, UnequalStartError
from npu_device._src.training.watching.row_order import rows_in_order
from npu_device._src.training.watching.wrapped_optimizers import reducer_inside

_log = logging.getLogger("npu_device")


class OptimizerHook:
    """The wrapped methods of the optimizer classes of each Keras; a component of the job."""

    def __init__(self, job: Job) -> None:
        job.add(AppliedGradients(job))
        # The method before, and its wrapper, by the class and the method's name.
        self._replaced: dict[tuple[type, str], tuple[Any, Any]] = {}
        self._unwrapped = {"keras", "tf_keras"}
        self.find_keras()

    def find_keras(self) -> None:
        """Wrap the methods of each Keras that has been imported since the last call."""
        # A cheap test comes first, since this runs often, and a search goes through thousands of modules.
        if sys.modules.keys().isdisjoint(self._unwrapped):
            return
        for owner, name in set(compat.optimizer_methods()) - self._replaced.keys():
            original = vars(owner)[name]
            parameter = "grads_and_vars"
            if name == "apply":
                parameter = "grads"
            wrapper = _wrapper(original, parameter)
            setattr(owner, name, wrapper)
            self._replaced[owner, name] = (original, wrapper)
            self._unwrapped.discard(owner.__module__.split(".", 1)[0])

    def close(self) -> None:
        """Give the classes their methods back."""
        # Another wrapper on top stays, and still calls the hook, which then does nothing.
        for (owner, name), (original, wrapper) in self._replaced.items():
            if vars(owner).get(name) is wrapper:
                setattr(owner, name, original)


def _wrapper(original: Callable, parameter: str) -> Callable:
    """Return a method that looks at its gradients, or reduces them, before the original applies them."""

    # Otherwise, AutoGraph would rewrite the function.
    @compat.do_not_convert
    @functools.wraps(original)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Made a list, since an iterator could be read only once.
        gradients = list(args[0] if args else kwargs.pop(parameter))
        further = args[1:]
        watching = current_component(AppliedGradients)
        if watching is None:
            return original(self, gradients, *further, **kwargs)
        reducer = None
        # ``apply_gradients`` calls ``apply`` in Keras 3, so only one of them reduces.
        if parameter == "grads":
            reducer = reducer_inside(self)
        # Rows are put in order in ``apply`` only: ``apply_gradients`` has pairs here.
        with rows_in_order(self, gradients):
            if reducer is not None:
                variables = compat.variables_to_update(self, *further, **kwargs)
                return reducer.apply(self, functools.partial(original, self), gradients, variables)
            if not watching.skips(self):
                try:
                    pairs = gradients
                    if parameter == "grads":
                        variables = compat.variables_to_update(self, *further, **kwargs)
                        pairs = list(zip(gradients, variables))
                    watching.observe(self, pairs)
                except UnequalStartError:
                    raise
                except Exception:
                    # An error of the watch itself must not end a training run.
                    name = type(self).__name__
                    _log.debug("could not look at the gradients of a %s", name, exc_info=True)
            return original(self, gradients, *further, **kwargs)

    return apply
