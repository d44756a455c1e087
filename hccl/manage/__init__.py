"""Ascend's import path for managing groups and ranks."""
