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

from ..parity import (
    MESHES,
    NAMES,
    assert_close,
    assert_every_copy,
    assert_same_history,
    assert_same_weights,
    both_meshes,
    config,
    data,
    everywhere,
    in_float64,
    mlp,
    pair,
)

pytestmark = pytest.mark.usefixtures("float64")
PARALLEL = NAMES[1:]
Models = tuple[keras.Model, ...]


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01, name="adam")


def fit(model: keras.Model, epochs: int = 1) -> Any:
    return model.fit(*data(), batch_size=8, shuffle=False, epochs=epochs, verbose=0)


def trained() -> Models:
    models = everywhere()
    for model in models:
        model.compile(adam(), "mse", metrics=["mae"])
        fit(model)
    return models


@pytest.fixture(scope="module")
def finished() -> Models:
    """Trained models for tests that only read them."""
    with in_float64():
        return trained()


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
given = np.load("data.npz")
for name in ("data", "inner"):
    model = keras.models.load_model(name + ".keras")
    state = [v.numpy() for v in model.optimizer.variables]
    np.savez(name + "-loaded.npz", *model.get_weights(), *state)
    history = model.fit(given["x"], given["y"], batch_size=8, shuffle=False, verbose=0).history
    np.savez(name + "-trained.npz", history["loss"], *model.get_weights())
"""


def arrays(path: Path) -> list[np.ndarray]:
    with np.load(path) as file:
        return [file[f"arr_{i}"] for i in range(len(file.files))]


def test_saved_model_loads_and_trains_without_kdist(tmp_path):
    plain, *parallel = trained()
    for name, model in zip(PARALLEL, parallel):
        model.save(tmp_path / f"{name}.keras")
    x, y = data()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    run_plain(LOAD, tmp_path)
    state = [v.numpy() for v in plain.optimizer.variables]
    loaded = [arrays(tmp_path / f"{name}-loaded.npz") for name in PARALLEL]
    assert_close([*plain.get_weights(), *state], *loaded)
    history = fit(plain)
    expected = [np.array(history.history["loss"]), *plain.get_weights()]
    assert_close(expected, *[arrays(tmp_path / f"{name}-trained.npz") for name in PARALLEL])


def test_save_load_parallelize_fit_goes_on(tmp_path):
    """Optimizer state survives, onto another mesh too."""
    plain, *parallel = trained()
    again = []
    for name, model in zip(PARALLEL, parallel):
        model.save(tmp_path / f"{name}.keras")
        for axes in MESHES:
            loaded = keras.models.load_model(tmp_path / f"{name}.keras")
            again.append(kdist.parallelize(loaded, config(axes)))
    assert_same_history(fit(plain, 2), *[fit(model, 2) for model in again])
    assert_same_weights(plain, *again)


def test_saved_files_hold_the_same(finished, tmp_path):
    """Archive by archive: configuration and weights are those that plain Keras saves."""
    loaded = []
    for name, model in zip(NAMES, finished):
        model.save(tmp_path / f"{name}.keras")
        loaded.append(keras.models.load_model(tmp_path / f"{name}.keras"))
    for other in loaded[1:]:
        assert loaded[0].get_config() == other.get_config()
        assert loaded[0].get_compile_config() == other.get_compile_config()
    assert_same_weights(*loaded)


def test_save_before_training(tmp_path):
    plain, *parallel = everywhere()
    for model in parallel:
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert_close(plain.get_weights(), loaded.get_weights())


@both_meshes
def test_weights_file_into_a_parallel_model(axes, finished, tmp_path):
    plain = finished[0]
    plain.save_weights(tmp_path / "w.weights.h5")
    target = kdist.parallelize(mlp(seed=7), config(axes))
    target.load_weights(tmp_path / "w.weights.h5")
    for a, b in zip(plain.weights, target.weights):
        assert_every_copy(b, a.numpy())
    x, _ = data(8)
    assert_close(plain.predict(x, verbose=0), target.predict(x, verbose=0))


@both_meshes
def test_weights_file_before_parallelize(axes, finished, tmp_path):
    plain = finished[0]
    plain.save_weights(tmp_path / "w.weights.h5")
    target = mlp(seed=7)
    target.load_weights(tmp_path / "w.weights.h5")
    kdist.parallelize(target, config(axes))
    for a, b in zip(plain.weights, target.weights):
        assert_every_copy(b, a.numpy())


def test_weights_file_of_a_parallel_model(finished, tmp_path):
    plain, *parallel = finished
    for model in parallel:
        model.save_weights(tmp_path / "w.weights.h5")
        target = mlp(seed=7)
        target.load_weights(tmp_path / "w.weights.h5")
        assert_close(plain.get_weights(), target.get_weights())


def test_weights_loaded_in_the_middle_of_training(tmp_path):
    models = trained()
    models[0].save_weights(tmp_path / "w.weights.h5")
    for model in models:
        fit(model)
        model.load_weights(tmp_path / "w.weights.h5")
    assert_same_history(*[fit(model) for model in models])
    assert_same_weights(*models)


def test_weights_and_optimizer_file(tmp_path):
    """`save_weights` holds the optimizer of a compiled model too."""
    plain, *parallel = trained()
    targets = []
    for axes, model in zip(MESHES, parallel):
        model.save_weights(tmp_path / "w.weights.h5")
        target = kdist.parallelize(mlp(seed=7), config(axes))
        target.compile(adam(), "mse", metrics=["mae"])
        target.optimizer.build(target.trainable_variables)
        target.load_weights(tmp_path / "w.weights.h5")
        targets.append(target)
    assert_same_history(fit(plain), *[fit(target) for target in targets])
    assert_same_weights(plain, *targets)


SERVE = """
import numpy as np, tensorflow as tf
given = np.load("data.npz")
for name in ("data", "inner"):
    served = tf.saved_model.load(name)
    np.savez(name + "-served.npz", served.serve(tf.constant(given["x"])).numpy())
