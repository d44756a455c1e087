"""Divided updates: each rank holds the optimizer's state of some variables, and updates those for all ranks."""
