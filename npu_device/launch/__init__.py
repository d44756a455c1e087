"""``npurun``, the launcher: starts the ranks of a training script, forwards their output, and stops them together.

It imports no TensorFlow, and nothing of npu_device that does. ``__main__`` is the entry point, ``launcher`` runs a job
from start to exit code.
"""
