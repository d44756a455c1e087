"""Backends that move the tensors of a collective, one per folder; ``choice`` picks the one for a group."""
