"""``npurun port``: rewrites a script of ordinary TensorFlow so that it runs on many ranks."""
