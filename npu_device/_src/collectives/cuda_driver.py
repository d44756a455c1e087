"""Ask NVIDIA's driver which GPU is behind one of CUDA's numbers. Makes no CUDA context and takes no GPU memory."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

_LIBRARY = "libcuda.so.1"
_NAME_BYTES = 256
_BUS_BYTES = 32
_UUID_BYTES = 16


class Identity(NamedTuple):
    """A GPU or MIG instance: its model, its UUID in hexadecimal, and the PCI bus id of the GPU."""

    model: str
    uuid: str
    bus: str


def identity(index: int) -> Identity | None:
    """Return what the driver says about a GPU; None without a driver.

    Args:
        index: CUDA's number of the GPU in this process, which is TensorFlow's number of the physical device.
    """
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError:  # no NVIDIA driver
        return None
    # Unlike cuDeviceGetUuid, its second version (CUDA 11.4) tells the MIG instances of a GPU apart.
    get_uuid = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)
    device = ctypes.c_int()
    model = ctypes.create_string_buffer(_NAME_BYTES)
    bus = ctypes.create_string_buffer(_BUS_BYTES)
    uuid = (ctypes.c_ubyte * _UUID_BYTES)()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), index)
        or driver.cuDeviceGetName(model, _NAME_BYTES, device)
        or get_uuid(uuid, device)
        or driver.cuDeviceGetPCIBusId(bus, _BUS_BYTES, device)
    )
    return None if failed else Identity(model.value.decode(), bytes(uuid).hex(), bus.value.decode())
