"""One rank of ``npurun --replicate``: ``python -m`` this module, with ``SEED [-m] script argument …``."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from npu_device._src.replicate.after_import import AfterImport
from npu_device._src.replicate.wrapped_models import Models


def main(arguments: Sequence[str]) -> None:
    """Run a script or a module, as Python would, with its Keras models replicated."""
    seed, *words = arguments
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    AfterImport(Models(int(seed)).imported)
    run_main(sys.argv[0], is_module)


def run_main(script: str, is_module: bool) -> None:
    """Run the path of a script or the name of a module as the main program."""
    if is_module:
        # The working directory is on the path, as with ``python -m``.
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
