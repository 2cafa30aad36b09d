"""Every internal behind `kdist._compat.keras_applied` is there and does what is expected."""

from __future__ import annotations

import contextlib
import functools

import kdist
from kdist._compat import keras_applied
from kdist.optimizer.local import refuse_assigned_methods

import keras
import pytest

from .private_checks import untested


def test_each_function_has_a_test():
    """So that what moves is named by what fails."""
    assert untested(keras_applied, __file__) == []


def test_own_methods():
    kind = type("Own", (keras.optimizers.SGD,), {"apply": None, "__module__": __name__})
    found = [keras_applied.own_methods(k(0.5), ["apply"]) for k in kind.__mro__[:2]]
    assert found == [["apply"], []]


def test_methods_of_object():
    optimizer = keras.optimizers.SGD(0.5)
    keras_applied.replace_apply(optimizer, refuse_assigned_methods)
    assert keras_applied.methods_of_object(optimizer) == []
    optimizer.own = optimizer.update_step = functools.partial(lambda *_: None)
    assert keras_applied.methods_of_object(optimizer) == ["update_step"]


def test__package_of():
    assert keras_applied._package_of(functools.partial(keras.ops.add, 1)) == "keras"
    assert keras_applied._package_of(3) == ""


def test_replace_apply():
    optimizer = keras.optimizers.SGD()
    seen = []
    keras_applied.replace_apply(optimizer, lambda *given: seen.append(given))
    optimizer.apply_gradients([(1.0, "one"), (2.0, "two")])
    assert seen == [((1.0, 2.0), ("one", "two"))]


@pytest.mark.parametrize("scaled", [False, True])
def test_applied_by(scaled):
    variable, other = keras.Variable([1.0]), keras.Variable([1.0])
    optimizer = keras.optimizers.SGD(1.0)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
    seen = []

    def apply(of, own, grads, variables):
        seen.append((of, variables))
        if variables[0] is not other:
            own(grads, variables)

    with keras_applied.applied_by(apply):
        optimizer.apply_gradients([(keras.ops.ones((1,)), variable)])
        count = len(seen)
        assert optimizer.apply_gradients([(keras.ops.ones((1,)), other)]) == 1
        optimizer.apply([keras.ops.ones((1,))], [other])
    # What a method's own code calls asks too: `apply`, and the inner optimizer's.
    assert count >= 2 + scaled and seen[0][0] is optimizer and seen[0][1][0] is variable
    assert len(seen) == count + 2
    assert [variable.numpy().tolist(), other.numpy().tolist()] == [[0.0], [1.0]]
    optimizer.apply([keras.ops.ones((1,))], [variable])
    assert len(seen) == count + 2


def test_built_within():
    seen = []

    @contextlib.contextmanager
    def around():
        seen.append("begins")
        yield
        seen.append("ends")

    def optimizer():
        inner = keras.optimizers.SGD(1.0, momentum=0.9)
        return keras.optimizers.LossScaleOptimizer(inner)

    with keras_applied.built_within(around):
        optimizer().build([keras.Variable([1.0])])
    assert seen[0] == "begins" and seen[-1] == "ends" and len(seen) >= 4
    count = len(seen)
    optimizer().build([keras.Variable([1.0])])
    assert len(seen) == count


def test_scaled_after():
    seen = []
    inner = keras.optimizers.SGD(1.0)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    with keras_applied.scaled_after(seen.append):
        assert float(optimizer.scale_loss(2.0)) == 16.0
    assert seen == [optimizer]
    optimizer.scale_loss(2.0)
    assert len(seen) == 1


def test__routed():
    kind = keras.optimizers.SGD
    with keras_applied._routed({"build": lambda own: "another"}):
        assert vars(kind)["build"] == "another"
    assert callable(vars(kind)["build"])


def test__with_own():
    """Wrappers of Keras and kdist are found, and classes of a user's own."""

    class Own(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            super().apply(grads, trainable_variables)

    base = keras_applied.keras_base_optimizer.BaseOptimizer
    found = keras_applied._with_own(base, "apply")
    assert {base, keras.optimizers.LossScaleOptimizer, kdist.ShardedOptimizer, Own} <= found
    assert keras.optimizers.SGD not in found
    assert base in keras_applied._with_own(base, "apply_gradients")
