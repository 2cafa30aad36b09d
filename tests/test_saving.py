"""What a parallel model writes is what plain Keras writes, and plain programs can read it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

from .parity import (
    MESHES,
    assert_close,
    assert_every_copy,
    assert_same_history,
    assert_same_weights,
    config,
    data,
    mlp,
    pair,
)

pytestmark = pytest.mark.usefixtures("float64")
both_meshes = pytest.mark.parametrize("axes", MESHES, ids=["data", "inner"])


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01, name="adam")


def fit(model: keras.Model, epochs: int = 1) -> Any:
    return model.fit(*data(), batch_size=8, shuffle=False, epochs=epochs, verbose=0)


def trained(axes: dict[str, int]) -> tuple[keras.Model, keras.Model]:
    models = pair(axes)
    for model in models:
        model.compile(adam(), "mse", metrics=["mae"])
        fit(model)
    return models


def run_plain(program: str, folder: Path) -> None:
    """Runs a program in a fresh process that must not import kdist."""
    guard = "\nimport sys\nassert not any(m.split('.')[0] == 'kdist' for m in sys.modules)\n"
    environment = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", program + guard],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


LOAD = """
import keras, numpy as np
keras.config.set_floatx("float64")
model = keras.models.load_model("model.keras")
np.savez("loaded.npz", *model.get_weights(), *[v.numpy() for v in model.optimizer.variables])
given = np.load("data.npz")
history = model.fit(given["x"], given["y"], batch_size=8, shuffle=False, verbose=0).history
np.savez("trained.npz", history["loss"], *model.get_weights())
"""


def arrays(path: Path) -> list[np.ndarray]:
    with np.load(path) as file:
        return [file[f"arr_{i}"] for i in range(len(file.files))]


@both_meshes
def test_saved_model_loads_and_trains_without_kdist(axes, tmp_path):
    plain, parallel = trained(axes)
    parallel.save(tmp_path / "model.keras")
    x, y = data()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    run_plain(LOAD, tmp_path)
    state = [v.numpy() for v in plain.optimizer.variables]
    assert_close([*plain.get_weights(), *state], arrays(tmp_path / "loaded.npz"))
    history = fit(plain)
    expected = [np.array(history.history["loss"]), *plain.get_weights()]
    assert_close(expected, arrays(tmp_path / "trained.npz"))


@both_meshes
@pytest.mark.parametrize("other", MESHES, ids=["to-data", "to-inner"])
def test_save_load_parallelize_fit_goes_on(axes, other, tmp_path):
    """Optimizer state survives, onto another mesh too."""
    plain, parallel = trained(axes)
    parallel.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    again = kdist.parallelize(loaded, config(other))
    assert_same_history(fit(plain, 2), fit(again, 2))
    assert_same_weights(plain, again)


@both_meshes
def test_saved_files_hold_the_same(axes, tmp_path):
    """Archive by archive: configuration and weights are those that plain Keras saves."""
    plain, parallel = trained(axes)
    for name, model in (("plain", plain), ("parallel", parallel)):
        model.save(tmp_path / f"{name}.keras")
    loaded = [keras.models.load_model(tmp_path / f"{n}.keras") for n in ("plain", "parallel")]
    assert loaded[0].get_config() == loaded[1].get_config()
    assert loaded[0].get_compile_config() == loaded[1].get_compile_config()
    assert_same_weights(*loaded)


@both_meshes
def test_save_before_training(axes, tmp_path):
    plain, parallel = pair(axes)
    parallel.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_close(plain.get_weights(), loaded.get_weights())


@both_meshes
def test_weights_file_into_a_parallel_model(axes, tmp_path):
    plain, _ = trained(axes)
    plain.save_weights(tmp_path / "w.weights.h5")
    target = kdist.parallelize(mlp(seed=7), config(axes))
    target.load_weights(tmp_path / "w.weights.h5")
    for a, b in zip(plain.weights, target.weights):
        assert_every_copy(b, a.numpy())
    x, _ = data(8)
    assert_close(plain.predict(x, verbose=0), target.predict(x, verbose=0))


@both_meshes
def test_weights_file_before_parallelize(axes, tmp_path):
    plain, _ = trained(axes)
    plain.save_weights(tmp_path / "w.weights.h5")
    target = mlp(seed=7)
    target.load_weights(tmp_path / "w.weights.h5")
    kdist.parallelize(target, config(axes))
    for a, b in zip(plain.weights, target.weights):
        assert_every_copy(b, a.numpy())


@both_meshes
def test_weights_file_of_a_parallel_model(axes, tmp_path):
    plain, parallel = trained(axes)
    parallel.save_weights(tmp_path / "w.weights.h5")
    target = mlp(seed=7)
    target.load_weights(tmp_path / "w.weights.h5")
    assert_close(plain.get_weights(), target.get_weights())


@both_meshes
def test_weights_loaded_in_the_middle_of_training(axes, tmp_path):
    plain, parallel = trained(axes)
    plain.save_weights(tmp_path / "w.weights.h5")
    for model in (plain, parallel):
        fit(model)
        model.load_weights(tmp_path / "w.weights.h5")
    assert_same_history(fit(plain), fit(parallel))
    assert_same_weights(plain, parallel)


@both_meshes
def test_weights_and_optimizer_file(axes, tmp_path):
    """`save_weights` holds the optimizer of a compiled model too."""
    plain, parallel = trained(axes)
    parallel.save_weights(tmp_path / "w.weights.h5")
    target = kdist.parallelize(mlp(seed=7), config(axes))
    target.compile(adam(), "mse", metrics=["mae"])
    target.optimizer.build(target.trainable_variables)
    target.load_weights(tmp_path / "w.weights.h5")
    assert_same_history(fit(plain), fit(target))
    assert_same_weights(plain, target)


SERVE = """
import numpy as np, tensorflow as tf
served = tf.saved_model.load("exported")
given = np.load("data.npz")
outputs = served.serve(tf.constant(given["x"]))
np.savez("served.npz", outputs.numpy())
"""


@both_meshes
def test_export_is_served_by_plain_tensorflow(axes, tmp_path):
    plain, parallel = trained(axes)
    parallel.export(tmp_path / "exported", verbose=False)
    x, y = data(8)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    run_plain(SERVE, tmp_path)
    assert_close([plain.predict(x, verbose=0)], arrays(tmp_path / "served.npz"))
    assert_same_history(fit(plain), fit(parallel))
    assert_same_weights(plain, parallel)


@both_meshes
def test_export_before_training(axes, tmp_path):
    plain, parallel = pair(axes)
    parallel.export(tmp_path / "exported", verbose=False)
    x, _ = data(8)
    served = tf.saved_model.load(str(tmp_path / "exported"))
    assert_close(plain(x), served.serve(tf.constant(x)))
    for model in (plain, parallel):
        model.compile(adam(), "mse")
    assert_same_history(fit(plain), fit(parallel))


@both_meshes
def test_tensorflow_checkpoint_round_trip(axes, tmp_path):
    plain, parallel = trained(axes)
    before = parallel.get_weights()
    state = [v.numpy() for v in parallel.optimizer.variables]
    checkpoint = tf.train.Checkpoint(model=parallel, optimizer=parallel.optimizer)
    path = checkpoint.save(str(tmp_path / "ckpt"))
    fit(parallel, 2)
    checkpoint.restore(path).assert_consumed()
    assert_close(before, parallel.get_weights())
    assert_close(state, [v.numpy() for v in parallel.optimizer.variables])
    for variable in parallel.weights:
        assert_every_copy(variable, variable.numpy())
    assert_same_history(fit(plain), fit(parallel))


@both_meshes
def test_tensorflow_checkpoint_crosses_over(axes, tmp_path):
    """A plain model's checkpoint restores into a parallel one, and the other way round."""
    plain, parallel = trained(axes)
    first = tf.train.Checkpoint(model=plain).save(str(tmp_path / "plain"))
    second = tf.train.Checkpoint(model=parallel).save(str(tmp_path / "parallel"))
    fit(plain)
    fit(parallel)
    tf.train.Checkpoint(model=parallel).restore(first).expect_partial()
    tf.train.Checkpoint(model=plain).restore(second).expect_partial()
    assert_close(plain.get_weights(), parallel.get_weights())


