"""Every internal behind `kdist._compat.keras_remat` is there and does what is expected."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from kdist._compat import keras_remat

import h5py
import keras
import pytest
import tensorflow as tf

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


class Holder(keras.layers.Layer):
    def __init__(self, *held: Any) -> None:
        super().__init__()
        self.held = list(held)

    def call(self, x: Any) -> Any:
        return x


class Wrapper(Holder):
    def call(self, x: Any) -> Any:
        return [keras.remat(one)(x) for one in self.held]


def helper(function: Any, x: Any) -> Any:
    return keras.remat(function)(x)


class ByHelper(Holder):
    def call(self, x: Any) -> Any:
        return helper(keras.ops.tanh, x)


DOUBLED = keras.remat(lambda x: 2 * x)


class Global(Holder):
    def call(self, x: Any) -> Any:
        return DOUBLED(x)


def closed_over(function: Any) -> Any:
    return lambda x: function(x)


def test_layers_that_wrap_functions_are_known() -> None:
    assert keras_remat.wraps_functions(Holder(keras.remat(keras.ops.tanh)))
    assert keras_remat.wraps_functions(Holder(keras.remat(keras.layers.Dense(2))))
    assert keras_remat.wraps_functions(Wrapper())
    assert keras_remat.wraps_functions(keras.layers.Lambda(lambda x: keras.remat(abs)(x)))
    assert keras_remat.wraps_functions(ByHelper())
    assert keras_remat.wraps_functions(Global())
    assert keras_remat.wraps_functions(keras.layers.Lambda(closed_over(keras.remat(abs))))
    assert keras_remat.wraps_functions(keras.layers.Lambda(functools.partial(helper, abs)))
    assert not keras_remat.wraps_functions(keras.layers.Lambda(closed_over(abs)))
    assert not keras_remat.wraps_functions(Holder(keras.ops.tanh, keras.layers.Dense(2)))


@dataclasses.dataclass
class Box:
    """No layer."""

    held: Any = None


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class Asserts(Holder):
    def call(self, x: Any) -> Any:
        assert len(x.shape) == 2, "pytest rewrites this to calls of functions of its own"
        return x


class Calling:
    def __call__(self, x: Any) -> Any:
        return keras.remat(keras.ops.tanh)(x)

    def run(self, x: Any) -> Any:
        return x


class MakesOne(Holder):
    def call(self, x: Any) -> Any:
        return Calling()(x)


def test_wrappers_in_containers_and_objects_are_known() -> None:
    one = keras.remat(keras.ops.tanh)
    for held in (
        [[one]],
        {"a": {"b": (one,)}},
        Box(one),
        [Box({"a": Slotted([Box(one)])})],
        Calling(),
        Calling().run,
        functools.partial(helper, x=Box(one)),
    ):
        assert keras_remat.wraps_functions(Holder(held)), held
    assert keras_remat.wraps_functions(MakesOne())
    circle = Box([])
    circle.held.append(circle)
    # The class of Cython's functions has no module: a slot of that name is in its place.
    assert not isinstance(type(h5py.h5f.open).__module__, str)
    assert not keras_remat.wraps_functions(Holder(h5py.h5f.open))
    for held in (circle, [[keras.ops.tanh]], Box(Slotted({"a": abs})), list(range(100_000))):
        assert not keras_remat.wraps_functions(Holder(held))


class Hostile:
    """Does as it likes when it is asked."""

    __slots__ = ("held",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_objects_are_not_asked() -> None:
    """As a proxy would look up, or connect to, what it stands for."""
    assert not keras_remat.wraps_functions(Holder(Hostile(), Box(Hostile())))
    assert keras_remat.wraps_functions(Holder(Hostile(), Box(keras.remat(keras.ops.tanh))))


def test_the_search_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not found is refused when it is called."""
    looked_into: list[Any] = []
    held_by = keras_remat._held_by

    def counted(value: Any) -> list[Any]:
        looked_into.append(value)
        return held_by(value)

    monkeypatch.setattr(keras_remat, "_held_by", counted)
    boxes = [Box(Box()) for _ in range(100_000)]
    assert not keras_remat.wraps_functions(Holder(boxes))
    assert 1 < len(looked_into) <= keras_remat.LOOKED_AT < len(boxes)


@pytest.mark.parametrize("in_graph", [True, False])
def test_what_remat_made_runs_as_is_told(in_graph: bool) -> None:
    double = keras.remat(lambda x: 2 * x)

    def call(x: Any) -> Any:
        with keras_remat.wrapped_run_by(lambda function: lambda x: 5 + function(x)):
            return double(x)

    run = tf.function(call) if in_graph else call
    assert float(run(tf.constant(1.0))) == 7
    assert float(double(tf.constant(1.0))) == 2


def test_pytest_is_not_looked_into() -> None:
    # By way of the running test, it leads to all others.
    looked_at: dict[int, Any] = {}
    for one in vars(Asserts).values():
        keras_remat._leads_to_remat(one, looked_at)
    kinds = {type(one).__module__.partition(".")[0] for one in looked_at.values()}
    assert "_pytest" not in kinds and len(looked_at) < 1000
