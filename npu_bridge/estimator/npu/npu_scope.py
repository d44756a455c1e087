"""Ascend's scopes for operations of a graph."""

from npu_device.utils.scope import *  # noqa: F403
