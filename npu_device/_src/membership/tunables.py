"""How the C library of ranks copies: past the cache."""

from __future__ import annotations

import os

from npu_device._src import environment

_TUNABLE = "glibc.cpu.x86_non_temporal_threshold"
_PAST_CACHE_BYTES = 256 << 10
"""Copies from this size on are written past the cache: slots of shared memory are larger, messages smaller."""


def tunables_of_ranks() -> dict[str, str]:
    """Return the variable for ranks that share a host, with the user's tunables; nothing if the user has decided.

    A sum in shared memory writes what another rank reads. Where the cores of the ranks share no cache, reading what
    lies in the cache of another core takes longer than reading it from memory.
    """
    tunables_of_user = os.environ.get("GLIBC_TUNABLES", "")
    if environment.NPU_DEVICE_TUNE_COPIES.get() == "off" or _TUNABLE in tunables_of_user:
        return {}
    # The C library reads it when a process starts, so that a rank can't set it by itself.
    tunables = f"{_TUNABLE}={_PAST_CACHE_BYTES}"
    return {"GLIBC_TUNABLES": ":".join(filter(None, (tunables_of_user, tunables)))}
