"""Synchronized batch normalization in a step of a replicated model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Callable

from npu_device._src import compat
from npu_device._src.training.distribute.normalization import Exchange, exchange_of_step, moments
from npu_device._src.training.fit.replaced import Replaced
from npu_device._src.world.current_step import CurrentStep
from npu_device._src.world.world import World


def synchronize_layers(
    layers: Sequence, step: CurrentStep, world: World, replaced: Replaced
) -> None:
    """Replace the part of synchronized layers that computes mean and variance, while one step of a model runs."""
    exchange = exchange_of_step(step, world.sum_over_ranks)
    for layer in layers:
        name = compat.moments_method(layer)
        if getattr(layer, "synchronized", False) and hasattr(layer, name):
            replaced.replace(layer, name, partial(_moments, exchange, step.sum_factor, layer))


def _moments(
    exchange: Exchange, sum_factor: Any, layer: Any, own: Callable, *args: Any, **kwargs: Any
) -> Any:
    return moments(exchange, sum_factor, layer, *args, **kwargs)
