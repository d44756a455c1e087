"""The example `examples/resnet_ctl`: its dataset as the official parser reads it, and three steps on 1 and 2 ranks.

The collectives and the launcher have their own tests. Its processes are forked where TensorFlow is imported already.
"""

from __future__ import annotations

import json
import re
import shutil
import time
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
# Reads all validation records and one file of the training records with the official parser, in Keras 2.
PARSE = """
import sys
sys.path[:0] = sys.argv[2:]
import tensorflow as tf
from official.legacy.image_classification.resnet import imagenet_preprocessing
import records
records.fit_official_constants(sys.argv[1])
labels = {}
for is_training in (True, False):
    files = records.record_files(sys.argv[1], is_training, ranks=1)
    parsed = tf.data.TFRecordDataset(files[: 1 if is_training else None]).map(
        lambda record: imagenet_preprocessing.parse_record(record, is_training, tf.float32))
    assert parsed.element_spec[0].shape == (32, 32, 3), parsed.element_spec
    labels[is_training] = [int(label[0]) for _, label in parsed]
print("labels", len(labels[True]), len(labels[False]), sorted(set(labels[False])), imagenet_preprocessing.NUM_IMAGES)
"""
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


def run(directory: Path, *command: str | Path) -> job.Ended:
    """Runs a script of one process."""
    (ended,) = _run_ranks(1, directory, *command)
    return ended


def train(size: int, directory: Path, *options: str | Path, first: str = "") -> list[job.Ended]:
    """Runs ranks of the example, with what comes first."""
    (directory / "run.py").write_text(RUN.format(first=first))
    return _run_ranks(size, directory, directory / "run.py", SCRIPT, *options)


def _run_ranks(size: int, directory: Path, *command: str | Path) -> list[job.Ended]:
    """Runs ranks of a script with Keras 2, without the launcher; their output is shown when the test fails."""
    started = time.monotonic()
    processes = job.start_command(directory, size, list(map(str, command)), TF_USE_LEGACY_KERAS="1")
    ended = job.finish(processes, LIMIT)
    print(*(rank.output[-6000:] for rank in ended), f"{time.monotonic() - started:.1f} s", sep="\n")
    return ended


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("digits")
    done = run(directory, MAKER, "--data_dir", directory, "--image_size", str(IMAGE_SIZE))
    assert done.code == 0
    assert f"{directory}: written" in done.output
    return directory


def test_official_parser_reads_the_digits(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "parse.py").write_text(PARSE)
    done = run(tmp_path, tmp_path / "parse.py", digits, EXAMPLE, LEAN)
    assert done.code == 0
    assert "labels 60 360 [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] {'train': 1437, 'validation': 360}" in done.output


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


def check_report(output: str, images: int, ranks: int = 2) -> None:
    """Asserts what the run prints at its end; `images` is how many have to be evaluated, each once."""
    each = re.findall(r"rank (\d+): ([\d.]+) images/s, weights sha256 ([0-9a-f]{64})$", output, re.MULTILINE)
    assert [int(rank) for rank, _, _ in each] == list(range(ranks))
    assert len({digest for _, _, digest in each}) == 1
    total = re.search(rf"all {ranks} ranks: ([\d.]+) images/s, global batch {24 * ranks}$", output, re.MULTILINE)
    assert total
    assert float(total[1]) == pytest.approx(sum(float(speed) for _, speed, _ in each), abs=0.1 * ranks)
    loss = re.search(r"loss: ([\d.]+) in steps 1 to 1, ([\d.]+) in steps 3 to 3$", output, re.MULTILINE)
    assert loss
    # ln 10 for ten classes and about 5.4 of L2, of which a second rank must not add another.
    assert 7 < float(loss[1]) < 9
    assert 6 < float(loss[2]) < 12
    evaluation = re.search(r"evaluation: accuracy ([\d.]+), loss [\d.]+, (\d+) images$", output, re.MULTILINE)
    assert evaluation
    assert 0 <= float(evaluation[1]) <= 1
    assert int(evaluation[2]) == images
    assert f"weights: bit-equal on all {ranks} ranks, 267 variables and the optimizer's state" in output


def flags(directory: Path, model: Path) -> list[str | Path]:
    small = ["--batch_size=24", "--train_steps=3", "--steps_per_loop=1"]
    return ["--data_dir", directory, "--model_dir", model, *small]


@pytest.mark.full
def test_synthetic_data(digits: Path, tmp_path: Path) -> None:
    options = (*flags(digits, tmp_path), "--train_steps=1", "--use_synthetic_data", "--skip_eval")
    (done,) = train(1, tmp_path, *options)
    assert done.code == 0
    assert "loss: " in done.output
    assert "weights: bit-equal on the only rank" in done.output
    assert "evaluation" not in done.output


def test_missing_records_are_named_with_the_remedy(tmp_path: Path) -> None:
    (done,) = train(1, tmp_path, *flags(tmp_path / "nowhere", tmp_path))
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
        ended = train(ranks, directory, *flags(data, directory), batch, *options, first=SEED)
    assert all(rank.code == 0 for rank in ended)
    return ended[0].output


def test_two_ranks_on_the_same_images_do_what_one_device_does_with_half_the_batch(digits: Path, tmp_path: Path) -> None:
    # Doubling and halving are exact, so that the weights are equal bit by bit.
    digests = []
    for ranks in (1, 2):
        directory = tmp_path / str(ranks)
        directory.mkdir()
        more = "--skip_eval" if ranks == 1 else "--enable_checkpoint_and_export"
        output = on_the_same_images(ranks, digits, directory, more)
        if ranks == 2:
            check_report(output, images=VALIDATION_IMAGES)
        digests += re.findall(r"weights sha256 ([0-9a-f]{64})$", output, re.MULTILINE)
    assert len(digests) == 3
    assert len(set(digests)) == 1, digests
    for rank in ("rank-0", "rank-1"):
        assert (tmp_path / "2" / rank / "ckpt-3.index").exists()
