"""The variables together: which there are, and what is checked before a job begins."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection
from types import ModuleType

from npu_device._src.environment import ascend, launcher_variables, own, tensorflow_variables
from npu_device._src.environment.forms import Variable, names_in_environment

_OWNERS = (ascend, tensorflow_variables, launcher_variables, own)


def _variables_of(owner: ModuleType) -> list[Variable]:
    """Return the variables that a file declares; each gets the name of its constant."""
    variables = []
    for name, variable in vars(owner).items():
        if isinstance(variable, Variable):
            variable.name = name
            variables.append(variable)
    return variables


ALL = tuple[Variable, ...](variable for owner in _OWNERS for variable in _variables_of(owner))
"""All variables, in the order of their owners."""

HOROVOD_OF_A_RANK = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
)
"""What Horovod's launcher tells each rank, and ``npurun --horovod`` as well, for scripts that read it."""

_log = logging.getLogger("npu_device")


def check_own_variables(warns: bool) -> None:
    """Raise the error of a malformed variable of this package; with ``warns``, warn of names that it doesn't have."""
    variables = _variables_of(own)
    # All values are read now, so that a wrong one isn't found in the middle of a training.
    for variable in variables:
        variable.get()
    if not warns:
        return
    names = {variable.name for variable in variables}
    # An unknown name is probably misspelled, and would silently do nothing.
    unknown = sorted(names_in_environment("NPU_DEVICE_") - names)
    if unknown:
        hints = "\n".join(_with_hint(name, names) for name in unknown)
        _log.warning(
            "npu_device has no environment variables of these names, and ignores them:\n%s\n"
            "What to do: correct or unset them; npurun docs environment lists all variables.",
            hints,
        )


def _with_hint(name: str, names: Collection[str]) -> str:
    matches = difflib.get_close_matches(name, names, 1)
    if not matches:
        return f"  {name}"
    return f"  {name}: did you mean {matches[0]}?"


def compared_settings() -> dict[str, str]:
    """Return the variables that must be the same on all ranks and don't have their defaults, by name."""
    # Values are compared as they are read, so that two spellings of one are equal.
    settings = {}
    for variable in ALL:
        if variable.is_compared and variable.get() != variable.default:
            settings[variable.name] = str(variable.get())
    return settings


def horovod_variables_without_effect() -> list[str]:
    names = {variable.name for variable in ALL}.union(HOROVOD_OF_A_RANK)
    return sorted(names_in_environment("HOROVOD_") - names)
