"""``horovod.tensorflow``: operations, optimizers, the tape and hooks."""

from npu_device._src.horovod.distributed import (
    DistributedGradientTape as DistributedGradientTape,
    DistributedOptimizer as DistributedOptimizer,
    PartialDistributedGradientTape as PartialDistributedGradientTape,
)
from npu_device._src.horovod.other_names import __getattr__ as __getattr__
from npu_device._src.horovod.process import (
    ccl_built as ccl_built,
    cuda_built as cuda_built,
    ddl_built as ddl_built,
    gloo_built as gloo_built,
    gloo_enabled as gloo_enabled,
    init as init,
    is_initialized as is_initialized,
    local_rank as local_rank,
    local_rank_op as local_rank_op,
    local_size as local_size,
    local_size_op as local_size_op,
    mpi_built as mpi_built,
    mpi_enabled as mpi_enabled,
    mpi_threads_supported as mpi_threads_supported,
    nccl_built as nccl_built,
    rank as rank,
    rank_op as rank_op,
    rocm_built as rocm_built,
    shutdown as shutdown,
    size as size,
    size_op as size_op,
)
from npu_device._src.horovod.sent_state import (
    BroadcastGlobalVariablesHook as BroadcastGlobalVariablesHook,
    allgather_object as allgather_object,
    broadcast_ as broadcast_,
    broadcast_global_variables as broadcast_global_variables,
    broadcast_object as broadcast_object,
    broadcast_object_fn as broadcast_object_fn,
    broadcast_variables as broadcast_variables,
)
from npu_device._src.horovod.tensor_ops import (
    Adasum as Adasum,
    Average as Average,
    Compression as Compression,
    Max as Max,
    Min as Min,
    Product as Product,
    Sum as Sum,
    allgather as allgather,
    allreduce as allreduce,
    alltoall as alltoall,
    broadcast as broadcast,
    grouped_allgather as grouped_allgather,
    grouped_allreduce as grouped_allreduce,
    grouped_reducescatter as grouped_reducescatter,
    reducescatter as reducescatter,
)
from npu_device.horovod.tensorflow import util as util
from npu_device.horovod.tensorflow.util import _executing_eagerly as _executing_eagerly
