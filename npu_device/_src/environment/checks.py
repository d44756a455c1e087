"""The variables together: which there are, and what is checked before a job begins."""

from __future__ import annotations

import difflib
import logging

from npu_device._src.environment import ascend, launcher_variables, own, tensorflow_variables
from npu_device._src.environment.forms import Variable, names_in_environment

ALL: tuple[Variable, ...] = tuple(
    value
    for owner in (ascend, tensorflow_variables, launcher_variables, own)
    for value in vars(owner).values()
    if isinstance(value, Variable)
)
"""All variables, in the order of their owners."""

_log = logging.getLogger("npu_device")


def check_own_variables(warns: bool) -> None:
    known = {value.name: value for value in vars(own).values() if isinstance(value, Variable)}
    for variable in known.values():
        variable.get()
    unknown = sorted(names_in_environment("NPU_DEVICE_") - known.keys()) if warns else []
    if unknown:
        hints = [(name, difflib.get_close_matches(name, known, 1)) for name in unknown]
        lines = [f"  {name}" + (f": did you mean {near[0]}?" if near else "") for name, near in hints]
        _log.warning(
            "npu_device has no environment variables of these names, and ignores them:\n%s\n"
            "What to do: correct or unset them; npurun docs environment lists all variables.",
            "\n".join(lines),
        )


def settings_everywhere() -> dict[str, str]:
    """Return the variables that must be the same on all ranks and don't have their defaults, by name."""
    values = {variable: variable.get() for variable in ALL if variable.everywhere}
    return {variable.name: str(value) for variable, value in values.items() if value != variable.default}


def horovod_variables_without_effect() -> list[str]:
    return sorted(names_in_environment("HOROVOD_") - {variable.name for variable in ALL})
