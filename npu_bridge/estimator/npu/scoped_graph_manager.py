"""Ascend's module of this name: it can be imported, and contains nothing here."""

__all__: list[str] = []
