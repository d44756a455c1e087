"""Ascend's import path of the management of groups and ranks."""
