"""Ascend's operators as TensorFlow operations, one file per family."""
