"""The launcher's entry point: the console script ``npurun`` and ``python -m npu_device.launch``."""

from __future__ import annotations

import sys

from npu_device.launch import arguments, checking, launcher, ssh_hosts


def main() -> None:
    words = sys.argv[1:]
    command = next(iter(words), "")
    options_of_command = words[1:]
    # Each command is imported only when it is called, since most import much.
    if command == "trace":
        from npu_device._src.report.__main__ import main as report

        report(options_of_command, "npurun trace")
        return
    if command == "tune":
        tune_is_gone()
    if command == "verify":
        from npu_device.launch import verify

        sys.exit(verify.main(options_of_command))
    if command == "speed":
        from npu_device.launch import speed

        sys.exit(speed.main(options_of_command))
    if command == "port":
        from npu_device._src.port.__main__ import main as port

        sys.exit(port(options_of_command, "npurun port"))
    if command == "docs":
        from npu_device.launch import docs

        sys.exit(docs.main(options_of_command))
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
