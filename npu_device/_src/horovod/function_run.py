"""``horovod.run``: a function on new processes, as ``npu.run`` calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from npu_device._src.horovod.modules import PAGE
from npu_device._src.pools import notebook

_REFUSED = ("min_np", "max_np", "slots", "reset_limit", "cooldown_range", "hosts", "hostfile")
_NO_EFFECT = """
start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo use_mpi mpi_args
network_interface network_interfaces executable prefix_output_with_timestamp
"""


def run(
    func: Callable,
    args: Sequence = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    **options: Any,
) -> list:
    """Call a function on new processes of this machine; return the results in order of rank.

    Args:
        func: of a notebook, a script or a module.
        args: its arguments.
        kwargs: its named arguments.
        np: how many processes; default 1.
        **options: those of Horovod that concern how processes start have no effect.

    Raises:
        NotImplementedError: several hosts, or a changing number of processes.
        Exception: what the function raised on the first rank that failed.
        RankError, TypeError, ImportError, RuntimeError: as ``npu.run``.
    """
    for name, value in options.items():
        if name not in _REFUSED and name not in _NO_EFFECT.split():
            raise TypeError(f"horovod.run() got an unexpected keyword argument {name!r}")
        if value is not None and name in _REFUSED:
            raise NotImplementedError(
                f"horovod.run was given {name}; it starts its processes on this machine, and their number stays "
                f"({PAGE}).\nWhat to do: npurun -np N -H a:2,b:2 --horovod train.py"
            )
    call = functools.partial(func, **(kwargs or {}))
    return notebook.call_on_ranks(_HorovodPool, call, args, np or 1)


class _HorovodPool(notebook.NotebookPool):
    has_horovod_variables = True
