"""``profiler.Profiler`` of Ascend's star import."""

from npu_device.sessions.profiler import Profiler

__all__ = ["Profiler"]
