"""The names of Horovod, as a thin layer over this package's own calls."""
