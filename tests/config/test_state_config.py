"""Which slots of an optimizer get a format, and what is refused."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from kdist._compat.keras_optimizers import families
from kdist.config.state_format import SLOTS, StateFormatConfig, slot_formats
from kdist.storage.state_formats import SECOND_MOMENT

import keras
import pytest

from ..optimizer.slot_parts import BOTH, DRAWN, make, variables


def test_every_slot_of_every_optimizer_is_classified():
    """A slot that Keras adds is found here first."""
    shipped = [
        name
        for name, cls in vars(keras.optimizers).items()
        if inspect.isclass(cls)
        and issubclass(cls, keras.Optimizer)
        and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    ]
    assert sorted(shipped) == sorted(SLOTS)
    for name in shipped:
        options = {"RMSprop": {"centered": True}}.get(name, {})
        optimizer, _ = make(name, use_ema=True, gradient_accumulation_steps=2, **options)
        common = {"_model_variables_moving_average", "_accumulated_gradients"}
        assert set(families(optimizer)) - common == {
            slot for slot in SLOTS[name] if getattr(optimizer, slot, [])
        }
        for slot in SLOTS[name].values():
            assert slot.keep is None or isinstance(getattr(optimizer, slot.keep), float)
            assert bool(slot.why) == (slot.moment == "whole")


class Custom(keras.optimizers.Adam):
    """An optimizer that Keras does not ship."""


def refused(optimizer: Any, config: StateFormatConfig, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        slot_formats(optimizer, config)


def test_custom_optimizers_name_their_slots():
    mine = variables()
    optimizer = Custom()
    optimizer.build(mine)
    refused(optimizer, BOTH, "Received: optimizer of class Custom")
    named = dataclasses.replace(BOTH, slots={"_velocities": "second"})
    assert slot_formats(optimizer, named) == {"_velocities": SECOND_MOMENT}
    missing = dataclasses.replace(BOTH, slots={"velocity": "second"})
    refused(optimizer, missing, r"has \['_momentums', '_velocities'.*'velocity': 'second'")
    whole, _ = make("Adam")
    left = dataclasses.replace(BOTH, slots={"_velocities": "whole"})
    assert sorted(slot_formats(whole, left)) == ["_momentums", "_velocity_hats"]


def test_what_rounding_would_break_is_refused():
    refused(make("RMSprop", centered=True)[0], BOTH, r"step NaN.*second='0-6-10'")
    first = StateFormatConfig(first="1-6-9")
    assert list(slot_formats(make("RMSprop", centered=True)[0], first)) == ["_momentums"]
    refused(make("Ftrl")[0], DRAWN, "_linears: the parameter is computed from it")
    refused(make("SGD", momentum=0.0)[0].__class__(), BOTH, "no moment")
    refused(make("Adagrad")[0], BOTH, "a sum")
    refused(make("Adam")[0], StateFormatConfig(second="bf16"), "beta_2=0.999.*second='bf16'")
    refused(make("Adam", beta_2=0.9999)[0], BOTH, "beta_2=0.9999")
    assert slot_formats(make("Adam", beta_2=0.9999)[0], DRAWN)
    assert list(slot_formats(make("ScheduleFreeAdamW")[0], BOTH)) == ["_velocities"]


@pytest.mark.parametrize(
    "options",
    [
        {"first": "0-6-10"},
        {"second": "1-6-9"},
        {"rounding": "down"},
        {"seed": 1.5},
        {"slots": {"_m": "third"}},
    ],
)
def test_config_refuses(options: dict[str, Any]):
    (value,) = options.values()
    with pytest.raises(ValueError, match="Received") as error:
        StateFormatConfig(**options)
    assert repr(value) in str(error.value)


def test_config_is_printed():
    text = str(dataclasses.replace(DRAWN, slots={"_m": "first"}))
    assert "first: 1-6-9" in text and "rounding: stochastic" in text and "slot _m: first" in text
