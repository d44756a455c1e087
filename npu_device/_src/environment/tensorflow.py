"""Declare the variables of TensorFlow that the package reads."""

from __future__ import annotations

import json

from npu_device._src.environment import forms
from npu_device._src.environment.variable import Form, Variable

_THREADS = "TensorFlow's own setting. If it is set, the package doesn't divide a host's cores among its ranks."

TF_CONFIG: Variable[str | None] = Variable(
    "TF_CONFIG",
    Form(str, "JSON"),
    None,
    "",
    "cluster and task of this process, as Kubeflow's training operator sets it.",
    "TensorFlow",
)
TF_NUM_INTRAOP_THREADS: Variable[str | None] = Variable(
    "TF_NUM_INTRAOP_THREADS",
    forms.TEXT,
    None,
    "threads",
    _THREADS,
    "TensorFlow",
)
TF_NUM_INTEROP_THREADS: Variable[str | None] = Variable(
    "TF_NUM_INTEROP_THREADS",
    forms.TEXT,
    None,
    "threads",
    _THREADS,
    "TensorFlow",
)
_A_DAY = "86400s"
_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{"service": "tensorflow.WorkerService", "method": "MarkRecvFinished"}],
                "retryPolicy": {
                    "maxAttempts": 2,
                    "initialBackoff": _A_DAY,
                    "maxBackoff": _A_DAY,
                    "backoffMultiplier": 1,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    },
    separators=(r"\054", ":"),  # a comma, which would end the option
).replace('"', r"\"")
GRPC_MAX_RETRIES: Variable[int] = Variable(
    "GRPC_MAX_RETRIES",
    forms.integer(0),
    10,
    "attempts",
    "how often TensorFlow's backend repeats a transfer whose connection broke, as it does while a rank is stopped.",
    "TensorFlow",
)
TF_GRPC_DEFAULT_OPTIONS: Variable[str] = Variable(
    "TF_GRPC_DEFAULT_OPTIONS",
    forms.TEXT,
    f'grpc.min_reconnect_backoff_ms=86400000,grpc.service_config="{_SERVICE_CONFIG}"',
    "",
    "options of TensorFlow's connections to other ranks: how long one may take (until a stopped rank goes on), and "
    "that gRPC holds a failed `MarkRecvFinished`: TensorFlow may crash if it repeats that. Your own value replaces "
    "this one, so keep these options in it.",
    "TensorFlow",
)
TF_FORCE_GPU_ALLOW_GROWTH: Variable[str | None] = Variable(
    "TF_FORCE_GPU_ALLOW_GROWTH",
    forms.TEXT,
    None,
    "",
    "TensorFlow's own setting. If it is set, the package doesn't choose how ranks that share a GPU take its memory.",
    "TensorFlow",
)


def user_sets_threads() -> bool:
    """Return True if the environment fixes the size of TensorFlow's thread pools."""
    return TF_NUM_INTRAOP_THREADS.is_set() or TF_NUM_INTEROP_THREADS.is_set()
