"""Makes a small dataset in ImageNet's TFRecord format out of real scans of handwritten digits.

scikit-learn ships 1797 scans of 8x8 pixels. Each is enlarged, stored as an RGB JPEG and written with the feature
names that the model garden's ImageNet reader expects. `dataset.json` next to the records tells `records.py` their
number and size; reading them and training on them is left to others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

# Both are divisible by 1, 2, 3, 4, 6 and 12, so that with as many ranks each gets the same number of files.
FILES = {"train": 24, "validation": 12}
VALIDATION_EVERY = 5
SMALLEST_SIZE = 8
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def file_names(split: str) -> list[str]:
    """Return the names of one split's record files, as ImageNet's are: `train-00000-of-00024`."""
    return [f"{split}-{index:05d}-of-{FILES[split]:05d}" for index in range(FILES[split])]


def split_of(index: int) -> str:
    """Return the split of the scan with this number: every fifth is kept for validation."""
    return "validation" if index % VALIDATION_EVERY == 0 else "train"


def describe(size: int, digits: np.ndarray) -> dict[str, object]:
    """Return the content of `dataset.json`: source, side length in pixels, numbers of classes and images by split."""
    images = {
        split: sum(split_of(index) == split for index in range(len(digits))) for split in FILES
    }
    return {
        "source": "sklearn.datasets.load_digits",
        "image_size": size,
        "num_classes": 10,
        "num_images": images,
    }


def example(scan: np.ndarray, digit: int, index: int, size: int) -> bytes:
    """Return one serialised `tf.train.Example` with the official features.

    Args:
        scan: shape (8, 8), 0 to 16.
        digit: 0 to 9; the label is one more, since ImageNet's begin at 1.
        index: number of the scan, for the file name.
        size: side length of the JPEG in pixels.
    """
    import tensorflow as tf

    grey = tf.image.resize(scan[..., np.newaxis] * (255 / 16), (size, size), method="bicubic")
    pixels = tf.image.grayscale_to_rgb(tf.cast(tf.clip_by_value(tf.round(grey), 0, 255), tf.uint8))
    jpeg = tf.io.encode_jpeg(pixels, format="rgb", quality=95).numpy()

    def integers(value: int) -> tf.train.Feature:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))

    def text(value: bytes) -> tf.train.Feature:
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))

    def floats(value: float) -> tf.train.Feature:
        return tf.train.Feature(float_list=tf.train.FloatList(value=[value]))

    features = {
        "image/height": integers(size),
        "image/width": integers(size),
        "image/colorspace": text(b"RGB"),
        "image/channels": integers(3),
        "image/class/label": integers(digit + 1),
        "image/class/synset": text(f"digit{digit}".encode()),
        "image/class/text": text(NAMES[digit].encode()),
        "image/object/bbox/xmin": floats(0.0),
        "image/object/bbox/xmax": floats(1.0),
        "image/object/bbox/ymin": floats(0.0),
        "image/object/bbox/ymax": floats(1.0),
        "image/object/bbox/label": integers(digit + 1),
        "image/format": text(b"JPEG"),
        "image/filename": text(f"digits_{index:05d}.JPEG".encode()),
        "image/encoded": text(jpeg),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write_split(directory: Path, split: str, images: int, examples: Iterable[bytes]) -> None:
    """Write one split's files; example i goes to file i modulo the number of files. `images`: how many will come."""
    import tensorflow as tf

    names = file_names(split)
    writers = [tf.io.TFRecordWriter(str(directory / name)) for name in names]
    for position, serialised in enumerate(examples):
        writers[position % len(writers)].write(serialised)
        if (position + 1) % 400 == 0:
            print(f"{split}: {position + 1} of {images} images", flush=True)
    for writer in writers:
        writer.close()
    print(f"{split}: {images} images in {len(names)} files", flush=True)


def make(directory: Path, size: int) -> bool:
    """Write the dataset into `directory` unless it is there already.

    Args:
        directory: the target; created if missing.
        size: side length of the stored images in pixels, at least 8.

    Returns:
        True when it was written, False when it already existed.

    Raises:
        ValueError: `size` is below 8, or `directory` holds records of another dataset.
        OSError: the directory cannot be written.
    """
    if size < SMALLEST_SIZE:
        raise ValueError(
            f"--image_size is {size}; the scans have 8 pixels a side, so ask for at least {SMALLEST_SIZE}"
        )
    from sklearn.datasets import load_digits

    scans, digits = load_digits(return_X_y=True)
    scans = scans.reshape(-1, 8, 8)
    description = describe(size, digits)
    note = directory / "dataset.json"
    ours = {name for split in FILES for name in file_names(split)}
    present = {path.name for split in FILES for path in directory.glob(f"{split}-*")}
    if present - ours:
        raise ValueError(
            f"{directory} holds {len(present - ours)} records of another dataset, {min(present - ours)} for one; "
            "give an empty --data_dir"
        )
    if present == ours and note.exists() and json.loads(note.read_text()) == description:
        return False

    directory.mkdir(parents=True, exist_ok=True)
    # The note is removed first and written last: records without it are unfinished, and are written again.
    note.unlink(missing_ok=True)
    for split in FILES:
        indices = [index for index in range(len(digits)) if split_of(index) == split]
        write_split(
            directory,
            split,
            len(indices),
            (example(scans[i], int(digits[i]), i, size) for i in indices),
        )
    note.write_text(json.dumps(description, indent=2) + "\n")
    return True


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        description="Write scikit-learn's handwritten digits as ImageNet TFRecords."
    )
    parser.add_argument(
        "--data_dir",
        type=Path,
        default=Path("build/digits"),
        help="where to (default: %(default)s)",
    )
    parser.add_argument(
        "--image_size", type=int, default=32, help="side length in pixels (default: %(default)s)"
    )
    arguments = parser.parse_args()
    try:
        written = make(arguments.data_dir, arguments.image_size)
    except ModuleNotFoundError as error:
        print(
            f'{error}. Install what the example needs: pip install ".[examples]"', file=sys.stderr
        )
        return 1
    except (OSError, ValueError) as error:
        print(f"No dataset was made: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.data_dir}: {'written' if written else 'there already, nothing to do'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
