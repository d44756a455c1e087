"""The versions that the installed TensorFlow comes with, for tests that need them. Imports no TensorFlow."""

from __future__ import annotations

from importlib.metadata import version

import pytest

HAS_KERAS_3 = not version("keras").startswith("2.")

needs_keras_3 = pytest.mark.skipif(not HAS_KERAS_3, reason="this TensorFlow comes with Keras 2")
