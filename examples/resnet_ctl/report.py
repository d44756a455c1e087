"""The final report: speed, loss, accuracy, and whether all ranks hold the same weights, bit by bit."""

from __future__ import annotations

import hashlib

from over_ranks import gather
from ported_runnable import PortedResnetRunnable

HEX_DIGITS_OF_A_WORD = 8


def digest(runnable: PortedResnetRunnable) -> str:
    """Return the SHA-256 in hex of all bytes of this rank's weights, moving statistics and optimizer state."""
    total = hashlib.sha256()
    for variable in [*runnable.model.variables, *runnable.optimizer.variables()]:
        total.update(variable.numpy().tobytes())
    return total.hexdigest()


def digests_of_all_ranks(runnable: PortedResnetRunnable) -> list[str]:
    """Return each rank's `digest`, in rank order, on each of them."""
    own = digest(runnable)
    words = [
        int(own[at : at + HEX_DIGITS_OF_A_WORD], 16)
        for at in range(0, len(own), HEX_DIGITS_OF_A_WORD)
    ]
    return ["".join(f"{word:08x}" for word in row) for row in gather(words)]


def report(runnable: PortedResnetRunnable) -> None:
    """Print the report on rank 0; every rank has to call it.

    Raises:
        RuntimeError: the weights differ between ranks (on every rank); or nothing was trained.
    """
    if not runnable.losses:
        raise RuntimeError(
            f"{runnable.flags_obj.model_dir} holds a checkpoint of the last step already, so that nothing was trained. "
            "Ask for more with --train_epochs, or start anew with --clean."
        )
    speeds = gather([runnable.images_per_second()])[:, 0]
    digests = digests_of_all_ranks(runnable)
    ranks = f"all {runnable.ranks} ranks" if runnable.ranks > 1 else "the only rank"
    lines = [
        f"rank {rank}: {speed:.1f} images/s, weights sha256 {found}"
        for rank, (speed, found) in enumerate(zip(speeds, digests))
    ]
    if len(set(digests)) > 1:
        raise RuntimeError(
            "\n".join(["The ranks hold different weights:", *lines])
            + "\nLikely cause: a variable that isn't broadcast at the start, or a gradient that isn't reduced.\n"
            "What to do: compare the port with examples/resnet_ctl/README.md."
        )
    lines.append(
        f"{ranks}: {sum(speeds):.1f} images/s, global batch {runnable.flags_obj.batch_size}"
    )
    loops = (runnable.losses[0], runnable.losses[-1])
    steps = [f"{loss:.3f} in steps {first} to {last}" for first, last, loss in loops]
    lines.append("loss: " + ", ".join(dict.fromkeys(steps)))
    if not runnable.flags_obj.skip_eval:
        accuracy, loss = float(runnable.test_accuracy.result()), float(runnable.test_loss.result())
        images = int(runnable.test_accuracy.count)
        lines.append(f"evaluation: accuracy {accuracy:.3f}, loss {loss:.3f}, {images} images")
    lines.append(
        f"weights: bit-equal on {ranks}, {len(runnable.model.variables)} variables and the optimizer's state"
    )
    if runnable.rank == 0:
        print("\n".join(["", *lines]), flush=True)
