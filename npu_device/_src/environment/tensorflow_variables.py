"""Declare the variables of TensorFlow and of its libraries that the package reads."""

from __future__ import annotations

from collections.abc import Iterable

from npu_device._src.environment import forms
from npu_device._src.environment.forms import TEXT, Form, Variable, optional

_THREADS = (
    "setting of TensorFlow. If it is set, the cores of a host aren't divided among its ranks."
)

TF_CONFIG = optional(
    Form(str, "JSON"),
    "cluster and task of this process, as the training operator of Kubeflow sets it.",
)
TF_NUM_INTRAOP_THREADS = optional(TEXT, _THREADS, "threads")
TF_NUM_INTEROP_THREADS = optional(TEXT, _THREADS, "threads")
_SERVICE_CONFIG = (
    '{"methodConfig":[{"name":[{"service":"tensorflow.WorkerService","method":"MarkRecvFinished"}],"retryPolicy":'
    '{"maxAttempts":2,"initialBackoff":"86400s","maxBackoff":"86400s","backoffMultiplier":1,'
    '"retryableStatusCodes":["UNAVAILABLE"]}}]}'
)
# TensorFlow splits its options at each comma, and then replaces the escapes in a quoted one.
_CONFIG_WITHOUT_COMMAS = _SERVICE_CONFIG.replace(",", r"\054")
_ESCAPED_CONFIG = _CONFIG_WITHOUT_COMMAS.replace('"', r"\"")
GRPC_MAX_RETRIES = Variable(
    forms.integer(0),
    10,
    "how often the `tensorflow` engine repeats a transfer whose connection broke, as it does while a rank is stopped.",
    "attempts",
)
TF_GRPC_DEFAULT_OPTIONS = Variable(
    TEXT,
    "grpc.http2.bdp_probe=0,grpc.http2.lookahead_bytes=16777216,"
    f'grpc.min_reconnect_backoff_ms=86400000,grpc.service_config="{_ESCAPED_CONFIG}"',
    "options of TensorFlow's connections to other ranks: how many bytes a rank accepts before it has read them (gRPC's "
    "own estimate is too low), how long a connection may take (until a stopped rank goes on), and that gRPC holds a "
    "failed `MarkRecvFinished`: TensorFlow may crash if it repeats that. Your own value replaces this one, so keep "
    "these options in it.",
)
no_grpc_proxy = optional(
    TEXT,
    "setting of gRPC: hosts that it reaches without the proxy of `grpc_proxy`, `https_proxy` or `http_proxy`. "
    "The `tensorflow` engine adds the addresses of the ranks, which a proxy would not connect.",
)
no_proxy = optional(TEXT, "what gRPC takes where `no_grpc_proxy` isn't set.")
MALLOC_MMAP_THRESHOLD_ = Variable(
    forms.integer(0),
    32 << 20,
    "setting of glibc: larger blocks of memory come from the system each time. The `tensorflow` engine sets it.",
    "bytes",
)
MALLOC_TRIM_THRESHOLD_ = Variable(
    forms.integer(-1),
    512 << 20,
    "setting of glibc: how much freed memory a process keeps, -1 for all. The `tensorflow` engine sets it: transfers "
    "are slower if they take fresh memory from the system each time.",
    "bytes",
)
TF_FORCE_GPU_ALLOW_GROWTH = optional(
    TEXT,
    "setting of TensorFlow. If it is set, the package doesn't choose how ranks that share a GPU take its memory.",
)
# ``collectives.gpu_choice`` parses these two.
CUDA_VISIBLE_DEVICES = optional(
    TEXT,
    "the GPUs or MIG instances that CUDA shows to a process: numbers, `GPU-…` or `MIG-…` separated by commas; set but "
    "empty or `-1`: none. Each rank takes one of them, by its device number.",
)
NVIDIA_VISIBLE_DEVICES = optional(
    TEXT,
    "the GPUs that a container has: `all`, `none`, `void` or a list. A list of MIG instances counts as that of "
    "CUDA_VISIBLE_DEVICES if that is unset; otherwise, the variable only explains why there is no GPU.",
)


def reach_without_proxy(hosts: Iterable[str]) -> None:
    """Let gRPC reach hosts directly, besides those that the user has named."""
    direct = list(hosts)
    named = no_grpc_proxy.raw() or no_proxy.raw()
    if named:
        # Repetitions are dropped, since ranks of one host have one address.
        direct = [*named.split(","), *direct]
    no_grpc_proxy.set(",".join(dict.fromkeys(direct)))
