"""The versions that the installed TensorFlow comes with, for tests that need them. Imports no TensorFlow."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

try:
    _KERAS = version("keras")
except PackageNotFoundError:  # a TensorFlow before its release
    _KERAS = version("keras-nightly")
HAS_KERAS_3 = not _KERAS.startswith("2.")

needs_keras_3 = pytest.mark.skipif(not HAS_KERAS_3, reason="this TensorFlow comes with Keras 2")
