"""Differences between TensorFlow and Keras releases, and the private parts of both that the package uses.

Only this folder checks versions, imports from ``tensorflow.python``, or touches names with an underscore of TensorFlow
and Keras. Its files are called by what they know. A docstring names the upstream issue of what it works around; none is
known otherwise. It also says when the function can go, or else it stays until there is a public counterpart.
"""

from npu_device._src.compat.checkpoints import *  # noqa: F403
from npu_device._src.compat.datasets import *  # noqa: F403
from npu_device._src.compat.graph_effects import *  # noqa: F403
from npu_device._src.compat.graph_walk import producers as producers, walk as walk
from npu_device._src.compat.graphs import *  # noqa: F403
from npu_device._src.compat.keras import *  # noqa: F403
from npu_device._src.compat.keras_models import *  # noqa: F403
from npu_device._src.compat.optimizer_slots import *  # noqa: F403
from npu_device._src.compat.script_functions import *  # noqa: F403
from npu_device._src.compat.slot_memory import *  # noqa: F403
from npu_device._src.compat.tensorflow import *  # noqa: F403
