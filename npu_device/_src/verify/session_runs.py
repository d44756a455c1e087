"""What ``npurun verify`` keeps of a script in TensorFlow 1 style: the trained variables before each run that trains,
and the numbers that the script has fetched.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src.verify.step_records import Recorder

_UPDATES = ("Apply", "ResourceApply", "SparseApply", "ResourceSparseApply", "AssignSub", "ScatterSub")


class Sessions:
    """The sessions of this process."""

    def __init__(self, recorder: Recorder, seed: int) -> None:
        self._recorder = recorder
        self._seed = seed
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._trains: dict[tuple[Any, str], bool] = {}
        tf.compat.v1.get_default_graph().seed = seed

    def seed_graph(self, own: Any, graph: Any, *args: Any, **kwargs: Any) -> None:
        """Stand in for the constructor of graphs, each of which has a seed of its own."""
        own(graph, *args, **kwargs)
        if type(graph) is tf.Graph:
            graph.seed = self._seed

    def run(self, own: Any, session: Any, fetches: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``Session.run``."""
        variables = session.graph.get_collection(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES)
        if not variables or not any(self._is_update(session.graph, fetch) for fetch in _flat(fetches)):
            return own(session, fetches, *args, **kwargs)
        name = f"session{self._numbers.setdefault(session, len(self._numbers))}"
        values = own(session, variables)
        if name not in self._recorder.facts["variables"]:
            self._recorder.facts["variables"][name] = [variable.name for variable in variables]
            values = self._start_alike(own, session, variables, values, name)
        result = own(session, fetches, *args, **kwargs)
        self._recorder.keep_step(name, [np.nan] * len(values), values)
        numbers = [float(each) for each in _flat(result) if isinstance(each, np.floating)]
        self._recorder.logs({f"fetched number {place}": value for place, value in enumerate(numbers)})
        return result

    def _start_alike(self, own: Any, session: Any, variables: Any, values: Any, name: str) -> Any:
        """Start a rank from the single process's values: graphs with other operations draw other ones from one seed."""
        settings = self._recorder.settings
        path = replace(settings, run="one", rank=0).folder / f"{name}.npz"
        if settings.ranks == 1:
            np.savez(settings.folder / path.name, *values)
        elif path.exists():
            self._recorder.note("started", values=[float(np.linalg.norm(value)) for value in values])
            stored = np.load(path)
            for variable, entry in zip(variables, stored.files):
                if stored[entry].shape == variable.shape:
                    variable.load(stored[entry], session)
        return own(session, variables)

    def _is_update(self, graph: Any, fetch: Any) -> bool:
        try:
            waiting = [graph.as_graph_element(fetch)]
        except (KeyError, TypeError, ValueError):
            return False
        waiting = [getattr(waiting[0], "op", waiting[0])]
        key = (weakref.ref(graph), waiting[0].name)
        if key not in self._trains:
            seen = {waiting[0].name}
            while waiting and not waiting[-1].type.startswith(_UPDATES):
                operation = waiting.pop()
                before = [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
                waiting += [each for each in before if each.name not in seen]
                seen.update(each.name for each in before)
            self._trains[key] = bool(waiting)
        return self._trains[key]


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [part for each in value for part in _flat(each)] if isinstance(value, (list, tuple)) else [value]
