"""Ascend's import paths of the TensorFlow 1 adapter."""
