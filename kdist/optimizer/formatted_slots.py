"""Optimizer slots kept as 16-bit codes: which slots are moments, and the views that read them.

A slot of a local optimizer stays the Keras variable that the optimizer holds; its bytes become
codes of `state_formats`. Reading it decodes, writing it encodes, so a step computes with exactly
what is stored. The user's optimizer, whose variables are views of the local ones, still shows
whole float tensors, and saves and loads them.

Only moments are encoded. What is no moment stays as Keras made it: gradient accumulators, weight
averages (EMA), and slots that the parameter itself is computed from.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kdist import _private_optimizers
from kdist.optimizer.local import LocalOptimizer, families
from kdist.optimizer.state_formats import FORMATS, ROUNDINGS, Format, Rounding
from kdist.variables import ATTRIBUTE, become_view

import keras
import tensorflow as tf

Moment = Literal["first", "second", "whole"]
MOMENTS = ("first", "second", "whole")


@dataclass(frozen=True)
class Slot:
    """What kdist knows about a slot of an optimizer that Keras ships.

    Attributes:
        moment: `"first"`, `"second"`, or `"whole"` for a slot that is never encoded.
        keep: Attribute of the optimizer with the factor by which the old value counts in an
            update, or None if its weight tends to 1 (sums, growing averages).
        why: For `"whole"`, the reason.
    """

    moment: Moment
    keep: str | None = None
    why: str = ""


_ADAM = {
    "_momentums": Slot("first", "beta_1"),
    "_velocities": Slot("second", "beta_2"),
}
SLOTS: dict[str, dict[str, Slot]] = {
    "SGD": {"momentums": Slot("first", "momentum")},
    "RMSprop": {
        "_velocities": Slot("second", "rho"),
        "_momentums": Slot("first", "momentum"),
        "_average_gradients": Slot(
            "whole", why="its square is subtracted from the second moment, which must stay larger"
        ),
    },
    "Adam": _ADAM | {"_velocity_hats": Slot("second", "beta_2")},
    "AdamW": _ADAM | {"_velocity_hats": Slot("second", "beta_2")},
    "Nadam": _ADAM,
    "Lamb": _ADAM,
    "Adamax": {"_m": Slot("first", "beta_1"), "_u": Slot("second", "beta_2")},
    "Adadelta": {
        "_accumulated_grads": Slot("second", "rho"),
        "_accumulated_delta_vars": Slot("second", "rho"),
    },
    "Adagrad": {"_accumulators": Slot("second")},
    "Adafactor": {"_r": Slot("second"), "_c": Slot("second"), "_v": Slot("second")},
    "Lion": {"_momentums": Slot("first", "beta_2")},
    "Muon": {
        "momentums": Slot("first", "momentum"),
        "adam_velocities": Slot("second", "adam_beta_2"),
    },
    "Ftrl": {
        "_accumulators": Slot(
            "whole", why="its changes are summed in `_linears`, so must be exact"
        ),
        "_linears": Slot("whole", why="the parameter is computed from it in every step"),
    },
    "ScheduleFreeAdamW": {
        "_momentums": Slot("whole", why="it is the sequence of weights z, no moment"),
        "_velocities": Slot("second", "beta_2"),
    },
}
"""Class name and attribute of every per-variable slot that Keras's optimizers make."""


@dataclass(frozen=True, kw_only=True)
class StateFormatConfig:
    """In which formats optimizer moments are kept.

    Raises:
        ValueError: for a format, rounding, seed or slot that is not listed. What depends on the
            optimizer is checked by `slot_formats`.

    Example:
    ```python
    StateFormatConfig(first="1-6-9", second="0-6-10")
    ```
    """

    first: Literal["fp32", "bf16", "1-6-9"] = "fp32"
    """First moments: averages or sums of gradients. `"fp32"`: not encoded, kept in the dtype that
    Keras gives the slot (float32 for float32 parameters)."""

    second: Literal["fp32", "bf16", "0-6-10"] = "fp32"
    """Second moments: averages or sums of squares, norms; never negative."""

    rounding: Rounding = "nearest"
    """`"nearest"` (ties to even), or `"stochastic"`, which loses no small change over many
    steps."""

    seed: int = 0
    """Of stochastic rounding; each slot and step draws anew from it."""

    slots: Mapping[str, Moment] = field(default_factory=dict)
    """For optimizers that Keras does not ship: attribute that holds a list with one variable per
    parameter -> `"first"`, `"second"`, or `"whole"` (not encoded). Wins over what kdist knows."""

    def __post_init__(self) -> None:
        allowed = {
            "first": ("fp32", "bf16", "1-6-9"),
            "second": ("fp32", "bf16", "0-6-10"),
            "rounding": ROUNDINGS,
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"{name} is one of {list(values)}. Received: {name}={getattr(self, name)!r}"
                )
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed is an int. Received: seed={self.seed!r}")
        wrong = {k: v for k, v in dict(self.slots).items() if v not in MOMENTS}
        if wrong:
            raise ValueError(
                f"slots maps attributes of the optimizer to one of {list(MOMENTS)}. "
                f"Received: slots={wrong!r}"
            )
        object.__setattr__(self, "slots", dict(self.slots))

    @property
    def encodes(self) -> bool:
        """Whether any moment is to be encoded."""
        return self.first != "fp32" or self.second != "fp32"

    def format_of(self, moment: Moment) -> Format | None:
        """The format of a kind of slot; None: not encoded."""
        return None if moment == "whole" else FORMATS[getattr(self, moment)]

    def __str__(self) -> str:
        lines = ["StateFormatConfig"]
        lines += [f"  {k}: {getattr(self, k)}" for k in ("first", "second", "rounding")]
        if self.rounding == "stochastic":
            lines.append(f"  seed: {self.seed}")
        lines += [f"  slot {name}: {moment}" for name, moment in self.slots.items()]
        return "\n".join(lines)


