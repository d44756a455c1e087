"""Warnings are errors in the tests, in the pools' workers too, but for these: TensorFlow's and Keras's own.

Each line has the text's beginning (a regular expression), the category, and why it is none of the package's affairs.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

ALLOWED: list[tuple[str, type[Warning], str]] = [
    (
        "__array__ implementation doesn't accept a copy keyword",
        DeprecationWarning,
        "numpy 2 asks a variable of Keras 3 for its array (keras/src/backend/tensorflow/core.py); can go when that "
        "__array__ takes copy=",
    ),
    (
        "`shuffle=True` was passed, but will be ignored",
        UserWarning,
        "Keras 3, at every fit on a dataset, for its own default",
    ),
    (
        "Gradients do not exist for variables",
        UserWarning,
        "Keras 3, at a gradient that is None, which the tests of such gradients mean",
    ),
    (
        r"non-integer arguments to randrange\(\)",
        DeprecationWarning,
        "Keras 2.15 draws a seed by randint(1, 1e9) (keras/src/backend.py); can go with TensorFlow 2.15",
    ),
    (
        "float_format is deprecated for text_format",
        UserWarning,
        "TensorFlow writes the graph of a session as text (framework/graph_io.py); can go when it no longer does so "
        "with protobuf 7",
    ),
    (
        r"\w+\.__init__ got an unexpected keyword argument '___pyct_anno'",
        DeprecationWarning,
        "AutoGraph, through gast, at each node of a function on Python 3.13 (TensorFlow 2.21); can go when gast "
        "declares the argument",
    ),
]


def is_allowed(warning: warnings.WarningMessage) -> bool:
    """Return True for a warning of the list, and on ranks for what Keras says about the script: data that end, files
    that it loads.
    """
    if warning.category is UserWarning and {"keras", "tf_keras"} & set(
        Path(warning.filename).parts
    ):
        return True
    return any(
        issubclass(warning.category, category) and re.match(text, str(warning.message))
        for text, category, _ in ALLOWED
    )


@contextlib.contextmanager
def collected() -> Iterator[list[str]]:
    """Collect the warnings that come in the block and are not of the list, as Python would print them.

    They are not raised where they come: a rank that stops in the middle of a collective makes the others wait.
    """
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield texts
        finally:
            texts += [str(warning) for warning in caught if not is_allowed(warning)]
