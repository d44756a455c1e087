"""TensorFlow 1 style: the calls that work in graphs that a session runs. Every module is imported by itself."""
