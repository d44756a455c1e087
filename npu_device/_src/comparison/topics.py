"""The topics of calls that ``npurun verify`` records, since a line of the script may explain a difference."""

from __future__ import annotations

ADAPTED = "adapted"
ADD_LOSS = "add_loss"
ALL_REDUCE = "all_reduce"
AVERAGE_LOSS = "compute_average_loss"
BATCH_NORM = "batch_norm"
CLIP = "clip"
EPOCH_END = "epoch end"
EVALUATION = "evaluation"
NORMALIZES_ALONE = "normalizes alone"
QUIET = "quiet"
RANDOM = "random"
SEED = "seed"
SHUFFLE = "shuffle"
UNSEEDED = "unseeded"
