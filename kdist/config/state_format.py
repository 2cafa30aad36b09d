"""Which slots of an optimizer are moments, and the formats they are kept in.

Only moments are encoded. What is no moment stays as Keras made it: gradient accumulators, weight
averages (EMA), and slots that the parameter itself is computed from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kdist._compat import keras_optimizers
from kdist.config.unknown_fields import explains_fields
from kdist.layers.lazy import Lazy
from kdist.storage.state_formats import FORMATS, ROUNDINGS, Format, Rounding

import keras

Moment = Literal["first", "second", "whole"]
MOMENTS = ("first", "second", "whole")


@dataclass(frozen=True)
class SlotKind:
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
    "_momentums": SlotKind("first", "beta_1"),
    "_velocities": SlotKind("second", "beta_2"),
}
SLOTS: dict[str, dict[str, SlotKind]] = {
    "SGD": {"momentums": SlotKind("first", "momentum")},
    "RMSprop": {
        "_velocities": SlotKind("second", "rho"),
        "_momentums": SlotKind("first", "momentum"),
        "_average_gradients": SlotKind(
            "whole", why="its square is subtracted from the second moment, which must stay larger"
        ),
    },
    "Adam": _ADAM | {"_velocity_hats": SlotKind("second", "beta_2")},
    "AdamW": _ADAM | {"_velocity_hats": SlotKind("second", "beta_2")},
    "Nadam": _ADAM,
    "Lamb": _ADAM,
    "Adamax": {"_m": SlotKind("first", "beta_1"), "_u": SlotKind("second", "beta_2")},
    "Adadelta": {
        "_accumulated_grads": SlotKind("second", "rho"),
        "_accumulated_delta_vars": SlotKind("second", "rho"),
    },
    "Adagrad": {"_accumulators": SlotKind("second")},
    "Adafactor": {"_r": SlotKind("second"), "_c": SlotKind("second"), "_v": SlotKind("second")},
    "Lion": {"_momentums": SlotKind("first", "beta_2")},
    "Muon": {
        "momentums": SlotKind("first", "momentum"),
        "adam_velocities": SlotKind("second", "adam_beta_2"),
    },
    "Ftrl": {
        "_accumulators": SlotKind(
            "whole", why="its changes are summed in `_linears`, so must be exact"
        ),
        "_linears": SlotKind("whole", why="the parameter is computed from it in every step"),
    },
    "ScheduleFreeAdamW": {
        "_momentums": SlotKind("whole", why="it is the sequence of weights z, no moment"),
        "_velocities": SlotKind("second", "beta_2"),
    },
}
"""Class name and attribute of every per-variable slot that Keras's optimizers make."""


@explains_fields
@dataclass(frozen=True, kw_only=True)
class StateFormatConfig:
    """In which formats optimizer moments are kept.

    Raises:
        ValueError: For a format, rounding, seed or slot that is not listed. What depends on the
            optimizer is checked by `slot_formats`.

    Example:
    ```python
    moments = kdist.StateFormatConfig(first="1-6-9", second="0-6-10")
    optimizer = kdist.OptimizerConfig(level=1, state_format=moments)
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
        ValueError: If the optimizer is none that Keras ships and `config.slots` is empty, a slot
            named there does not exist, nothing is left to encode, or rounding would break the
            optimizer (see `docs/compression.md`).
    """
    if not config.encodes:
        return {}
    if isinstance(optimizer, Lazy):
        raise ValueError(
            "A lazy optimizer reads rows of its state, and codes are read whole. Leave "
            "state_format out, or give the table an optimizer of Keras with dense=True. "
            f"Received: state_format={config}, {type(optimizer).__name__}"
        )
    slots = _known_slots(optimizer, config)
    formats = {}
    for name, slot in slots.items():
        form = config.format_of(slot.moment)
        if form is not None and slot_variables(optimizer, name):
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


def _known_slots(optimizer: Any, config: StateFormatConfig) -> dict[str, SlotKind]:
    name = type(optimizer).__name__
    own = keras_optimizers.own_class(optimizer)
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
            there = list(keras_optimizers.families(optimizer))
            raise ValueError(
                "A slot is an attribute of the optimizer that holds a list with one variable per "
                f"parameter. {name} has {there}. Received: slots={{{attribute!r}: {moment!r}}}"
            )
        slots[attribute] = SlotKind(moment, why="named so in slots" if moment == "whole" else "")
    return slots


def slot_variables(optimizer: Any, name: str) -> list[keras.Variable | None]:
    """An optimizer's state under an attribute, one per parameter, None for those without."""
    return list(getattr(optimizer, name, []))


def _check_updates_survive(
    optimizer: Any, name: str, slot: SlotKind, form: Format, config: StateFormatConfig
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
