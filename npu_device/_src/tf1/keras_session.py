"""The session of Keras 2 in TensorFlow 1 style.

Keras 3 has no sessions: there the session is that of the Keras inside TensorFlow, which ``tf.keras`` models don't use.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.tf1.config import npu_config_proto

backend = compat.session_backend()
"""The Keras backend that scripts take from the star import."""


def set_keras_session_npu_config(config: Any = None) -> Any:
    """Return a session with ``npu_config_proto(config)``, which Keras uses from now on.

    Args:
        config: a ``tf.compat.v1.ConfigProto``, which is changed; anything else counts as a new one.

    Source: Ascend TF Adapter 1.x, ``set_keras_session_npu_config``.
    """
    with tf.compat.v1.get_default_graph().as_default():  # a session needs a graph, in eager mode too
        session = tf.compat.v1.Session(config=npu_config_proto(config))
    backend.set_session(session)
    return session


def npu_clear_session(config: Any = None) -> None:
    """Drop Keras's graph and session, and give it a new session with ``npu_config_proto(config)``.

    Args:
        config: a ``ConfigProto`` or None.

    Source: Ascend TF Adapter 1.x, ``npu_clear_session``.
    """
    backend.clear_session()
    set_keras_session_npu_config(config)
