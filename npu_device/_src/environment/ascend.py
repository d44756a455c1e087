"""Declare the variables of Ascend's TF Adapter that the package understands."""

from __future__ import annotations

from npu_device._src.environment import forms
from npu_device._src.environment.variable import Form, Variable

RANK_TABLE_FILE: Variable[str | None] = Variable(
    "RANK_TABLE_FILE", forms.PATH, None, "", "rank table (JSON) that names the servers and ranks of the job.", "Ascend"
)
RANK_ID: Variable[int | None] = Variable(
    "RANK_ID",
    forms.integer(0),
    None,
    "",
    "this process's rank in the rank table; in a table of pods (`group_list`), it may be the name of the pod.",
    "Ascend",
)
RANK_SIZE: Variable[int | None] = Variable(
    "RANK_SIZE", forms.integer(1), None, "ranks", "number of ranks in the job; 1 means a single device.", "Ascend"
)
POD_NAME: Variable[str | None] = Variable(
    "POD_NAME",
    forms.TEXT,
    None,
    "",
    "this process's pod in a rank table of pods (`group_list`); takes precedence over RANK_ID there.",
    "Ascend",
)
CM_CHIEF_IP: Variable[str | None] = Variable(
    "CM_CHIEF_IP",
    forms.ADDRESS,
    None,
    "",
    "address of the chief's host, where the ranks meet without a rank table.",
    "Ascend",
)
CM_CHIEF_PORT: Variable[int | None] = Variable(
    "CM_CHIEF_PORT", forms.integer(1, 65520), None, "", "port the chief listens on.", "Ascend"
)
CM_CHIEF_DEVICE: Variable[int | None] = Variable(
    "CM_CHIEF_DEVICE",
    forms.integer(0),
    None,
    "",
    "device number of the chief on its host: which of that host's processes is the chief.",
    "Ascend",
)
CM_WORKER_SIZE: Variable[int | None] = Variable(
    "CM_WORKER_SIZE",
    forms.integer(1, 32768),
    None,
    "ranks",
    "number of ranks in the job, without a rank table.",
    "Ascend",
)
CM_WORKER_IP: Variable[str | None] = Variable(
    "CM_WORKER_IP",
    forms.ADDRESS,
    None,
    "",
    "address of this process's host, the same for all processes on it; default: the address from which it connects.",
    "Ascend",
)
ASCEND_DEVICE_ID: Variable[int | None] = Variable(
    "ASCEND_DEVICE_ID",
    forms.integer(0),
    None,
    "",
    "number of this process's device on its host; default: DEVICE_ID.",
    "Ascend",
)
DEVICE_ID: Variable[int | None] = Variable(
    "DEVICE_ID",
    forms.integer(0),
    None,
    "",
    "older name of ASCEND_DEVICE_ID; default: the local rank, or 0 if that isn't known.",
    "Ascend",
)
JOB_ID: Variable[str] = Variable(
    "JOB_ID",
    forms.TEXT,
    "default",
    "",
    "name of the job: letters, digits, `-` and `_`. Ranks of different jobs refuse each other.",
    "Ascend",
)
HCCL_CONNECT_TIMEOUT: Variable[float] = Variable(
    "HCCL_CONNECT_TIMEOUT",
    forms.seconds(7200),
    120.0,
    "s",
    "how long the ranks wait for each other at the start.",
    "Ascend",
)
HCCL_IF_IP: Variable[str | None] = Variable(
    "HCCL_IF_IP",
    forms.ADDRESS,
    None,
    "",
    "address that the other ranks use to reach this one; default: the address from which it connects.",
    "Ascend",
)
HCCL_SOCKET_IFNAME: Variable[str | None] = Variable(
    "HCCL_SOCKET_IFNAME",
    forms.TEXT,
    None,
    "",
    "network interfaces of this host, the first address of which the other ranks use to reach this rank: `eth,ib` for "
    "those whose names begin so, `=eth0` for exactly that one, `^eth` and `^=eth0` for all others. HCCL_IF_IP takes "
    "precedence.",
    "Ascend",
)
HCCL_IF_BASE_PORT: Variable[int | None] = Variable(
    "HCCL_IF_BASE_PORT",
    forms.integer(1024, 65520),
    None,
    "",
    "port on rank 0's host where the ranks meet: those of a rank table without a `host_port` for rank 0, and those "
    "that Slurm or MPI started; default: one from 61000 to 64999, computed from JOB_ID and the table or the launcher's "
    "job.",
    "Ascend",
)
AOE_MODE: Variable[str | None] = Variable(
    "AOE_MODE",
    forms.one_of("1", "2", "4"),
    None,
    "",
    "4 finds the best gradient split (`npurun` acts as with `--tune`); 1 and 2 tune NPU kernels and have no effect. "
    "The option `aoe_config.aoe_mode` takes precedence.",
    "Ascend",
)
TUNE_BANK_PATH: Variable[str | None] = Variable(
    "TUNE_BANK_PATH",
    forms.PATH,
    None,
    "",
    "directory for the tuner's `<device>_gradient_fusion.json`; default: the tuner's work path.",
    "Ascend",
)
PROFILING_MODE: Variable[str] = Variable(
    "PROFILING_MODE",
    forms.one_of("true", "false", "dynamic"),
    "false",
    "",
    "true traces the iterations, like the option `profiling_config.enable_profiling`; dynamic means false here.",
    "Ascend",
)
PROFILING_OPTIONS: Variable[str | None] = Variable(
    "PROFILING_OPTIONS",
    Form(str, "JSON"),
    None,
    "",
    "settings of the trace, in the form of the option `profiling_config.profiling_options`.",
    "Ascend",
)
NPU_LOOP_SIZE: Variable[int] = Variable(
    "NPU_LOOP_SIZE",
    forms.integer(1),
    1,
    "steps",
    "steps of a loop in one call (recorded, without effect); overridden by `npu.set_npu_loop_size`.",
    "Ascend",
)
