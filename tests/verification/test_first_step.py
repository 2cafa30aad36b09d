"""`ParallelConfig(verify='first_step')`: before any update, once."""

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from ..equivalence.matrix import product, spread
from .models import Centre, batch, small


@pytest.mark.parametrize(
    ("source", "per_execution"),
    spread(product(["arrays", "dataset"], [1, 2]), [("dataset", 2)]),
)
def test_the_first_step_is_verified_and_training_goes_on(source, per_execution, capsys):
    x, y = batch(10)
    data = (x, y) if source == "arrays" else (tf.data.Dataset.from_tensor_slices((x, y)).batch(4),)
    options = {"batch_size": 4, "shuffle": False} if source == "arrays" else {}
    histories = []
    for verify in (None, "first_step"):
        keras.utils.set_random_seed(0)
        model = small(layers.Dropout(0.3), verify=verify)
        model.steps_per_execution = per_execution
        log = model.fit(*data, epochs=2, verbose=0, **options)
        histories.append((log.history["loss"], int(model.optimizer.iterations.numpy())))
    assert histories[0] == histories[1]
    assert histories[1][1] == 6
    said = capsys.readouterr().out
    assert said.count("verify='first_step'") == 1
    model.fit(*data, verbose=0, **options)
    model.compile("sgd", "mse")
    model.fit(*data, verbose=0, **options)
    assert "first_step" not in capsys.readouterr().out


def test_the_first_step_refuses_before_any_update():
    model = small(Centre(name="centre"), verify="first_step")
    before = [keras.ops.convert_to_numpy(v) for v in model.variables]
    for train in (model.fit, model.train_on_batch, lambda x, y: kdist.gradients(model, x, y)):
        with pytest.raises(kdist.VerificationError, match="'centre'") as refused:
            train(*batch())
        assert not refused.value.verification.ok
    for a, b in zip(before, model.variables):
        np.testing.assert_array_equal(a, keras.ops.convert_to_numpy(b))
    assert model.optimizer.iterations.numpy() == 0
    assert model.evaluate(*batch(), verbose=0) > 0


def test_a_loop_in_a_graph_cannot_be_verified():
    model = small(verify="first_step")
    with pytest.raises(ValueError, match="outside of tf.function"):
        tf.function(lambda x, y: kdist.gradients(model, x, y))(*batch())


def test_verify_is_first_step_or_none():
    with pytest.raises(ValueError, match="verify='always'"):
        kdist.ParallelConfig(mesh=kdist.mesh(data=2), verify="always")
    assert "first_step" in str(kdist.ParallelConfig(mesh=kdist.mesh(data=2), verify="first_step"))
