"""Ascend's native library, ``from npu_bridge import tf_adapter``: it can be imported, and has nothing to offer here."""

__all__: list[str] = []
