"""The example `examples/resnet_ctl`: three steps on 1 and 2 ranks, and what makes its dataset.

The collectives and the launcher have their own tests. Its processes are forked where TensorFlow is imported already.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import job
import pytest
from ranks import LEAN

pytest.importorskip("official", reason="needs the extra 'examples' (tf-models-official)")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("resnet")]  # which share the digits

EXAMPLE = Path(__file__).parents[1] / "examples" / "resnet_ctl"
MAKER = EXAMPLE / "make_digits_imagenet.py"
SCRIPT = EXAMPLE / "resnet_ctl.py"
IMAGE_SIZE = 32
LIMIT = 240.0
VALIDATION_IMAGES = 360
# Runs the script. The official modules import scikit-learn and others only if they find them, which takes a second.
RUN = f"""
import os, runpy, sys
sys.path[:0] = [os.path.dirname(sys.argv[1]), {LEAN!r}]
{{first}}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# Known random numbers. TensorFlow may be used for the seed once the device is open.
SEED = """
import npu_device as npu
npu.open()
import tf_keras
tf_keras.utils.set_random_seed(7)
"""


def run(directory: Path, *command: str | Path, size: int = 1) -> job.Ended:
    """Run ranks of a script with Keras 2, without the launcher; return the first one's end."""
    processes = job.start_command(directory, size, list(map(str, command)), TF_USE_LEGACY_KERAS="1")
    ended = job.finish(processes, LIMIT)
    print(*(rank.output[-6000:] for rank in ended), sep="\n")  # when the test fails
    assert len({rank.code for rank in ended}) == 1
    return ended[0]


def train(size: int, directory: Path, *options: str | Path, first: str = "") -> job.Ended:
    """Run ranks of the example, with what comes first."""
    (directory / "run.py").write_text(RUN.format(first=first))
    return run(directory, directory / "run.py", SCRIPT, *options, size=size)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("digits")
    done = run(directory, MAKER, "--data_dir", directory, "--image_size", str(IMAGE_SIZE))
    assert done.code == 0
    assert f"{directory}: written" in done.output
    return directory


def test_making_the_digits_again_changes_nothing(digits: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in digits.iterdir()}
    done = run(digits, MAKER, "--data_dir", digits, "--image_size", str(IMAGE_SIZE))
    assert done.code == 0
    assert "there already" in done.output
    assert {path.name: path.stat().st_mtime_ns for path in digits.iterdir()} == before


def test_maker_leaves_other_records_alone(tmp_path: Path) -> None:
    (tmp_path / "train-00000-of-01024").write_bytes(b"not ours")
    done = run(tmp_path, MAKER, "--data_dir", tmp_path)
    assert done.code == 1
    assert "holds 1 records of another dataset, train-00000-of-01024 for one; give an empty --data_dir" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["train-00000-of-01024"]


def check_report(output: str, ranks: int = 2) -> None:
    """Asserts what the run prints at its end; each validation image has to be evaluated once."""
    each = re.findall(r"rank (\d+): ([\d.]+) images/s, weights sha256 ([0-9a-f]{64})$", output, re.MULTILINE)
    assert [int(rank) for rank, _, _ in each] == list(range(ranks))
    assert len({digest for _, _, digest in each}) == 1
    total = re.search(rf"all {ranks} ranks: ([\d.]+) images/s, global batch {24 * ranks}$", output, re.MULTILINE)
    assert total
    assert float(total[1]) == pytest.approx(sum(float(speed) for _, speed, _ in each), abs=0.1 * ranks)
    loss = re.search(r"loss: ([\d.]+) in steps 1 to 3$", output, re.MULTILINE)
    assert loss
    # ln 10 for ten classes and about 5.4 of L2, of which a second rank must not add another.
    assert 7 < float(loss[1]) < 9
    evaluation = re.search(r"evaluation: accuracy ([\d.]+), loss [\d.]+, (\d+) images$", output, re.MULTILINE)
    assert evaluation
    assert 0 <= float(evaluation[1]) <= 1
    assert int(evaluation[2]) == VALIDATION_IMAGES
    assert f"weights: bit-equal on all {ranks} ranks, 267 variables and the optimizer's state" in output


def flags(directory: Path, model: Path) -> list[str | Path]:
    return ["--data_dir", directory, "--model_dir", model, "--batch_size=24", "--train_steps=3"]


def test_missing_records_are_named_with_the_remedy(tmp_path: Path) -> None:
    done = train(1, tmp_path, *flags(tmp_path / "nowhere", tmp_path))
    assert done.code != 0
    assert "nowhere holds no train-*-of-* records" in done.output
    assert "make_digits_imagenet.py --data_dir" in done.output


def on_the_same_images(ranks: int, digits: Path, directory: Path, *options: str) -> str:
    """The output of three steps with known random numbers on one training file per rank, all alike. The number of
    images keeps the learning rate the same for any number of ranks.
    """
    data = directory / "data"
    data.mkdir()
    for rank in range(ranks):
        shutil.copy(digits / "train-00000-of-00024", data / f"train-{rank:05d}-of-{ranks:05d}")
    for path in digits.glob("validation-*"):
        shutil.copy(path, data)
    images = {"train": 192 * ranks * ranks, "validation": VALIDATION_IMAGES}
    note = {"image_size": IMAGE_SIZE, "num_classes": 10, "num_images": images}
    (data / "dataset.json").write_text(json.dumps(note))
    batch = f"--batch_size={24 * ranks}"
    with pytest.MonkeyPatch.context() as patch:
        # Sums in the same order everywhere.
        patch.setenv("TF_NUM_INTRAOP_THREADS", "1")
        done = train(ranks, directory, *flags(data, directory), batch, *options, first=SEED)
    assert done.code == 0
    return done.output


def test_two_ranks_on_the_same_images_do_what_one_device_does_with_half_the_batch(digits: Path, tmp_path: Path) -> None:
    # Doubling and halving are exact, so that the weights are equal bit by bit.
    digests = []
    for ranks in (1, 2):
        directory = tmp_path / str(ranks)
        directory.mkdir()
        alone = ("--steps_per_loop=1", "--skip_eval")
        together = ("--steps_per_loop=3", "--enable_checkpoint_and_export")  # which traces the step once
        output = on_the_same_images(ranks, digits, directory, *(alone if ranks == 1 else together))
        if ranks == 1:
            assert re.search(r"loss: [\d.]+ in steps 1 to 1, [\d.]+ in steps 3 to 3$", output, re.MULTILINE)
            assert "weights: bit-equal on the only rank" in output
        else:
            check_report(output)
        digests += re.findall(r"weights sha256 ([0-9a-f]{64})$", output, re.MULTILINE)
    assert len(digests) == 3
    assert len(set(digests)) == 1, digests
    for rank in ("rank-0", "rank-1"):
        assert (tmp_path / "2" / rank / "ckpt-3.index").exists()
