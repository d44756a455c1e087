"""Reads a recorded trace into tables, charts, a page and advice. Imports no TensorFlow."""
