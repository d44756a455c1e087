"""The modules of Horovod: which of them exist here, and how a script's ``import horovod`` finds them.

The launcher and ``python -m npu_device.horovod`` put a folder with a package ``horovod`` on PYTHONPATH, so that child
processes find it as well. Imports no TensorFlow.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from npu_device._src import environment

__version__ = "0.28.1"
"""The release of Horovod whose names and arguments these are."""

_HOROVOD = "horovod"
_OWN_PACKAGE = "npu_device.horovod"
_OTHER_MODULES = {
    "torch": "for PyTorch, use torch.distributed with DistributedDataParallel, started by torchrun",
    "mxnet": "MXNet isn't supported; use the Horovod that its scripts were written for",
    "spark": "inside a Spark barrier stage, call npu.open() in each task (npurun docs clusters)",
    "ray": "start one task per rank with Ray, and call npu.open() in each (npurun docs clusters)",
    "runner": "start the script with npurun -np N -H a:2,b:2 --horovod train.py",
}
PAGE = "npurun docs from_horovod"
_SETS = "make a group with hccl.manage.api.create_group, and call npu.distribute.all_reduce(..., group=...)"
_TIMELINE = "HOROVOD_TIMELINE=FILE, or npurun --trace DIR"
OTHER_NAMES = {
    "global_process_set": "leave process_set out",
    "ProcessSet": _SETS,
    "add_process_set": _SETS,
    "remove_process_set": _SETS,
    "join": "give every rank the same number of steps; npu.distribute.weighted_mean takes ranks without samples",
    "elastic": "npurun --max-restarts with npu.train.FitCheckpoint (npurun docs reliability)",
    "BestModelCheckpoint": "ModelCheckpoint(file, save_best_only=True) of Keras on rank 0, after MetricAverageCallback",
    "start_timeline": _TIMELINE,
    "stop_timeline": _TIMELINE,
    "cross_rank": "hvd.rank() // hvd.local_size(), if hosts are alike",
    "cross_size": "hvd.size() // hvd.local_size(), if hosts are alike",
}
"""What to use instead of names of Horovod's modules that aren't offered."""


def variables(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a process of this environment, and its children, import these modules."""
    folder = str(Path(__file__).parent / "path")
    paths = (inherited.get("PYTHONPATH") or folder).split(os.pathsep)
    # The folder comes first on the path: an installed Horovod must not be found before.
    other_paths = [path for path in paths if path != folder]
    return {
        environment.NPU_DEVICE_HOROVOD.name: "1",
        "PYTHONPATH": os.pathsep.join([folder, *other_paths]),
    }


def main() -> None:
    """Become Python with the rest of the command line: mpirun or srun still has the process that it has started."""
    if not sys.argv[1:]:
        sys.exit("usage: python -m npu_device.horovod [-m] script [argument ...]")
    # Python has this list from 3.10 on.
    words = getattr(sys, "orig_argv", [])
    flags: list[str] = []
    if "-m" in words:
        # Flags of Python itself stand before ``-m``.
        flags = words[1 : words.index("-m")]
    command = [sys.executable, *flags, *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, **variables(os.environ)})


def take_over() -> None:
    """Let ``horovod`` and its submodules be those of this package, in this process. ``import horovod`` calls this."""
    # The module has both names, since a script would otherwise have two copies of its state.
    sys.modules[_HOROVOD] = importlib.import_module(_OWN_PACKAGE)
    _Finder.replaces_horovod = True


def other_horovod() -> str | None:
    """Return the version of an installed Horovod that these modules stand in for; None without one."""
    try:
        version = metadata.version(_HOROVOD)
    except metadata.PackageNotFoundError:
        return None
    if not _Finder.replaces_horovod:
        return None
    return version


class _Finder:
    """Finds and loads ``horovod.X``, and says what to do about modules that aren't offered."""

    replaces_horovod = False  # ``horovod`` is this package's

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of Horovod's that is offered; None for all other modules."""
        # Only Horovod's names are looked up here: Python itself finds the modules of this package.
        is_of_horovod = cls.replaces_horovod and name.startswith(f"{_HOROVOD}.")
        own_name = name
        if is_of_horovod:
            own_name = f"npu_device.{name}"
        submodule = own_name.removeprefix(f"{_OWN_PACKAGE}.")
        if submodule == own_name:
            return None
        package, _, last_name = submodule.rpartition(".")
        instead = _OTHER_MODULES.get(submodule.split(".", 1)[0])
        # ``from horovod.tensorflow import elastic`` looks for a module if the package has no such name.
        if instead is None and package:
            instead = OTHER_NAMES.get(last_name)
        if instead is None and is_of_horovod and importlib.util.find_spec(own_name) is None:
            instead = (
                "the modules are horovod.tensorflow, horovod.tensorflow.keras and horovod.keras; see "
                + PAGE
            )
        if instead is not None:
            raise ImportError(
                f"npu_device has no {_HOROVOD}.{submodule}.\nWhat to do: {instead}.", name=name
            )
        if not is_of_horovod:
            return None
        return ModuleSpec(name, cls)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        """Return the module that is meant."""
        # The module is imported under its own name, so that both names stand for one module with one state.
        module = importlib.import_module(f"npu_device.{spec.name}")
        # The spec is kept where ``exec_module`` finds it again.
        spec.loader_state = module.__spec__
        return module

    @staticmethod
    def exec_module(module: Any) -> None:
        """Give the module its own spec back, which the import has replaced."""
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _Finder)
