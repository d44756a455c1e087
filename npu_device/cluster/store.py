"""Key-value store and barrier that all ranks share, over TensorFlow's coordination service.

The service lives in rank 0. Keys are written once; a value is text. What is stored, and why, belongs to the callers.
"""

from __future__ import annotations

import time

import tensorflow as tf

from npu_device import _compat
from npu_device.cluster.errors import ClusterError

_PREFIX = "npu_device/"


class Store:
    """The job's key-value store. One instance a process, made by the runtime once the service is up."""

    def set(self, key: str, value: str) -> None:
        """Write a new key, visible to every rank at once.

        Raises:
            KeyError: the key is there already (keys are written once, so that nobody overwrites what another has read).
            ClusterError: the service doesn't answer.
        """
        try:
            _compat.eager_context().set_config_key_value(_PREFIX + key, value)
        except tf.errors.AlreadyExistsError:
            raise KeyError(key) from None
        except tf.errors.OpError as error:
            raise ClusterError(
                f"could not write {key!r} to the job's key-value store in rank 0: {error.message}"
            ) from error

    def get(self, key: str, timeout: float) -> str:
        """Read a key, waiting for somebody to write it.

        Args:
            key: the key.
            timeout: seconds to wait; 0 waits until the service ends.

        Raises:
            TimeoutError: nobody wrote the key in time.
            ClusterError: the service doesn't answer.
        """
        try:
            return str(_compat.eager_context().get_config_key_value(_PREFIX + key, int(timeout * 1000)))
        except tf.errors.DeadlineExceededError:
            raise TimeoutError(f"no rank wrote {key!r} within {timeout:g} s") from None
        except tf.errors.OpError as error:
            raise ClusterError(
                f"could not read {key!r} from the job's key-value store in rank 0: {error.message}"
            ) from error

    def delete(self, key: str) -> None:
        """Remove a key; a key that isn't there is no error."""
        try:
            _compat.eager_context().delete_config_key_value(_PREFIX + key)
        except tf.errors.OpError as error:
            raise ClusterError(
                f"could not delete {key!r} in the job's key-value store in rank 0: {error.message}"
            ) from error

    def barrier(self, name: str, timeout: float) -> None:
        """Wait until every rank of the job has come to the barrier of this name (a name serves once).

        Raises:
            TimeoutError: not all ranks came within ``timeout`` seconds.
            ClusterError: a rank died, or the service doesn't answer.
        """
        began = time.monotonic()
        try:
            _compat.eager_context().wait_at_barrier(_PREFIX + name, int(timeout * 1000))
        except tf.errors.DeadlineExceededError as error:
            raise TimeoutError(f"barrier {name!r}: not all ranks came within {timeout:g} s. {error.message}") from None
        except tf.errors.OpError as error:
            waited = time.monotonic() - began
            raise ClusterError(f"barrier {name!r} failed after {waited:.1f} s: {error.message}") from error
