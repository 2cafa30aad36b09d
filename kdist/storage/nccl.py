"""Sums over GPUs by NCCL, where each summand is on a card of its own.

Of TensorFlow's operations `NcclReduce` is used: its name in the graph is what tells its members
apart. `NcclAllReduce` goes by an attribute, so that a function called twice in a step would mix
two sums, and waits for ever if a member's result is not used.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from kdist._compat import keras_trainer
from kdist.sharding.device import Device

import tensorflow as tf

SWITCH = "KDIST_NCCL"
"""Variable of the environment; 0 leaves NCCL out."""
DTYPES = frozenset({tf.float16, tf.float32, tf.float64})
"""Floats that NCCL adds up. Integers of a GPU are in host memory, in TensorFlow."""


def applies(devices: Sequence[str]) -> bool:
    """Whether devices are cards of this process, several, and NCCL is there and allowed."""
    found = [Device.parse(one) for one in devices if one]
    if len(found) < max(2, len(devices)) or any(one.kind != "GPU" for one in found):
        return False
    cards = _cards()
    mine = [one.index for one in found if one.process == ("localhost", 0)]
    if len(mine) < len(found) or max(mine) >= len(cards):
        return False
    distinct = len({cards[index] for index in mine}) == len(mine)
    return distinct and _is_allowed() and bool(tf.sysconfig.get_build_info().get("is_cuda_build"))


def adds_up(devices: Sequence[str], at: str, dtype: Any) -> bool:
    """Whether NCCL makes a sum, where it is traced.

    Args:
        devices: Where each summand is.
        at: Where the sum is wanted.
        dtype: Of the summands.
    """
    if tf.as_dtype(dtype) not in DTYPES or not applies(devices):
        return False
    return Device.parse(at) in map(Device.parse, devices)


def summed(parts: Sequence[Any], devices: Sequence[str], at: str, name: str | None = None) -> Any:
    """The sum of tensors, on one of their devices, in the graph that is being traced.

    Args:
        parts: The tensors.
        devices: Where each of them is.
        at: The device that gets the sum.
        name: Of the operation.
    """
    terms = []
    for part, device in zip(parts, devices, strict=True):
        # TensorFlow reads the members off their makers, and the first result of each.
        with tf.device(device):
            terms.append(tf.identity(part))
    with tf.device(at):
        total = tf.raw_ops.NcclReduce(input=terms, reduction="sum", name=name)
    # It takes it for an effect: one sum would wait for the other.
    keras_trainer.run_independently(total.op)
    return total


def note(devices: Sequence[str]) -> str | None:
    """What a plan says of sums over GPUs; None where there are not several."""
    kinds = {Device.parse(one).kind for one in devices}
    if len(devices) < 2 or kinds != {"GPU"}:
        return None
    if applies(devices):
        return f"sums over GPUs are NCCL's; {SWITCH}=0 has TensorFlow copy and add"
    reason = f"{SWITCH}=0" if not _is_allowed() else "NCCL wants a card of this process for each"
    return f"sums over GPUs are copies and additions of TensorFlow ({reason})"


def _is_allowed() -> bool:
    return os.environ.get(SWITCH, "1") != "0"


def _cards() -> list[int]:
    """Of each logical GPU of this process, the number of its card."""
    cut = map(tf.config.get_logical_device_configuration, tf.config.get_visible_devices("GPU"))
    return [card for card, parts in enumerate(cut) for _ in range(len(parts or ()) or 1)]
