"""Benchmarks of the package against TensorFlow, torch and MPI in the same run: ``python -m benchmarks``."""