"""


def test_export_is_served_by_plain_tensorflow(tmp_path):
    models = trained()
    for name, model in zip(PARALLEL, models[1:]):
        model.export(tmp_path / name, verbose=False)
    x, y = data(8)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    run_plain(SERVE, tmp_path)
    served = [arrays(tmp_path / f"{name}-served.npz") for name in PARALLEL]
    assert_close([models[0].predict(x, verbose=0)], *served)
    assert_same_history(*[fit(model) for model in models])
    assert_same_weights(*models)


def test_export_before_training(tmp_path):
    models = everywhere()
    x, _ = data(8)
    for name, model in zip(PARALLEL, models[1:]):
        model.export(tmp_path / name, verbose=False)
        served = tf.saved_model.load(str(tmp_path / name))
        assert_close(models[0](x), served.serve(tf.constant(x)))
    for model in models:
        model.compile(adam(), "mse")
    assert_same_history(*[fit(model) for model in models])


def test_what_saves_traced_variables_says_what_to_use(tmp_path):
    """`tf.saved_model.save`, and an archive of the user's own; the model goes on after it."""
    models = trained()
    for model in models[1:]:
        archive = keras.export.ExportArchive()
        archive.track(model)
        archive.add_endpoint(
            "serve", model.__call__, [tf.TensorSpec((None, *model.input_shape[1:]))]
        )
        for write in (
            lambda path, model=model: tf.saved_model.save(model, path),
            archive.write_out,
        ):
            with pytest.raises(ValueError, match=r"model\.export\(path\).*Received: weight '"):
                write(str(tmp_path / "refused"))
    assert_same_history(*[fit(model) for model in models])


def test_tensorflow_checkpoint_round_trip(tmp_path):
    plain, *parallel = trained()
    for name, model in zip(PARALLEL, parallel):
        before = model.get_weights()
        state = [v.numpy() for v in model.optimizer.variables]
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        path = checkpoint.save(str(tmp_path / name / "ckpt"))
        fit(model, 2)
        checkpoint.restore(path).assert_consumed()
        assert_close(before, model.get_weights())
        assert_close(state, [v.numpy() for v in model.optimizer.variables])
        for variable in model.weights:
            assert_every_copy(variable, variable.numpy())
    assert_same_history(fit(plain), *[fit(model) for model in parallel])


def test_tensorflow_checkpoint_crosses_over(tmp_path):
    """A plain model's checkpoint restores into a parallel one, and the other way round."""
    plain, *parallel = models = trained()
    before = plain.get_weights()
    paths = [
        tf.train.Checkpoint(model=model).save(str(tmp_path / name))
        for name, model in zip(NAMES, models)
    ]
    for model in models:
        fit(model)
    for model in parallel:
        tf.train.Checkpoint(model=model).restore(paths[0]).expect_partial()
        assert_close(before, model.get_weights())
    for path in paths[1:]:
        plain.set_weights([w * 0 for w in before])
        tf.train.Checkpoint(model=plain).restore(path).expect_partial()
        assert_close(before, plain.get_weights())


class Scale(keras.layers.Layer):
    """A custom layer, for saving by registered name."""

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

    def call(self, inputs: Any) -> Any:
        return inputs * self.factor


def test_custom_objects(tmp_path):
    def build() -> keras.Model:
        model = mlp()
        return keras.Model(model.inputs, Scale(name="scale")(model.outputs[0]))

    models = everywhere(build)
    for model in models:
        model.compile(adam(), "mse")
        fit(model)
    for model in models[1:]:
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects={"Scale": Scale})
        assert_same_weights(models[0], loaded)


long = pytest.mark.long


@pytest.mark.parametrize(
    "name",
    [
        "Lamb",
        "Adafactor",
        pytest.param("SGD", marks=long),
        pytest.param("Nadam", marks=long),
        pytest.param("Ftrl", marks=long),
    ],
)
def test_optimizers_saved_and_loaded(name, tmp_path):
    """State of every shape: none, per element, factored, scalar, whole-tensor."""
    plain, *parallel = everywhere()
    for model in (plain, *parallel):
        model.compile(getattr(keras.optimizers, name)(0.01), "mse")
        fit(model)
    again = []
    for axes, model in zip(MESHES, parallel):
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        again.append(kdist.parallelize(loaded, config(axes)))
    assert_same_history(fit(plain), *[fit(model) for model in again])
    assert_same_weights(plain, *again)


@both_meshes
def test_jit_setting_is_saved_as_the_user_gave_it(axes, tmp_path):
    _, parallel = pair(axes)
    parallel.compile(adam(), "mse", jit_compile="auto")
    assert parallel.get_compile_config()["jit_compile"] == "auto"
