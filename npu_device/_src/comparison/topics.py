"""The topics of calls that ``npurun verify`` records, since a line of the script may explain a difference."""

from __future__ import annotations

# Causes name a call on one of these.
ADAPTED = "adapted"
ADD_LOSS = "add_loss"
ALL_REDUCE = "all_reduce"
AVERAGE_LOSS = "compute_average_loss"
CLIP = "clip"
NORMALIZES_ALONE = "normalizes alone"
RANDOM = "random"
SHUFFLE = "shuffle"
UNSEEDED = "unseeded"

# Only notes on the verdict, and what it lists as not compared, speak of these.
BATCH_NORM = "batch_norm"
EPOCH_END = "epoch end"
EVALUATION = "evaluation"
QUIET = "quiet"
SEED = "seed"
