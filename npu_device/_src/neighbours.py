"""Files of another distribution in the folders of this package.

Ascend's wheels have the same distribution and import names as this package. Installed into one environment, they mix:
some modules are theirs, the others ours. A wheel can't refuse that at installation, so the import does.
"""

from __future__ import annotations

import os

_OWN_NAMES = {
    "npu_device": "_src compat distribute horovod launch ops testing train utils __init__.py _api.py callbacks.py "
    "configs.py errors.py gen_npu_ops.py npu_device.py",
    "npu_bridge": "estimator experimental hccl helper npu_cpu tbe __init__.py npu_init.py profiler.py tf_adapter.py",
    "hccl": "manage split __init__.py",
}
"""What stands at the top of each folder of the package; a test compares it with the repository."""


def require_own_folders(site: str) -> None:
    """Refuse to continue beside modules of another distribution.

    Args:
        site: the directory that contains ``npu_device``.

    Raises:
        ImportError: names files that are of another package.
    """
    strangers = []
    for folder, own_names in _OWN_NAMES.items():
        for name in _modules(os.path.join(site, folder)):
            if name not in own_names.split():
                strangers.append(os.path.join(site, folder, name))
    if strangers:
        raise ImportError(
            f"{len(strangers)} modules in the folders of this package belong to a different distribution, for instance "
            f"{strangers[0]}.\nLikely cause: the wheels of Ascend (npu_device, npu_bridge, hccl) are installed in this "
            "environment, too; they have the same names.\nWhat to do: install this package into a virtual environment "
            "of its own (python -m venv), or remove one of the two with all of its files."
        )


def _modules(folder: str) -> list[str]:
    """Return the names of the modules and packages in a folder; those without a file of Python don't count."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return []
    return sorted(
        entry.name
        for entry in entries
        if entry.name.endswith((".py", ".so", ".pyd"))
        or (entry.is_dir() and os.path.exists(os.path.join(entry.path, "__init__.py")))
    )
