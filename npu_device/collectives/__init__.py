"""Collective operations over groups of ranks: one operation, one file."""
