"""``npu.global_options()``: Ascend's options, with their types, defaults and errors. Imports no TensorFlow."""

from npu_device._src.options.option_group import GlobalOptions, Option, OptionGroup, global_options

__all__ = ["GlobalOptions", "Option", "OptionGroup", "global_options"]
