"""The names of Horovod, as a thin layer over the calls of this package."""
