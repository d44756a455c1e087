"""Declare the variables of TensorFlow that the package reads."""

from __future__ import annotations

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
    "grpc.min_reconnect_backoff_ms=86400000",
    "",
    "options of TensorFlow's connections to other ranks, here that a connection may take until a stopped rank goes on.",
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
