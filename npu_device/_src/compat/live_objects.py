"""Objects of this process by their class."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator

_frozen_modules = gc.get_freeze_count()
"""How many objects were frozen before the script began: those of modules, which aren't listed."""


def freeze_modules() -> None:
    """Keep the objects of all modules that are imported now out of garbage collections: each one takes a tenth of the
    time then.
    """
    global _frozen_modules
    gc.collect()
    gc.freeze()
    _frozen_modules = gc.get_freeze_count()


def live_objects(classes: Collection) -> list:
    """Return the objects that exist of some classes; their subclasses don't count.

    Objects are compared by their types alone, because asking any object for an attribute may run code, such as the
    import of a module that loads late. The faster ``gc.get_referrers`` ends the process (SIGSEGV) if extension modules
    such as scikit-learn's are loaded.
    """
    # The collector doesn't list frozen objects. Frozen again, all that exists now would never be freed.
    if gc.get_freeze_count() > _frozen_modules:
        gc.unfreeze()
    return [instance for instance in gc.get_objects() if type(instance) in classes]


def with_subclasses(classes: Iterable) -> Iterator:
    for cls in classes:
        yield cls
        yield from with_subclasses(cls.__subclasses__())
