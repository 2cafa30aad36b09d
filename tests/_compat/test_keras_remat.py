"""Every internal behind `kdist._compat.keras_remat` is there and does what is expected."""

from __future__ import annotations

from typing import Any

from kdist._compat import keras_remat

import keras
import pytest

MODES: list[tuple[dict[str, Any], list[str | None]]] = [
    ({"mode": "full"}, ["full", "full"]),
    ({"mode": "activations"}, ["selective", None]),
    ({"mode": "larger_than", "output_size_threshold": 8}, ["full", None]),
    ({"mode": "list_of_layers", "layer_names": ["flat"]}, [None, "full"]),
    ({"mode": None}, [None, None]),
]


@pytest.mark.parametrize(("options", "expected"), MODES, ids=lambda x: str(x)[:30])
def test_policies_and_operations(options: dict[str, Any], expected: list[str | None]) -> None:
    x = inputs = keras.Input((4,))
    with keras.RematScope(**options):
        x = keras.layers.Dense(16, "gelu", name="wide")(x)
        x = keras.ops.square(keras.layers.Reshape((2, 8), name="deep")(x))
        outputs = keras.layers.Lambda(lambda t: t[:, 0], output_shape=(8,), name="flat")(x)
    model = keras.Model(inputs, outputs)
    layers = [model.get_layer("wide"), model.get_layer("flat")]
    assert [keras_remat.policy_of(one) for one in layers] == expected
    found = keras_remat.with_remat(keras_remat.operations_of(model))
    assert {type(one).__name__ for one in found} >= {"Dense", "Reshape", "Lambda", "Square"}
    modes = [one._remat_mode for one in found]
    with keras_remat.without_remat(found):
        assert not any(one._remat_mode for one in found)
        # Were the mode looked at elsewhere, TensorFlow would fail on keyword arguments.
        model(keras.ops.ones((2, 4)))
    assert [one._remat_mode for one in found] == modes
