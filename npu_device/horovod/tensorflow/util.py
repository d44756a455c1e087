"""``horovod.tensorflow.util``, as far as the tests of Horovod use it."""

from tensorflow import executing_eagerly as _executing_eagerly

__all__ = ["_executing_eagerly"]
