"""The data in `--data_dir`: the record files, the number of their images, and the official constants that follow.

A directory written by `make_digits_imagenet.py` contains a `dataset.json`; one without that file is taken for ImageNet,
and the official numbers apply. Reading and batching the records is left to the official input function.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tensorflow as tf
from official.legacy.image_classification.resnet import common, imagenet_preprocessing


def fit_official_constants(data_dir: str) -> None:
    """Set the official modules' image size, numbers of classes and images, and a log interval that fits them.

    They keep these as constants, read when the model, the input and the learning rate are created; there is no flag or
    argument for them.
    """
    note = Path(data_dir) / "dataset.json"
    if not note.exists():
        return
    description = json.loads(note.read_text())
    imagenet_preprocessing.DEFAULT_IMAGE_SIZE = description["image_size"]
    imagenet_preprocessing.NUM_CLASSES = description["num_classes"]
    imagenet_preprocessing.NUM_IMAGES = description["num_images"]
    # For evaluation, an image is scaled to this before its centre is cropped: the whole image here.
    imagenet_preprocessing._RESIZE_MIN = description["image_size"]
    # The official schedule takes 90 epochs. Here: one of warm-up, two more, then a tenth. The lower rate suits the few
    # steps of warm-up and the small batches that each rank's batch normalisation sees.
    common.BASE_LEARNING_RATE = 0.02
    common.LR_SCHEDULE = [(1.0, 1), (0.1, 3)]


def holds_digits(data_dir: str) -> bool:
    """Return whether `data_dir` was written by `make_digits_imagenet.py`."""
    return (Path(data_dir) / "dataset.json").exists()


def record_files(data_dir: str, is_training: bool, ranks: int) -> list[str]:
    """Return the record files of one split, sorted, as every rank must see them.

    Raises:
        FileNotFoundError: there are none.
        ValueError: there are fewer files than ranks, so that some rank would have nothing to read.
    """
    split = "train" if is_training else "validation"
    files = sorted(str(path) for path in Path(data_dir).glob(f"{split}-?????-of-?????"))
    if not files:
        raise FileNotFoundError(
            f"{data_dir} holds no {split}-*-of-* records. Make some with\n"
            f"  python examples/resnet_ctl/make_digits_imagenet.py --data_dir {data_dir}\n"
            "or do without: --use_synthetic_data"
        )
    if len(files) < ranks:
        raise ValueError(
            f"{data_dir} has {len(files)} {split} files for {ranks} ranks; each needs one at least"
        )
    return files


def parse_digit(record: tf.Tensor, is_training: bool, dtype: tf.DType) -> Any:
    """Parse a digit without random crops and mirror images: a mirrored or halved digit is another sign."""
    return imagenet_preprocessing.parse_record(record, False, dtype)
