"""The launcher's entry point: the console script ``npurun`` and ``python -m npu_device.launch``."""

from __future__ import annotations

import sys
from importlib import import_module

from npu_device.launch import arguments, checking, launcher, ssh_hosts

_COMMANDS = {
    "trace": "npu_device._src.report.__main__",
    "verify": "npu_device.launch.verify",
    "speed": "npu_device.launch.speed",
    "port": "npu_device._src.port.__main__",
    "docs": "npu_device.launch.docs",
}
"""The modules whose ``main`` runs a command."""


def main() -> None:
    words = sys.argv[1:]
    command = next(iter(words), "")
    if command in _COMMANDS:
        # Imported only when it is called, since most commands import much.
        sys.exit(import_module(_COMMANDS[command]).main(words[1:]))
    if command == "tune":
        tune_is_gone()
    if command == "check":
        words[0] = "--check"
    options = arguments.parse(words)
    if options.check and command != "check":
        print("npurun: --check is now npurun check, and will go in 0.3.0", file=sys.stderr)
    if options.hosts:
        sys.exit(ssh_hosts.run(options))
    if options.check:
        sys.exit(checking.run(options))
    sys.exit(launcher.run(options))


# Kept until 0.3.0; npu-tune runs this, too.
def tune_is_gone() -> None:
    """Exit with a message."""
    print(f"npurun tune and npu-tune are gone. {arguments.INSTEAD_OF_TUNING}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
