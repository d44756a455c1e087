"""The common part of the backends that move bytes from one rank to another: their operations, as programs."""
