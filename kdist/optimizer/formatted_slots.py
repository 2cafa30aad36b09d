"""Optimizer slots kept as 16-bit codes, and the views that read them.

A slot of a local optimizer stays the Keras variable that the optimizer holds; its bytes become
codes of `state_formats`. Reading it decodes, writing it encodes, so a step computes with exactly
what is stored. The user's optimizer, whose variables are views of the local ones, still shows
whole float tensors, and saves and loads them.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

from kdist._compat import keras_optimizers
from kdist.config.state_format import StateFormatConfig, slot_formats, slot_variables
from kdist.optimizer.local import LocalOptimizer
from kdist.storage.state_formats import Format, Rounding
from kdist.storage.variables import ATTRIBUTE, become_view

import keras
import tensorflow as tf

COMPILED_FROM = 1 << 16
"""Elements from which on a slot is encoded and decoded by XLA, which makes one loop of the many
operations: 12 instead of 330 ms, and 3 instead of 114, for 5 million elements on 2 cores. A shape
costs about 0.1 s to compile, so small slots do without."""


@functools.cache
def _encoder(form: Format, rounding: Rounding, compiled: bool) -> Any:
    def encode(values: tf.Tensor, seed: Any) -> tf.Tensor:
        return form.encode(values, rounding, seed)

    return tf.function(encode, jit_compile=True) if compiled else encode


@functools.cache
def _decoder(form: Format, dtype: tf.DType, compiled: bool) -> Any:
    def decode(codes: tf.Tensor) -> tf.Tensor:
        return form.decode(codes, dtype)

    return tf.function(decode, jit_compile=True) if compiled else decode


class CodedSlot:
    """Backing of a slot variable: 16-bit codes on the device of its optimizer.

    Attributes:
        codes: tf.uint16 variable of the slot's shape.
        format: What the codes mean.
    """

    def __init__(
        self,
        slot: keras.Variable,
        form: Format,
        rounding: Rounding,
        seed: int,
        iterations: keras.Variable,
    ) -> None:
        self.format = form
        self.dtype = tf.as_dtype(slot.dtype)
        self.rounding = rounding
        self.seed = seed
        self.iterations = iterations
        self.compiled = slot.shape.num_elements() >= COMPILED_FROM
        # The first value is set, not drawn: every copy of the optimizer starts alike.
        self.codes = tf.Variable(form.encode(slot.value), trainable=False, name=slot.name)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer that holds the codes."""
        return self.codes.dtype.size * self.codes.shape.num_elements()

    def whole(self) -> tf.Tensor:
        """The values, decoded on the device in scope."""
        return _decoder(self.format, self.dtype, self.compiled)(tf.convert_to_tensor(self.codes))

    def assign(self, value: Any) -> None:
        """Encodes and stores all values."""
        self.codes.assign(self.encode(value, self.compiled))

    def encode(self, value: Any, compiled: bool = False) -> tf.Tensor:
        """Codes of values, rounded as configured; the draw depends on slot and step."""
        seed = None
        if self.rounding == "stochastic":
            step = tf.cast(self.iterations.value, tf.int64)
            seed = tf.stack([tf.constant(self.seed, tf.int64), step])
        encode = _encoder(self.format, self.rounding, compiled)
        return encode(tf.cast(value, self.dtype), seed)

    def update_rows(self, method: str, rows: tf.IndexedSlices) -> None:
        """Assigns, adds or subtracts some rows (an embedding's), leaving the other codes alone.

        Rows that stand twice are summed before they are added, as `scatter_add` does.
        """
        indices, values = rows.indices, tf.cast(rows.values, self.dtype)
        if method != "assign":
            indices, where = tf.unique(rows.indices)
            change = tf.math.unsorted_segment_sum(values, where, tf.size(indices))
            old = self.format.decode(tf.gather(self.codes, indices), self.dtype)
            values = old + change if method == "assign_add" else old - change
        self.codes.scatter_update(tf.IndexedSlices(self.encode(values), indices))


def coded(variable: Any) -> CodedSlot | None:
    """The codes behind a slot of a local optimizer, or None if it is not encoded."""
    backing = getattr(variable, "__dict__", {}).get(ATTRIBUTE)
    return backing if isinstance(backing, CodedSlot) else None


def format_slots(
    local: LocalOptimizer, config: StateFormatConfig, draws: Sequence[int] | None = None
) -> dict[str, list[CodedSlot]]:
    """Makes the moments of a local optimizer live as 16-bit codes.

    Call it right after the local optimizer was built, before `link_slots`. The optimizer then
    updates, and is read, as before; each float buffer is freed as its codes are made.

    Args:
        local: A local optimizer; changed in place.
        config: The formats.
        draws: What stochastic rounding of each variable's slots depends on, besides the seed and
            the step; `local.positions` by default.

    Returns:
        Attribute of the optimizer -> its encoded slots, in the order of the variables.

    Raises:
        ValueError: As `slot_formats`, and for slots of a 16-bit dtype, where codes save nothing.

    Example:
    ```python
    local = LocalOptimizer(optimizer, "/CPU:0", [0], [variable], [variable])
    format_slots(local, StateFormatConfig(first="1-6-9", second="0-6-10"))
    ```
    """
    optimizer = local.optimizer
    made: dict[str, list[CodedSlot]] = {}
    draws = local.positions if draws is None else draws
    with tf.device(local.device):
        for name, form in slot_formats(optimizer, config).items():
            for i, slot in enumerate(slot_variables(optimizer, name)):
                if slot is None or keras.backend.is_int_dtype(slot.dtype):
                    continue  # no slot of that variable; Adafactor holds an integer's place
                _check_dtype(slot, form)
                # Positions tell shards apart; names count up in a process that builds twice.
                seed = config.seed + zlib.crc32(f"{name} {draws[i]}".encode())
                backing = CodedSlot(slot, form, config.rounding, seed, local.iterations())
                become_view(slot, backing, None)
                made.setdefault(name, []).append(backing)
    if made:
        keras_optimizers.route_assignments(optimizer, _write_coded)
    return made


def _check_dtype(slot: keras.Variable, form: Format) -> None:
    dtype = keras.backend.standardize_dtype(slot.dtype)
    if dtype not in ("float32", "float64"):
        raise ValueError(
            "Moments are encoded from float32 or float64 slots; others have 16 bits already. Use "
            f"'fp32' to keep them as they are. Received: format {form.name!r} for {slot.path!r} "
            f"of dtype {dtype!r}"
        )


def _write_coded(method: str, variable: Any, value: Any) -> bool:
    backing = coded(variable)
    if backing is None:
        return False
    if isinstance(value, tf.IndexedSlices):
        backing.update_rows(method, value)
    else:
        getattr(variable, method)(value)
    return True
