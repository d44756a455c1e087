"""``horovod.keras``: for scripts that train with Keras."""

from npu_device._src.horovod.distributed import (
    DistributedOptimizer,
)
from npu_device._src.horovod.keras_names import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    load_model,
    reducescatter,
)
from npu_device._src.horovod.other_names import (
    __getattr__,
)
from npu_device._src.horovod.process import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from npu_device._src.horovod.sent_state import (
    allgather_object,
    broadcast_object,
    broadcast_variables,
)
from npu_device._src.horovod.tensor_ops import (
    Adasum,
    Average,
    Compression,
    Sum,
)
from npu_device.horovod.keras import callbacks

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Sum",
    "__getattr__",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "rocm_built",
    "shutdown",
    "size",
]
