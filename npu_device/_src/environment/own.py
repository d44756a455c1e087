"""Declare the variables that only this package has."""

from __future__ import annotations

import functools

from npu_device._src.environment import forms
from npu_device._src.environment.forms import (
    COMMAND,
    COUNT,
    NUMBERS,
    PATH,
    PORT,
    PORTS,
    TEXT,
    WINDOWS,
    Form,
    Variable,
    optional,
)


def _choice(words: str, meaning: str, is_compared: bool = False) -> Variable[str]:
    """Return a variable whose values are these words, of which the first is the default."""
    texts = words.split()
    return Variable(forms.one_of(*texts), texts[0], meaning, is_compared=is_compared)


_common_choice = functools.partial(_choice, is_compared=True)


NPU_DEVICE_SECRET = optional(
    TEXT,
    "secret of the job, the same for all ranks. Only ranks that know it can join. `npurun` generates one for a job on "
    "one node, and with `--hosts`.",
)
NPU_DEVICE_SECRET_FILE = optional(
    PATH,
    "file with the secret of the job. Use it instead of `NPU_DEVICE_SECRET`.",
)
NPU_DEVICE_LAUNCHER = _choice(
    "auto slurm mpi torchrun jax off",
    "the launcher whose variables describe the job if Ascend's and TF_CONFIG don't: `slurm`, `mpi` (MPI's `mpiexec`), "
    "`torchrun` or `jax`; `auto` uses those that are set, `off` none of them, so that a single process may train. "
    "`npurun` sets `off` for its ranks.",
)
NPU_DEVICE_PORT_RANGE = optional(
    PORTS,
    "for firewalls: the ports that the package may choose to listen on; default: any. Ports that you set yourself "
    "(`--master-port`, a rank table, CM_CHIEF_PORT, TF_CONFIG, MASTER_PORT) are used as given.",
)
NPU_DEVICE_SSH = Variable(
    COMMAND,
    "ssh -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=15",
    "the command with which `npurun --hosts` reaches a host; the host and a shell command are added to it.",
)
NPU_DEVICE_CORES = optional(
    COUNT,
    "number of cores that this rank has for itself, one thread of TensorFlow for each; `npurun` sets this with "
    "`--bind-to`, and where a quota of CPU time is smaller than the host.",
)
NPU_DEVICE_HUB = optional(PORT, "port of a hub that is already running; `npurun` sets this.")
NPU_DEVICE_BACKEND = _common_choice(
    "auto nccl tensorflow mpi tcp shared_memory",
    "the engine that sends tensors between hosts: `nccl` is NCCL through TensorFlow, also within a host, and needs a "
    "GPU for each rank; `tensorflow` is TensorFlow over gRPC; `mpi` is MPI through mpi4py, and "
    "needs ranks that one `mpiexec` started; `tcp` is TCP connections of this package. `auto` is `nccl` where each "
    "rank has a GPU; or else `mpi` where one `mpiexec` started the ranks and mpi4py is installed; or else "
    "`tensorflow`. In this release, `shared_memory` still stands for `NPU_DEVICE_SHARED_MEMORY=required`.",
)
NPU_DEVICE_SHARED_MEMORY = _common_choice(
    "on off required",
    "whether the ranks of a host share memory for their tensors: `on`, where they can; `off` sends tensors through the "
    "engine of `NPU_DEVICE_BACKEND` within a host too; with `required`, ranks that can't share memory are an error.",
)
NPU_DEVICE_STALL_WARNING = Variable(
    forms.seconds(86400),
    30.0,
    "when a rank has waited this long for the others to make the same call, it reports which ranks are missing.",
    "s",
)
NPU_DEVICE_STALL_TIMEOUT = Variable(
    forms.seconds(86400),
    600.0,
    "when a rank has waited this long for the others to make the same call, it gives up with an error.",
    "s",
)
NPU_DEVICE_ERROR_FILE = optional(
    PATH,
    "file in which a failing rank leaves its error for `npurun`, which sets this.",
)
NPU_DEVICE_TRACE_ITERATIONS = Variable(
    WINDOWS,
    (),
    "which iterations a trace records; default: the first 100, then every 2nd up to 200, every 4th up to 400, and so "
    "on.",
    "iterations",
)
NPU_DEVICE_SPLIT = optional(
    Form(
        forms.split, "1 to 8 ascending numbers, or percentages such as 25%,25%,50% whose sum is 100"
    ),
    "how gradients are split if the script sets no split strategy: numbers are those of `set_split_strategy_by_idx`, "
    "for lists that they fit; percentages those of `set_split_strategy_by_size`.",
    is_compared=True,
)
NPU_DEVICE_SHARD_OPTIMIZER = _common_choice(
    "off on",
    "whether the updates of Keras optimizers are divided among the ranks (ZeRO stage 1), where a script doesn't say "
    "so itself by `shard_optimizer=`.",
)
NPU_DEVICE_TUNE_COPIES = _choice(
    "auto on off",
    "whether npurun sets `GLIBC_TUNABLES` for several ranks of a host, so that the C library writes copies of 256 KiB "
    "and more past the cache; `auto`: on AMD's processors. Your own tunables are kept.",
)
NPU_DEVICE_UNEQUAL_START = _common_choice(
    "repair error ignore",
    "what happens if variables differ between the ranks at the first step of a wrapped optimizer, or when a "
    "`tf.function` that reduces gradients itself is traced: `repair` gives them the values of rank 0, with a warning; "
    "`error` raises an error; `ignore` doesn't check. Eager loops that reduce gradients themselves only get the "
    "warning of `repair`. A replicated model always begins with the values of rank 0.",
)
NPU_DEVICE_AUDIT = Variable(
    Form(forms.audit, "auto, off, or a number of steps"),
    "auto",
    "number of steps after which the ranks compare digests of variables and optimizer state. `auto`: so that it takes "
    "about 0.05 % of the time. `off`: never.",
    "steps",
    is_compared=True,
)
NPU_DEVICE_DRIFT = _common_choice(
    "error warning",
    "what happens when the audit finds ranks with different variables: an error on all ranks, or one warning.",
)
NPU_DEVICE_CHECK_GRADIENTS = _common_choice(
    "off on",
    "`on` makes a wrapped optimizer check the gradients of each step: NaN or infinity raises an error on all ranks "
    "that names the ranks and variables.",
)
NPU_DEVICE_FIRST_STEP_CHECK = _common_choice(
    "on off",
    "`on` checks the train step of a replicated model before its first step: is the gradient of a few samples the mean "
    "of the gradients of parts of them? If not, the step raises an error or prints a warning.",
)
NPU_DEVICE_STATEMENT = _choice(
    "on off",
    "`on` makes rank 0 report the ranks, batch size and learning rate on stderr when a replicated model starts "
    "training, and when the job begins, which rank has which GPU, and which ports are open to everyone.",
)
NPU_DEVICE_LOG_LEVEL = optional(
    forms.one_of("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL", spelled=str.upper),
    "the level of the logger `npu_device`, from `npu.open()` on; default: Python's, which shows warnings and errors.",
)
NPU_DEVICE_STEP_RANDOM = _common_choice(
    "own same",
    "random numbers in the training step of a replicated model: `own` lets each rank draw its own for its samples; "
    "`same` lets all ranks draw the same, so that gradients are noisier than on one process. `same` ends with 0.3.",
)
NPU_DEVICE_DIVISION = _common_choice(
    "alike first",
    "how a replicated model divides a batch whose tensors have different lengths: `alike` cuts all at the same "
    "fractions; `first` cuts all by the length of the first one, as version 0.1 did. `first` ends with 0.3.",
)
NPU_DEVICE_HOROVOD = optional(
    TEXT,
    "`import horovod` gives `npu_device.horovod`, and Keras 3 takes `experimental_run_tf_function` in `compile`. "
    "`npurun --horovod` and `python -m npu_device.horovod` set this, and PYTHONPATH.",
)
NPU_DEVICE_RESTART_COUNT = Variable(
    forms.integer(0),
    0,
    "number of earlier attempts of the job: each restart, preemption or join begins a new one; `npurun` sets this.",
    "attempts",
)
NPU_DEVICE_RANK_PROCESS = optional(
    TEXT,
    "the rank whose process, or whose child, this is: the import of `npu_device` and `npu.open()` set it, so that "
    "processes which a rank starts know that they aren't ranks. Unset it for a child that is to be a rank.",
)
NPU_DEVICE_PROGRESS_FILE = optional(
    PATH,
    "file in which rank 0 writes the step of each complete checkpoint, so that `npurun` can tell progress from a "
    "script that fails at the same place again and again. `npurun` sets this on node 0.",
)
NPU_DEVICE_JOIN_REQUESTS = optional(
    PATH,
    "named pipe by which `npurun` asks rank 0 to end the attempt after a step, so that a node can join. `npurun` sets "
    "this.",
)
NPU_DEVICE_MEMORY_COPIES = optional(
    TEXT,
    "where `npurun` holds memory for the copies of `memory_every`, and for nodes that come or go. `npurun` sets this.",
)
NPU_DEVICE_PREEMPT_SIGNAL = Variable(
    forms.one_of(
        *("SIGTERM", "SIGUSR1", "SIGUSR2"),
        spelled=lambda text: "SIG" + text.upper().removeprefix("SIG"),
        note=", with or without SIG",
    ),
    "SIGTERM",
    "the signal that asks the ranks to finish the step, write a checkpoint, and end so that the job can be resumed. "
    "`npurun` forwards it to its ranks, and sets this to `--preempt-signal`.",
)
NPU_DEVICE_PREEMPT_TIMEOUT = Variable(
    forms.seconds(86400),
    25.0,
    "a rank that was sent the signal of `NPU_DEVICE_PREEMPT_SIGNAL` ends after this long, even if the step and its "
    "checkpoint are not finished. `npurun` takes it as the default of `--preempt-timeout`, and sets it for its ranks.",
    "s",
)
NPU_DEVICE_TIME_LIMITS = Variable(
    NUMBERS,
    (),
    "for the tests of the package, which wait less: limits of `cluster/time_limits.py` in seconds.",
)


def opened_mark(error_file: str) -> str:
    """Return the path beside the error file of a rank that tells the launcher which process has opened npu_device."""
    return f"{error_file}.opened"
