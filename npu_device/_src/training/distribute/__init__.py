"""The calls of own loops: reductions, broadcasts, datasets, groups, Ascend's collectives."""
