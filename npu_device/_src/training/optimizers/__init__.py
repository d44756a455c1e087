"""Optimizers that reduce gradients before they apply them."""
