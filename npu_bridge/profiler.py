"""``profiler.Profiler`` of Ascend's star import."""

from npu_device._src.tf1.system import Profiler as Profiler
