"""The model garden's ResNet runnable with the calls that make it data-parallel.

Everything that isn't here is the official code: model, learning rate, input pipeline, loops. README.md shows the same
port as a diff to a copy of the official files.
"""

from __future__ import annotations

import time
from typing import Any, Callable

import tensorflow as tf
import tf_keras
from official.legacy.image_classification.resnet import resnet_runnable
from official.modeling import grad_utils
from over_ranks import add_up, gather
from records import holds_digits, parse_digit, record_files

import npu_device as npu


def sum_over_ranks(gradients_and_variables: Any) -> Any:
    """Return the gradients summed over all ranks, in the form in which `grad_utils` exchanges them with a callback."""
    gradients, variables = zip(*gradients_and_variables)
    return list(zip(npu.distribute.all_reduce(list(gradients), reduction="sum"), variables))


class PortedResnetRunnable(resnet_runnable.ResnetRunnable):
    """`ResnetRunnable` for one device or many ranks; the flag `batch_size` is the batch of all ranks together."""

    def __init__(self, flags_obj: Any, time_callback: Any, epoch_steps: int) -> None:
        device = npu.open()
        self.rank: int = device.worker_id
        self.ranks: int = device.workers_num
        self.losses: list[tuple[int, int, float]] = []  # first step, last step, mean
        self._seconds: list[tuple[int, float]] = []  # steps and seconds of each loop
        super().__init__(flags_obj, time_callback, epoch_steps)
        # The official model is declared for 224x224; it ends in a global pooling, so any size works.
        self.model.input_spec = tf_keras.layers.InputSpec(shape=(None, None, None, 3))
        # Addition 1: every rank starts from rank 0's random numbers.
        npu.distribute.broadcast(self.model.trainable_variables, root_rank=0)

    @property
    def input_fn(self) -> Callable[..., tf.data.Dataset]:
        """Make this rank's share of the batches. The base class sets the official function, and calls what it gets."""
        return self._input_fn

    @input_fn.setter
    def input_fn(self, official: Callable[..., tf.data.Dataset]) -> None:
        def input_fn(
            is_training: bool, data_dir: str, batch_size: int, **arguments: Any
        ) -> tf.data.Dataset:
            synthetic = self.flags_obj.use_synthetic_data
            names = [] if synthetic else record_files(data_dir, is_training, self.ranks)
            if holds_digits(data_dir):
                arguments["parse_record_fn"] = parse_digit
            # Addition 2: this rank's files, and its part of the batch.
            files = tf.data.Dataset.from_tensor_slices(names)
            files, batch_size = npu.distribute.shard_and_rebatch_dataset(files, batch_size)
            arguments["filenames"] = list(files.as_numpy_iterator())
            return official(
                is_training=is_training, data_dir=data_dir, batch_size=batch_size, **arguments
            )

        self._input_fn = input_fn

    def train_step(self, iterator: Any) -> None:
        """Make one step. It differs from the base class's in the callback, and in a rank's share of the L2 term."""
        images, labels = next(iterator)
        with tf.GradientTape() as tape:
            probabilities = self.model(images, training=True)
            losses = tf_keras.losses.sparse_categorical_crossentropy(labels, probabilities)
            # Added up over the ranks: the mean over the whole batch, and the L2 term once.
            loss = (
                tf.reduce_sum(losses) / self.flags_obj.batch_size
                + tf.add_n(self.model.losses) / self.ranks
            )
        # Addition 3: the gradients are added up over the ranks before the optimizer sees them.
        grad_utils.minimize_using_explicit_allreduce(
            tape,
            self.optimizer,
            loss,
            self.model.trainable_variables,
            pre_allreduce_callbacks=[sum_over_ranks],
        )
        # The metrics are averaged over the ranks, the loss is the sum of theirs.
        self.train_loss.update_state(loss * self.ranks)
        self.train_accuracy.update_state(labels, probabilities)

    def train_loop_begin(self) -> None:
        """Refuse to train when the ranks were restored from different steps: some would have more to do."""
        steps = gather([int(self.global_step)])[:, 0].tolist()
        if len(set(steps)) > 1:
            lines = "\n".join(f"  rank {rank}: step {step}" for rank, step in enumerate(steps))
            raise RuntimeError(
                f"The ranks start from different steps:\n{lines}\n"
                "Likely cause: --model_dir holds checkpoints of another run, or of fewer ranks.\n"
                "What to do: give an empty --model_dir, or --clean."
            )
        super().train_loop_begin()
        self._loop_start = (steps[0], time.perf_counter())

    def train_loop_end(self) -> Any:
        """End a loop the official way, with metrics of all ranks and the same moving statistics on each."""
        start_step, start_time = self._loop_start
        steps = int(self.global_step) - start_step
        self._seconds.append((steps, time.perf_counter() - start_time))
        # Batch norm's moving statistics come from each rank's own images: from here on all ranks have their mean.
        statistics = self.model.non_trainable_variables
        for variable, mean in zip(
            statistics, npu.distribute.all_reduce(statistics, reduction="mean")
        ):
            variable.assign(mean)
        add_up(self.train_loss, self.train_accuracy)
        self.losses.append((start_step + 1, start_step + steps, float(self.train_loss.result())))
        return super().train_loop_end()

    def evaluate(self, num_steps: tf.Tensor) -> Any:
        """Evaluate this rank's files to the end, however many they hold; endless synthetic data for `num_steps`."""
        return super().evaluate(num_steps if self.flags_obj.use_synthetic_data else tf.constant(-1))

    def eval_step(self, iterator: Any) -> None:
        """Make one evaluation step. Each image counts once in both metrics, in the last, smaller batch as well."""
        images, labels = next(iterator)
        probabilities = self.model(images, training=False)
        self.test_loss.update_state(
            tf_keras.losses.sparse_categorical_crossentropy(labels, probabilities)
        )
        self.test_accuracy.update_state(labels, probabilities)

    def eval_end(self) -> Any:
        """Return the official result, from the images of all ranks."""
        add_up(self.test_loss, self.test_accuracy)
        return super().eval_end()

    def images_per_second(self) -> float:
        """Return this rank's training images per second. The first loop, which traces, counts only if it's alone."""
        loops = self._seconds[1:] or self._seconds
        steps = sum(steps for steps, _ in loops)
        return steps * self.flags_obj.batch_size / self.ranks / sum(seconds for _, seconds in loops)
