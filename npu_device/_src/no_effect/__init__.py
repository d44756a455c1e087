"""Calls that tell an NPU something: their arguments are checked, and they change nothing on CPU and GPU."""
