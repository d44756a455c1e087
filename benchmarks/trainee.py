"""The models that are trained, each with a batch of random data. Plain tf-keras, the same for all rivals."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

import tensorflow as tf
import tf_keras

_IMAGES, _PIXELS, _CLASSES = 4, 96, 1000
_IMAGES_OF_A_GPU, _PIXELS_OF_A_GPU = 64, 224
_SEQUENCES, _TOKENS = 2, 32
_LAYERS, _WIDTH, _INNER, _HEADS, _VOCABULARY, _POSITIONS = 12, 768, 3072, 12, 30522, 512


class Trainee:
    """A model, its optimizer and one batch.

    Args:
        name: ``"resnet50"``, ``"resnet50_224"``, ``"bert"`` or ``"chain"``.
        rank: seed of the batch; the ranks train on different data.
    """

    def __init__(self, name: str, rank: int) -> None:
        tf_keras.utils.set_random_seed(1)
        self.model = _MODELS[name]()
        # Plain SGD: the update costs little, and there are no slots to fill the memory.
        self._optimizer = tf_keras.optimizers.SGD(1e-4, jit_compile=False)
        self._optimizer.build(self.model.trainable_variables)
        self.inputs, self.labels = _BATCHES[name](tf.random.Generator.from_seed(rank))

    def gradients(self, inputs: tf.Tensor, labels: tf.Tensor, share: float = 1.0) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return the batch's loss times ``share``, and its gradients.

        The embedding's gradient is made dense, as in pre-training, where the output layer uses the embedding too: all
        rivals move the same bytes.
        """
        with tf.GradientTape() as tape:
            losses = tf_keras.losses.sparse_categorical_crossentropy(labels, self.model(inputs, training=True))
            loss = tf.reduce_mean(losses) * share
        gradients = tape.gradient(loss, self.model.trainable_variables)
        return loss, [tf.convert_to_tensor(gradient) for gradient in gradients]

    def apply(self, gradients: list[tf.Tensor]) -> None:
        """Update the variables; under a strategy the optimizer sums the gradients over the ranks first."""
        self._optimizer.apply_gradients(zip(gradients, self.model.trainable_variables))


def _resnet50(pixels: int) -> Any:
    return tf_keras.applications.ResNet50(weights=None, input_shape=(pixels, pixels, 3), classes=_CLASSES)


def _bert() -> Any:
    """Return BERT-base's encoder with a pooler and a classifier of two classes; 109.5 million parameters."""
    layers = tf_keras.layers
    tokens = layers.Input([_TOKENS], dtype=tf.int32)
    positions = tf.ones_like(tokens) * tf.range(_TOKENS)
    words = layers.Embedding(_VOCABULARY, _WIDTH)(tokens)
    hidden = layers.LayerNormalization()(words + layers.Embedding(_POSITIONS, _WIDTH)(positions))
    for _ in range(_LAYERS):
        attended = layers.MultiHeadAttention(_HEADS, _WIDTH // _HEADS)(hidden, hidden)
        hidden = layers.LayerNormalization()(hidden + attended)
        inner = layers.Dense(_INNER, activation="gelu")(hidden)
        hidden = layers.LayerNormalization()(hidden + layers.Dense(_WIDTH)(inner))
    pooled = layers.Dense(_WIDTH, activation="tanh")(hidden[:, 0])
    return tf_keras.Model(tokens, layers.Dense(2, activation="softmax")(pooled))


def _chain() -> Any:
    """Return a model with as many gradients as ResNet-50, of one element each."""
    layers = tf_keras.layers
    hidden = inputs = layers.Input([1])
    for _ in range(80):
        hidden = layers.Dense(1, bias_initializer="ones")(hidden)
    return tf_keras.Model(inputs, layers.Dense(1, activation="sigmoid", use_bias=False)(hidden))


def _images(count: int, pixels: int, generator: tf.random.Generator) -> tuple[tf.Tensor, tf.Tensor]:
    images = generator.uniform([count, pixels, pixels, 3])
    return images, generator.uniform([count], maxval=_CLASSES, dtype=tf.int32)


def _sentences(generator: tf.random.Generator) -> tuple[tf.Tensor, tf.Tensor]:
    tokens = generator.uniform([_SEQUENCES, _TOKENS], maxval=_VOCABULARY, dtype=tf.int32)
    return tokens, generator.uniform([_SEQUENCES], maxval=2, dtype=tf.int32)


def _number(generator: tf.random.Generator) -> tuple[tf.Tensor, tf.Tensor]:
    return generator.uniform([1, 1]), tf.zeros([1], tf.int32)


_MODELS: dict[str, Callable[[], Any]] = {
    "resnet50": partial(_resnet50, _PIXELS),
    "resnet50_224": partial(_resnet50, _PIXELS_OF_A_GPU),
    "bert": _bert,
    "chain": _chain,
}
_BATCHES: dict[str, Callable[[tf.random.Generator], tuple[tf.Tensor, tf.Tensor]]] = {
    "resnet50": partial(_images, _IMAGES, _PIXELS),
    "resnet50_224": partial(_images, _IMAGES_OF_A_GPU, _PIXELS_OF_A_GPU),
    "bert": _sentences,
    "chain": _number,
}
