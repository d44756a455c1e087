"""The common part of the backends that Python runs on numpy arrays."""
