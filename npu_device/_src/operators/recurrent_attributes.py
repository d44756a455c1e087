"""The attributes of Ascend's recurrent operators that support a single value, and the error for any other."""

from __future__ import annotations

from typing import Any

# Value that works, and what to do when another one is wanted.
_FIXED: dict[str, tuple[Any, str]] = {
    "activation": ("tanh", "write the cell with the layers of tf.keras, which take any activation"),
    "cell_clip": (-1.0, "clip the output, or write the cell with the layers of tf.keras"),
    "cell_depth": (1, "stack several cells: the output of one is the input of the next"),
    "cell_type": ("LSTM", "DynamicGRUV2 is the GRU"),
    "direction": ("UNIDIRECTIONAL", "run a second cell over tf.reverse(x, [0]), and reverse its output"),
    "dropout_mask": (None, "apply npu_ops.dropout to the input"),
    "gate_order": ("zrh", "put the columns of weights and biases into the order update, reset, new"),
    "keep_prob": (1.0, "apply npu_ops.dropout to the input"),
    "num_proj": (0, "multiply the output by a projection matrix"),
    "reset_after": (True, "use tf.keras.layers.GRU(reset_after=False)"),
    "state_is_tuple": (True, "tf.split the state into c and h"),
    "time_major": (True, "tf.transpose(x, [1, 0, 2]) before, and the output after"),
    "use_peephole": (False, "leave the peepholes out"),
}


def check_attributes(operation: str, **attributes: Any) -> None:
    """Refuse values that aren't implemented.

    Raises:
        TypeError: the operators have no such attribute.
        NotImplementedError: names the attribute, its value, the one that works and the way out.
    """
    for attribute, value in attributes.items():
        if attribute not in _FIXED:
            raise TypeError(f"{operation} got an unexpected keyword argument {attribute!r}")
        works, instead = _FIXED[attribute]
        if value is not works and value != works:
            raise NotImplementedError(
                f"{operation} was given {attribute}={value!r}; only {attribute}={works!r} is implemented.\n"
                f"What to do: {instead}."
            )
