"""Objects of this process by their class."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator


def live_objects(classes: Collection) -> list:
    """Return the objects that exist of some classes; their subclasses don't count.

    Objects are compared by their types alone, because asking any object for an attribute may run code, such as the
    import of a module that loads late. The faster ``gc.get_referrers`` ends the process (SIGSEGV) if extension modules
    such as scikit-learn's are loaded.
    """
    # The collector doesn't list what it has been told to leave alone.
    is_frozen = bool(gc.get_freeze_count())
    if is_frozen:
        gc.unfreeze()
    try:
        return [instance for instance in gc.get_objects() if type(instance) in classes]
    finally:
        if is_frozen:
            gc.collect()
            gc.freeze()


def with_subclasses(classes: Iterable) -> Iterator:
    for cls in classes:
        yield cls
        yield from with_subclasses(cls.__subclasses__())
