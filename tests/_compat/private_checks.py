"""What the tests of the private modules share: compiled models, and whether all is tested."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

import keras

from ..parity import data, mlp


def compiled(loss: object = "mse", **options: object) -> keras.Model:
    """A compiled model that has seen one batch, so that everything is built."""
    model = mlp()
    model.compile("sgd", loss, **options)
    model.train_on_batch(*data(4))
    return model


def two_outputs() -> keras.Model:
    model = mlp()
    other = keras.layers.Dense(3, name="other")(model.layers[1].output)
    model = keras.Model(model.inputs, {"down": model.outputs[0], "other": other})
    model.compile("sgd", {"down": "mse", "other": "mae"}, loss_weights={"down": 1.0, "other": 2.0})
    x, y = data(4)
    model.train_on_batch(x, {"down": y, "other": y})
    return model


def untested(module: ModuleType, *tests: str | Path) -> list[str]:
    """Functions of a module without a `test_<function>` in any of the files of tests."""
    functions = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    assert functions
    source = "\n".join(Path(file).read_text() for file in tests)
    return [name for name in functions if f"def test_{name}(" not in source]
