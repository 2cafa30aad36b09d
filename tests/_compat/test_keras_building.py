"""What `kdist._compat.keras_building` knows of how Keras builds a model is as it takes it to be."""

from __future__ import annotations

from typing import Any

from kdist._compat import keras_building, keras_trainer

import keras
import numpy as np
import pytest

from ..parity import data, mlp

SPECS = (keras.KerasTensor((8, 6)), keras.KerasTensor((8, 3)), None)


class Counted(keras.layers.Layer):
    """Counts how often it is called, and with which shape last."""

    calls = 0

    def call(self, x: Any) -> Any:
        self.calls, self.shape = self.calls + 1, tuple(x.shape)
        return x


def counted(*shape: int | None, **compiled: Any) -> tuple[keras.Model, Counted]:
    """A compiled model, and the layer that ends it, which has been called once."""
    inputs, layer = keras.Input(shape), Counted()
    model = keras.Model(inputs, layer(inputs))
    layer.calls = 0
    model.compile("sgd", **compiled)
    return model, layer


def test_build_from_loss():
    class Head(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(self.head(y_pred))

    model = Head(inputs=(model := mlp()).inputs, outputs=model.outputs)
    model.head = keras.layers.Dense(2)
    keras_building.build_from_loss(model, SPECS[:2])
    assert model.head.built
    assert len(model.trainable_variables) == 6


def test_build_from_specs():
    model = mlp()
    model.compile("sgd", "mse", metrics=["mae"])
    keras_building.build_from_specs(model, SPECS)
    assert len(keras_trainer.compiled_losses(model)) == 1
    assert not model.optimizer.built
    assert keras_trainer.compiled_metrics(model).built


def test_a_functional_is_not_traced_to_learn_what_it_declares():
    model, layer = counted(6, loss="mse", metrics=[keras.metrics.F1Score()])
    keras_building.build_from_specs(model, (SPECS[0], SPECS[0], None))
    assert layer.calls == 0
    assert keras_trainer.compiled_metrics(model).built
    assert model.metrics[1].metrics[0].true_positives.shape == (6,)
    assert model(np.zeros((2, 6))).shape == (2, 6)
    assert layer.calls == 1


def test_sizes_that_follow_from_the_inputs_are_looked_up():
    """A metric that has a value per class needs to know how many classes there are."""
    model, layer = counted(None, loss="mse", metrics=[keras.metrics.F1Score()])
    keras_building.build_from_specs(model, (SPECS[0], SPECS[0], None))
    assert layer.calls == 1
    assert model.metrics[1].metrics[0].true_positives.shape == (6,)


def test_a_loss_may_ask_for_the_number_of_rows():
    def by_rows(y: Any, predicted: Any) -> Any:
        return keras.ops.mean(keras.ops.reshape(y - predicted, (predicted.shape[0] * 6,)))

    model, layer = counted(6, loss=by_rows)
    keras_building.build_from_specs(model, (SPECS[0], SPECS[0], None))
    assert layer.calls == 0
    assert keras_trainer.losses_built(model)


def test_what_declared_outputs_do_not_allow_is_left_to_keras():
    """Outputs whose rows are not those of the batch: with as many as the batch, this would fail."""
    inputs = keras.Input((4, 3))
    model = keras.Model(inputs, keras.ops.reshape(inputs, (-1, 3)))

    def of_all(y: Any, predicted: Any) -> Any:
        return keras.ops.square(
            keras.ops.reshape(y, (-1, 3)) + keras.ops.zeros((32, 3)) - predicted
        )

    model.compile("sgd", of_all)
    specs = (keras.KerasTensor((8, 4, 3)), keras.KerasTensor((8, 4, 3)), None)
    keras_building.build_from_specs(model, specs)
    assert keras_trainer.losses_built(model)


def test_inputs_of_another_shape_are_refused_by_keras():
    model, _ = counted(6, loss="mse")
    with pytest.raises(ValueError, match="incompatible with the layer|expected shape"):
        keras_building.build_from_specs(model, (keras.KerasTensor((8, 5)), SPECS[0], None))


def test_declared_outputs():
    (found,) = keras_building.declared_outputs(mlp(), SPECS[0])
    assert (found.shape, found.dtype) == ((8, 3), "float32")
    (found,) = keras_building.declared_outputs(mlp(), keras.KerasTensor((None, 6)))
    assert found.shape == (None, 3)
    assert keras_building.declared_outputs(mlp(), keras.KerasTensor((8, 5))) is None
    assert keras_building.declared_outputs(mlp(), keras.KerasTensor((8, 6), sparse=True)) is None
    assert keras_building.declared_outputs(mlp(), [SPECS[0]] * 2) is None
    assert (
        keras_building.declared_outputs(keras.Sequential([keras.layers.Dense(2)]), SPECS[0]) is None
    )


def test_a_model_with_a_call_of_its_own_declares_nothing():
    class Own(keras.Model):
        def call(self, x: Any) -> Any:
            return x

    model = Own()
    model(data(4)[0])
    assert keras_building.declared_outputs(model, SPECS[0]) is None
