"""How fast the package is, against TensorFlow's own strategy in the same run: ``python -m benchmarks``."""
