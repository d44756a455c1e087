"""Ascend's module of this name: it can be imported, and has nothing to offer here."""

__all__: list[str] = []
