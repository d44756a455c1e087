"""TensorFlow 1 style: what works in graphs that a session runs. Every module is imported by itself."""
