"""Let the C library of the ranks of a host write large copies past the cache.

A sum in shared memory writes what another rank reads. Where the cores of the ranks share no cache, reading what lies in
the cache of another core takes longer than reading it from memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from npu_device._src import environment

_KEY = "glibc.cpu.x86_non_temporal_threshold"
_BYTES = 256 << 10
"""Copies from this size on are written past the cache: slots of shared memory are larger, messages smaller."""


def tunables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that does it, with the user's tunables; nothing if the user has decided."""
    tunables_of_user = variables.get("GLIBC_TUNABLES", "")
    if environment.NPU_DEVICE_TUNE_COPIES.get() == "off" or _KEY in tunables_of_user:
        return {}
    # The C library reads it when a process starts, so that a rank can't set it by itself.
    return {"GLIBC_TUNABLES": ":".join(filter(None, (tunables_of_user, f"{_KEY}={_BYTES}")))}
