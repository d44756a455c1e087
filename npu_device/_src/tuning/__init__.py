"""Finds where to cut the gradients: a cost model of the collectives, the best split by it, and runs that check it."""
