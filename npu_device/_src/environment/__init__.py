"""The environment variables that the package reads; nothing else reads them. ``docs/environment.md`` lists them."""

from npu_device._src.environment.ascend import *  # noqa: F403
from npu_device._src.environment.checks import (
    ALL as ALL,
    HOROVOD_OF_A_RANK as HOROVOD_OF_A_RANK,
    check_own_variables as check_own_variables,
    compared_settings as compared_settings,
    horovod_variables_without_effect as horovod_variables_without_effect,
)
from npu_device._src.environment.forms import Variable as Variable
from npu_device._src.environment.launcher_variables import *  # noqa: F403
from npu_device._src.environment.own import *  # noqa: F403
from npu_device._src.environment.tensorflow_variables import *  # noqa: F403
