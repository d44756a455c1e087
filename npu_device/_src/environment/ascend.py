"""Declare the variables of Ascend's TF Adapter that the package understands."""

from __future__ import annotations

from npu_device._src.environment import forms
from npu_device._src.environment.forms import (
    ADDRESS,
    COUNT,
    INDEX,
    PATH,
    TEXT,
    Form,
    Variable,
    optional,
)

RANK_TABLE_FILE = optional(PATH, "rank table (JSON) that names the servers and ranks of the job.")
RANK_ID = optional(
    INDEX,
    "rank of this process in the rank table. In a table of pods (`group_list`), it may be the name of the pod.",
)
RANK_SIZE = optional(COUNT, "number of ranks in the job; 1 means a single device.", "ranks")
POD_NAME = optional(
    TEXT,
    "pod of this process in a rank table of pods (`group_list`). It takes precedence over RANK_ID there.",
)
CM_CHIEF_IP = optional(
    ADDRESS,
    "address of the host of the chief, where the ranks meet without a rank table.",
)
CM_CHIEF_PORT = optional(forms.integer(1, 65520), "port the chief listens on.")
CM_CHIEF_DEVICE = optional(
    INDEX,
    "device number of the chief on its host.",
)
CM_WORKER_SIZE = optional(
    forms.integer(1, 32768),
    "number of ranks in the job, without a rank table.",
    "ranks",
)
CM_WORKER_IP = optional(
    ADDRESS,
    "address of this host, the same for all processes on it. Default: the address from which the process connects.",
)
ASCEND_DEVICE_ID = optional(
    INDEX,
    "number of the device of this process on its host. Default: DEVICE_ID.",
)
DEVICE_ID = optional(
    INDEX,
    "older name of ASCEND_DEVICE_ID; default: the local rank, or 0 if that isn't known.",
)
JOB_ID = Variable(
    TEXT,
    "default",
    "name of the job: letters, digits, `-` and `_`. Ranks of different jobs refuse each other.",
)
HCCL_CONNECT_TIMEOUT = Variable(
    forms.seconds(7200),
    120.0,
    "how long the ranks wait for each other at the start.",
    "s",
)
HCCL_IF_IP = optional(
    ADDRESS,
    "address that the other ranks use to reach this one; default: the address from which it connects.",
)
HCCL_SOCKET_IFNAME = optional(
    TEXT,
    "network interfaces of this host, the first address of which the other ranks use to reach this rank: `eth,ib` for "
    "those whose names begin so, `=eth0` for exactly that one, `^eth` and `^=eth0` for all others; the loopback only "
    "if no other one fits. HCCL_IF_IP takes precedence.",
)
HCCL_IF_BASE_PORT = optional(
    forms.integer(1024, 65520),
    "port on the host of rank 0 where the ranks meet, with a rank table without a `host_port` for rank 0, or with "
    "Slurm, MPI or torchrun; default: one from 61000 to 64999, computed from JOB_ID and the table or the job of the "
    "launcher.",
)
AOE_MODE = optional(
    forms.one_of("1", "2", "4"),
    "mode of the tuner of Ascend. No effect: 4 logs a warning, see [faster.md](faster.md#tune-the-gradient-split).",
    is_compared=True,
)
PROFILING_MODE = Variable(
    forms.one_of("true", "false", "dynamic"),
    "false",
    "true traces the iterations, like the option `profiling_config.enable_profiling`; dynamic means false here.",
)
PROFILING_OPTIONS = optional(
    Form(str, "JSON"),
    "settings of the trace, in the form of the option `profiling_config.profiling_options`.",
)
NPU_LOOP_SIZE = Variable(
    COUNT,
    1,
    "steps of a loop in one call (recorded, without effect); overridden by `npu.set_npu_loop_size`.",
    "steps",
)
