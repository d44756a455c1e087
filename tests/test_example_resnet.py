"""The example `examples/resnet_ctl`: three steps on 1 and 2 ranks, and what makes its dataset."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import job
import pytest
from ranks import LEAN

pytest.importorskip("official", reason="needs the extra 'examples' (tf-models-official)")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("resnet")]  # which share the digits

EXAMPLE = Path(__file__).parents[1] / "examples" / "resnet_ctl"
IMAGE_SIZE = 32
VALIDATION_IMAGES = 360
# Runs the script. The official modules import scikit-learn and others only if they find them, which takes a second. The
# model keeps 5 of its 17 blocks; `make example` trains all of it.
RUN = f"""
import os, runpy, sys
sys.path[:0] = [os.path.dirname(sys.argv[1]), {LEAN!r}]
from official.legacy.image_classification.resnet import resnet_model
resnet_model.identity_block = lambda tensor, *_, **__: tensor
{{first}}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SEED = """
import npu_device, tf_keras
npu_device.open()
tf_keras.utils.set_random_seed(7)
"""


def train(size: int, directory: Path, *options: str | Path, first: str = "") -> job.Ended:
    """Run ranks of the example with Keras 2, with what comes first; return the first one's end."""
    (directory / "run.py").write_text(RUN.format(first=first))
    command = [directory / "run.py", EXAMPLE / "resnet_ctl.py", *options]
    processes = job.start_command(directory, size, list(map(str, command)), TF_USE_LEGACY_KERAS="1")
    ended = job.finish(processes, 240)
    print(*(rank.output[-6000:] for rank in ended), sep="\n")  # when the test fails
    assert len({rank.code for rank in ended}) == 1
    return ended[0]


@pytest.fixture(scope="module")
def make() -> Any:
    return runpy.run_path(str(EXAMPLE / "make_digits_imagenet.py"))["make"]


@pytest.fixture(scope="module")
def digits(make: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("digits")
    assert make(directory, IMAGE_SIZE)
    return directory


def test_making_the_digits_again_changes_nothing(make: Any, digits: Path, tmp_path: Path) -> None:
    """Nor do they take the place of other records."""
    before = {path.name: path.stat().st_mtime_ns for path in digits.iterdir()}
    assert not make(digits, IMAGE_SIZE)
    assert {path.name: path.stat().st_mtime_ns for path in digits.iterdir()} == before
    (tmp_path / "train-00000-of-01024").write_bytes(b"not ours")
    with pytest.raises(
        ValueError,
        match=r"1 records of another dataset, train-00000-of-01024 for one; give an empty",
    ):
        make(tmp_path, IMAGE_SIZE)
    assert [path.name for path in tmp_path.iterdir()] == ["train-00000-of-01024"]


def test_missing_records_are_named_with_the_remedy(tmp_path: Path) -> None:
    done = train(1, tmp_path, "--data_dir", tmp_path / "nowhere")
    assert done.code == 1
    assert "nowhere holds no train-*-of-* records" in done.output
    assert "make_digits_imagenet.py --data_dir" in done.output


def on_the_same_images(ranks: int, digits: Path, directory: Path, *options: str) -> str:
    """Return the output of three steps with known random numbers on one training file per rank, all alike."""
    data = directory / "data"
    data.mkdir(parents=True)
    for rank in range(ranks):
        shutil.copy(digits / "train-00000-of-00024", data / f"train-{rank:05d}-of-{ranks:05d}")
    for path in digits.glob("validation-*"):
        shutil.copy(path, data)
    images = {
        "train": 192 * ranks * ranks,
        "validation": VALIDATION_IMAGES,
    }  # the learning rate doesn't change
    (data / "dataset.json").write_text(
        json.dumps({"image_size": IMAGE_SIZE, "num_classes": 10, "num_images": images})
    )
    flags = [
        "--data_dir",
        data,
        "--model_dir",
        directory,
        "--train_steps=3",
        f"--batch_size={24 * ranks}",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TF_NUM_INTRAOP_THREADS", "1")  # sums in the same order everywhere
        done = train(ranks, directory, *flags, *options, first=SEED)
    assert done.code == 0
    return done.output


def test_two_ranks_on_the_same_images_do_what_one_device_does_with_half_the_batch(
    digits: Path, tmp_path: Path
) -> None:
    # Doubling and halving are exact, so that the weights are equal bit by bit.
    alone = on_the_same_images(1, digits, tmp_path / "1", "--steps_per_loop=1", "--skip_eval")
    assert re.search(r"loss: [\d.]+ in steps 1 to 1, [\d.]+ in steps 3 to 3\n", alone)
    assert "weights: bit-equal on the only rank" in alone
    options = ("--steps_per_loop=3", "--enable_checkpoint_and_export")  # which traces the step once
    both = on_the_same_images(2, digits, tmp_path / "2", *options)
    each = re.findall(
        r"rank (\d): ([\d.]+) images/s, weights sha256 ([0-9a-f]{64})\n", alone + both
    )
    assert [rank for rank, _, _ in each] == ["0", "0", "1"]
    assert len({digest for _, _, digest in each}) == 1, each
    [total] = re.findall(r"all 2 ranks: ([\d.]+) images/s, global batch 48\n", both)
    assert float(total) == pytest.approx(sum(float(speed) for _, speed, _ in each[1:]), abs=0.2)
    # ln 10 for ten classes and about 2 of L2, of which a second rank must not add another.
    [loss] = re.findall(r"loss: ([\d.]+) in steps 1 to 3\n", both)
    assert 4 < float(loss) < 5
    [(accuracy, images)] = re.findall(
        r"evaluation: accuracy ([\d.]+), loss [\d.]+, (\d+) images\n", both
    )
    assert 0 <= float(accuracy) <= 1
    assert int(images) == VALIDATION_IMAGES, "each image once"
    assert "weights: bit-equal on all 2 ranks, 87 variables and the optimizer's state" in both
    for rank in ("rank-0", "rank-1"):
        assert (tmp_path / "2" / rank / "ckpt-3.index").exists()
