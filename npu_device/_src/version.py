"""The version of the package, and nothing else: packaging reads it without importing the package."""

__version__ = "0.2.0"
