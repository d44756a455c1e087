"""Ascend's native library, ``from npu_bridge import tf_adapter``: it can be imported, and contains nothing here."""

__all__: list[str] = []
