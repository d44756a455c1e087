"""Run a script with these modules as ``horovod``: ``python -m npu_device.horovod train.py``."""

from npu_device._src.horovod.modules import main

if __name__ == "__main__":
    main()
