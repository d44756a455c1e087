"""How fast the package is, against TensorFlow, torch and MPI in the same run: ``python -m benchmarks``."""
