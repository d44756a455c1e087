"""What ``import horovod`` finds under ``npurun --horovod``: the module that it stands for takes its place."""

from npu_device._src.horovod import modules

modules.take_over()
