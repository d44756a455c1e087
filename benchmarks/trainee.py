"""The models that are trained, each with a batch of random data. Plain tf-keras, the same for all rivals; of either
Keras where updates are compared.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, Callable

import tensorflow as tf

from benchmarks.cases import SAMPLES

_PIXELS, _CLASSES = 96, 1000
_IMAGES_OF_A_GPU, _PIXELS_OF_A_GPU = 64, 224
_TOKENS = 32
_LAYERS, _WIDTH, _INNER, _HEADS, _VOCABULARY, _POSITIONS = 12, 768, 3072, 12, 30522, 512


class Trainee:
    """A model, its optimizer and one batch.

    Args:
        name: ``"resnet50"``, ``"resnet50_224"``, ``"bert"``, ``"mlp"`` or ``"chain"``.
        rank: seed of the batch; the ranks train on different data.
        shares: how many ranks' batches this one is as large as.
        keras: ``"keras"`` or ``"tf_keras"``.
    """

    def __init__(self, name: str, rank: int, shares: int = 1, keras: str = "tf_keras") -> None:
        self._keras: Any = importlib.import_module(keras)
        self._keras.utils.set_random_seed(1)
        self.model = _MODELS[name](self._keras)
        # Plain SGD: the update costs little, and there are no slots to fill the memory.
        self._optimizer = self.optimizer("sgd")
        self._optimizer.build(self.model.trainable_variables)
        self.inputs, self.labels = _BATCHES[name](tf.random.Generator.from_seed(rank), shares)

    def gradients(
        self, inputs: tf.Tensor, labels: tf.Tensor, share: float = 1.0
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return the batch's loss times ``share``, and its gradients.

        The embedding's gradient is made dense, as in pre-training, where the output layer uses the embedding too: all
        rivals move the same bytes.
        """
        with tf.GradientTape() as tape:
            losses = self._keras.losses.sparse_categorical_crossentropy(
                labels, self.model(inputs, training=True)
            )
            loss = tf.reduce_mean(losses) * share
        gradients = tape.gradient(loss, self.model.trainable_variables)
        return loss, [tf.convert_to_tensor(gradient) for gradient in gradients]

    def optimizer(self, name: str) -> Any:
        """Return a new optimizer: ``"sgd"``, ``"momentum"`` or ``"adam"``; the rates are too small to spoil a model."""
        optimizers = self._keras.optimizers
        made = {
            "sgd": partial(optimizers.SGD, 1e-4),
            "momentum": partial(optimizers.SGD, 1e-4, momentum=0.9),
            "adam": partial(optimizers.Adam, 1e-6),
        }[name]
        if self._keras.__name__ == "tf_keras":
            return made(jit_compile=False)
        return made()

    def apply(self, gradients: list[tf.Tensor]) -> None:
        """Update the variables; under a strategy the optimizer sums the gradients over the ranks first."""
        self._optimizer.apply_gradients(zip(gradients, self.model.trainable_variables))


def _resnet50(keras: Any, pixels: int) -> Any:
    return keras.applications.ResNet50(
        weights=None, input_shape=(pixels, pixels, 3), classes=_CLASSES
    )


def _bert(keras: Any) -> Any:
    """Return BERT-base's encoder with a pooler and a classifier of two classes; 109.5 million parameters."""
    layers = keras.layers
    tokens = layers.Input([_TOKENS], dtype="int32")
    numbers = layers.Lambda(
        lambda words: tf.ones_like(words) * tf.range(_TOKENS), output_shape=(_TOKENS,)
    )
    positions = numbers(tokens)
    words = layers.Embedding(_VOCABULARY, _WIDTH)(tokens)
    hidden = layers.LayerNormalization()(words + layers.Embedding(_POSITIONS, _WIDTH)(positions))
    for _ in range(_LAYERS):
        attended = layers.MultiHeadAttention(_HEADS, _WIDTH // _HEADS)(hidden, hidden)
        hidden = layers.LayerNormalization()(hidden + attended)
        inner = layers.Dense(_INNER, activation="gelu")(hidden)
        hidden = layers.LayerNormalization()(hidden + layers.Dense(_WIDTH)(inner))
    pooled = layers.Dense(_WIDTH, activation="tanh")(hidden[:, 0])
    return keras.Model(tokens, layers.Dense(2, activation="softmax")(pooled))


def _chain(keras: Any) -> Any:
    """Return a model with as many gradients as ResNet-50, of one element each."""
    layers = keras.layers
    hidden = inputs = layers.Input([1])
    for _ in range(80):
        hidden = layers.Dense(1, bias_initializer="ones")(hidden)
    return keras.Model(inputs, layers.Dense(1, activation="sigmoid", use_bias=False)(hidden))


def _mlp(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input([784]),
            *(layers.Dense(512, "relu") for _ in range(2)),
            layers.Dense(10, "softmax"),
        ]
    )


def _floats(
    shape: tuple[int, ...], classes: int, generator: tf.random.Generator, shares: int
) -> tuple[Any, Any]:
    count = shares * shape[0]
    return generator.uniform([count, *shape[1:]]), generator.uniform(
        [count], maxval=classes, dtype=tf.int32
    )


def _sentences(generator: tf.random.Generator, shares: int) -> tuple[tf.Tensor, tf.Tensor]:
    count = shares * SAMPLES["bert"]
    tokens = generator.uniform([count, _TOKENS], maxval=_VOCABULARY, dtype=tf.int32)
    return tokens, generator.uniform([count], maxval=2, dtype=tf.int32)


_MODELS: dict[str, Callable[[Any], Any]] = {
    "resnet50": partial(_resnet50, pixels=_PIXELS),
    "resnet50_224": partial(_resnet50, pixels=_PIXELS_OF_A_GPU),
    "bert": _bert,
    "mlp": _mlp,
    "chain": _chain,
}
_BATCHES: dict[str, Callable[[tf.random.Generator, int], tuple[Any, Any]]] = {
    "resnet50": partial(_floats, (SAMPLES["resnet50"], _PIXELS, _PIXELS, 3), _CLASSES),
    "resnet50_224": partial(
        _floats, (_IMAGES_OF_A_GPU, _PIXELS_OF_A_GPU, _PIXELS_OF_A_GPU, 3), _CLASSES
    ),
    "bert": _sentences,
    "mlp": partial(_floats, (SAMPLES["mlp"], 784), 10),
    "chain": partial(_floats, (1, 1), 1),
}