def slot_formats(optimizer: Any, config: StateFormatConfig) -> dict[str, Format]:
    """Which attributes of a built optimizer hold slots to encode, and in which format.

    Args:
        optimizer: A Keras optimizer that does math itself (no `LossScaleOptimizer`).
        config: The formats.

    Raises:
        ValueError: if the optimizer is none that Keras ships and `config.slots` is empty, a slot
            named there does not exist, nothing is left to encode, or rounding would break the
            optimizer (see `docs/compression.md`).
    """
    if not config.encodes:
        return {}
    slots = _known_slots(optimizer, config)
    formats = {}
    for name, slot in slots.items():
        form = config.format_of(slot.moment)
        if form is not None and _variables(optimizer, name):
            _check_updates_survive(optimizer, name, slot, form, config)
            formats[name] = form
    if config.second != "fp32" and getattr(optimizer, "centered", False):
        raise ValueError(
            "RMSprop(centered=True) subtracts the square of the average gradient from the second "
            "moment; rounding makes the difference negative and the step NaN. Use second='fp32', "
            f"or centered=False. Received: second={config.second!r}"
        )
    if not formats:
        reasons = [f"{name}: {slot.why}" for name, slot in slots.items() if slot.why]
        raise ValueError(
            f"{type(optimizer).__name__} as configured has no moment that a 16-bit format applies "
            f"to{' (' + '; '.join(reasons) + ')' if reasons else ''}. Use first='fp32' and "
            f"second='fp32'. Received: first={config.first!r}, second={config.second!r}"
        )
    return formats


def _known_slots(optimizer: Any, config: StateFormatConfig) -> dict[str, Slot]:
    name = type(optimizer).__name__
    own = _private_optimizers.own_class(optimizer)
    shipped = own is getattr(keras.optimizers, name, None) and name in SLOTS
    if not shipped and not config.slots:
        raise ValueError(
            "kdist knows which slots are moments for the optimizers that Keras ships, not for "
            "others. Name them: slots={'_momentums': 'first', '_velocities': 'second'}. "
            f"Received: optimizer of class {name}"
        )
    slots = dict(SLOTS[name]) if shipped else {}
    for attribute, moment in config.slots.items():
        if not isinstance(getattr(optimizer, attribute, None), list):
            there = list(families(optimizer, len(optimizer._trainable_variables)))
            raise ValueError(
                "A slot is an attribute of the optimizer that holds a list with one variable per "
                f"parameter. {name} has {there}. Received: slots={{{attribute!r}: {moment!r}}}"
            )
        slots[attribute] = Slot(moment, why="named so in slots" if moment == "whole" else "")
    return slots


def _variables(optimizer: Any, name: str) -> list[keras.Variable | None]:
    return list(getattr(optimizer, name, []))


def _check_updates_survive(
    optimizer: Any, name: str, slot: Slot, form: Format, config: StateFormatConfig
) -> None:
    """Refuses nearest rounding where it would undo the smallest change that decay makes.

    A value of n units in the last place, n < 2^(mantissa_bits + 1), moves if the change is at
    least half a unit: so a decay of less than 2^-(mantissa_bits + 1) leaves some values as they
    are for ever.
    """
    if config.rounding == "stochastic" or name in config.slots:
        return  # nothing is lost, or nothing is known about the slot
    keep = 1.0 if slot.keep is None else float(getattr(optimizer, slot.keep))
    least = 2.0 ** -(form.mantissa_bits + 1)
    if 1.0 - keep >= least * (1 - 1e-6):
        return
    what = f"{slot.keep}={keep:g}" if slot.keep else "a sum, or an average over ever more steps"
    raise ValueError(
        f"A moment in {form.name} with rounding='nearest' changes only by steps of more than "
        f"{least:.2g} of its value, so it would stop following the gradients: {name} of "
        f"{type(optimizer).__name__} is {what}. Use rounding='stochastic', a format with more "
        f"mantissa bits, or a smaller decay factor. Received: {slot.moment}={form.name!r}, "
        f"rounding={config.rounding!r}"
    )


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
        ValueError: as `slot_formats`, and for slots of a 16-bit dtype, where codes save nothing.

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
            for i, slot in enumerate(_variables(optimizer, name)):
                if slot is None or keras.backend.is_int_dtype(slot.dtype):
                    continue  # no slot of that variable; Adafactor holds an integer's place
                _check_dtype(slot, form)
                # Positions tell shards apart; names count up in a process that builds twice.
                seed = config.seed + zlib.crc32(f"{name} {draws[i]}".encode())
                backing = CodedSlot(slot, form, config.rounding, seed, local.iterations())
                become_view(slot, backing, None)
                made.setdefault(name, []).append(backing)
    if made:
        _private_optimizers.route_assignments(optimizer, _write_coded)
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
