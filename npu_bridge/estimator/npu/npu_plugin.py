"""Start, stop and modes of the device, in Ascend's spelling."""

from npu_device._src.no_effect.modes import (
    is_inf_nan_enabled as is_inf_nan_enabled,
    set_device_sat_mode as set_device_sat_mode,
)
from npu_device._src.tf1.system import (
    npu_resource_init as npu_resource_init,
    npu_resource_shutdown as npu_resource_shutdown,
)
