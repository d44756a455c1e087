"""The names of ``import npu_device as npu``, from the modules that implement them; ``__init__`` loads
this at their first use.
"""

from npu_device import (
    callbacks as callbacks,
    compat as compat,
    configs as configs,
    distribute as distribute,
    errors as errors,
    gen_npu_ops as gen_npu_ops,
    npu_device as npu_device,
    ops as ops,
    train as train,
    utils as utils,
)
from npu_device._src.no_effect.modes import (
    get_schedule_aicore_task_early as get_schedule_aicore_task_early,
    is_inf_nan_enabled as is_inf_nan_enabled,
    set_device_sat_mode as set_device_sat_mode,
    set_npu_loop_size as set_npu_loop_size,
    set_schedule_aicore_task_early as set_schedule_aicore_task_early,
)
from npu_device._src.options import global_options as global_options
from npu_device._src.pools.notebook import run as run
from npu_device._src.training.fit.small_names import npu_compat_function as npu_compat_function
from npu_device._src.training.opening.device import (
    NpuDeviceHandle as NpuDeviceHandle,
    close as close,
    open as open,
)
from npu_device.configs import npu_run_context as npu_run_context
from npu_device.utils.scope import (
    keep_dtype_scope as keep_dtype_scope,
    npu_recompute_scope as npu_recompute_scope,
)
