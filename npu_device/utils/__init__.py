"""Ascend's ``npu_device.utils``: the scopes."""

from npu_device.utils import scope as scope