class Scale(keras.layers.Layer):
    """A custom layer, for saving by registered name."""

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

    def call(self, inputs: Any) -> Any:
        return inputs * self.factor


@both_meshes
def test_custom_objects(axes, tmp_path):
    def build() -> keras.Model:
        model = mlp()
        return keras.Model(model.inputs, Scale(name="scale")(model.outputs[0]))

    plain, parallel = pair(axes, build)
    for model in (plain, parallel):
        model.compile(adam(), "mse")
        fit(model)
    parallel.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects={"Scale": Scale})
    assert_same_weights(plain, loaded)


@both_meshes
@pytest.mark.parametrize("name", ["SGD", "Lamb", "Adafactor", "Nadam", "Ftrl"])
def test_optimizers_saved_and_loaded(axes, name, tmp_path):
    """State of every shape: none, per element, factored, scalar, whole-tensor."""
    plain, parallel = pair(axes)
    for model in (plain, parallel):
        model.compile(getattr(keras.optimizers, name)(0.01), "mse")
        fit(model)
    parallel.save(tmp_path / "model.keras")
    again = kdist.parallelize(keras.models.load_model(tmp_path / "model.keras"), config(axes))
    assert_same_history(fit(plain), fit(again))
    assert_same_weights(plain, again)


@both_meshes
def test_jit_setting_is_saved_as_the_user_gave_it(axes, tmp_path):
    _, parallel = pair(axes)
    parallel.compile(adam(), "mse", jit_compile="auto")
    assert parallel.get_compile_config()["jit_compile"] == "auto"
