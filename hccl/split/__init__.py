"""Ascend's import path of the gradient split strategy."""
