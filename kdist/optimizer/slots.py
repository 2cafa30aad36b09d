"""The variables of a Keras optimizer, by the attributes that hold them."""

from __future__ import annotations

from typing import Any

import keras


def families(optimizer: Any, count: int) -> dict[str, list]:
    """Per-variable state of an optimizer: attribute name -> one variable (or None) per variable."""
    trainable = {id(v) for v in getattr(optimizer, "_trainable_variables", [])}
    found = {}
    for name, value in vars(optimizer).items():
        if name in ("_variables", "_trainable_variables") or not isinstance(value, list):
            continue
        slots = [v for v in value if isinstance(v, keras.Variable)]
        complete = all(v is None or isinstance(v, keras.Variable) for v in value)
        if len(value) == count and slots and complete and id(slots[0]) not in trainable:
            found[name] = list(value)
    return found


def scalars(optimizer: Any) -> dict[str, keras.Variable]:
    """State of an optimizer that belongs to no variable (step counter, Nadam's product)."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, keras.Variable) and name != "_learning_rate"
    }
