"""Runs of models with a `train_step` of their own go on, with all of their optimizers."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import kdist
from kdist.checkpoint import beside
from kdist.checkpoint.manifest import Manifest

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..cluster.stopping import StopAfter, Stopped
from ..equivalence.own_steps import ZOO, Adversaries, network, two_optimizers

pytestmark = pytest.mark.usefixtures("float64")

MESHES: dict[str, tuple[dict[str, int], int]] = {
    "data 3": ({"data": 3}, 0),
    "data 2 x model 2": ({"data": 2, "model": 2}, 0),
    "data 4, level 3": ({"data": 4}, 3),
}


def placed(model: keras.Model, mesh: str) -> keras.Model:
    """Over a mesh; "" for none."""
    if mesh:
        axes, level = MESHES[mesh]
        optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0 if level else 64)
        kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes), optimizer=optimizer))
    return model


def adversaries(mesh: str = "") -> keras.Model:
    keras.utils.set_random_seed(0)
    model = placed(Adversaries(), mesh)
    model.compile(**two_optimizers())
    return model


def train(model: keras.Model, epochs: int, *callbacks: Any) -> dict[str, Any]:
    data = ZOO["adversaries"].data()
    return model.fit(
        *data, batch_size=10, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks)
    ).history


def state(model: keras.Model) -> list[np.ndarray]:
    every = [*model.variables, *model.d_optimizer.variables, *model.g_optimizer.variables]
    return [keras.ops.convert_to_numpy(v) for v in every]


def check(found: keras.Model, expected: keras.Model) -> None:
    for one, other in zip(state(found), state(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("first", "second"),
    [("data 3", "data 2 x model 2"), ("data 4, level 3", ""), ("", "data 4, level 3")],
)
def test_optimizers_beside_the_compiled_one_go_on(first: str, second: str, tmp_path: Path) -> None:
    expected = adversaries()
    train(expected, 4)
    model = adversaries(first)
    train(model, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(optimizer|anew).*")
        folder = kdist.checkpoint.save(model, tmp_path)
        assert folder.name == "step-00000006"
        again = adversaries(second)
        kdist.checkpoint.restore(again, tmp_path)
    check(again, model)
    train(again, 2)
    check(again, expected)


@pytest.mark.parametrize("stop", [2, 4])
def test_fit_goes_on_within_an_epoch(stop: int, tmp_path: Path) -> None:
    expected = adversaries()
    logs = train(expected, 2)

    def saver() -> kdist.callbacks.ShardedCheckpoint:
        return kdist.callbacks.ShardedCheckpoint(tmp_path, every_steps=1, resume=True)

    with contextlib.suppress(Stopped):
        train(adversaries("data 3"), 2, saver(), StopAfter(stop))
    again = adversaries("data 2 x model 2")
    found = train(again, 2, saver())
    for key, values in logs.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-9)
    check(again, expected)


def test_optimizers_in_a_list_go_on(tmp_path: Path) -> None:
    def several(mesh: str) -> keras.Model:
        model = adversaries(mesh)
        model.several = [model.d_optimizer, model.g_optimizer]
        del model.d_optimizer, model.g_optimizer
        kind = type(model)  # the step finds them by their names
        names = {
            f"{n}_optimizer": property(lambda m, i=i: m.several[i]) for i, n in enumerate("dg")
        }
        model.__class__ = type(kind.__name__, (kind,), names)
        return model

    expected = several("")
    train(expected, 2)
    model = several("data 3")
    train(model, 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(optimizer|anew).*")
        kdist.checkpoint.save(model, tmp_path)
        again = several("data 2 x model 2")
        kdist.checkpoint.restore(again, tmp_path)
    train(again, 1)
    check(again, expected)


def test_a_model_with_another_attribute_is_told(tmp_path: Path) -> None:
    model = adversaries("data 3")
    train(model, 1)
    kdist.checkpoint.save(model, tmp_path)
    other = adversaries("data 3")
    other.h_optimizer, other.g_optimizer = other.g_optimizer, None
    with pytest.warns(UserWarning, match="optimizer 'g_optimizer'.*is left out"):
        kdist.checkpoint.restore(other, tmp_path)


def test_a_checkpoint_without_them_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adversaries("data 3")
    train(model, 1)
    from_json = Manifest.from_json

    def old(text: str) -> Manifest:
        found = from_json(text)
        groups = {n: one for n, one in found.groups.items() if not n.startswith(beside.GROUP)}
        return Manifest(found.step, groups, found.progress, found.files, found.made_by)

    kdist.checkpoint.save(model, tmp_path)
    monkeypatch.setattr(Manifest, "from_json", old)
    with pytest.warns(UserWarning, match="without an optimizer: 'd_optimizer' begins anew"):
        kdist.checkpoint.restore(model, tmp_path)


def test_an_optimizer_that_no_model_has_is_told(tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    model = placed(network(6, 3, "alone"), "data 3")
    optimizer = keras.optimizers.Adam(0.01)

    @kdist.function(model)
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    step(np.ones((6, 6)))
    with pytest.warns(UserWarning, match="Make this one an attribute.*Adam 'adam.*'alone'"):
        kdist.checkpoint.save(model, tmp_path)
    model.second = optimizer
    assert kdist.checkpoint.save(model, tmp_path).name == "step-00000001"
    again = placed(network(6, 3, "alone"), "data 2 x model 2")
    again.second = keras.optimizers.Adam(0.01)
    kdist.checkpoint.restore(again, tmp_path)
    assert int(again.second.iterations) == 1
    for one, other in zip(again.second.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_of_a_model_without_a_configuration_files_of_weights_are_made(tmp_path: Path) -> None:
    class Unknown(Adversaries):
        def get_config(self) -> dict[str, Any]:
            raise NotImplementedError("none")

    keras.utils.set_random_seed(0)
    model = placed(Unknown(), "data 3")
    model.compile(**two_optimizers())
    train(model, 1)
    kdist.checkpoint.save(model, tmp_path / "saved")
    with pytest.raises(kdist.checkpoint.CheckpointError, match=r"\.weights\.h5.*no config: none"):
        kdist.checkpoint.consolidate(tmp_path / "saved", tmp_path / "all.keras")
    kdist.checkpoint.consolidate(tmp_path / "saved", tmp_path / "all.weights.h5")
    plain = adversaries()
    plain.built = True
    plain.load_weights(tmp_path / "all.weights.h5")
    for one, other in zip(plain.trainable_variables, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


class Chained(keras.Model):
    """Calls its layers one after the other: stages of it are lists, cut by its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = [keras.layers.Dense(6, name=name) for name in ("up", "down")]
        self.second = keras.optimizers.Adam(0.01)

    def call(self, x: Any) -> Any:
        for layer in self.chain:
            x = layer(x)
        return x


def test_a_model_that_its_first_batch_cuts_is_not_placed_before(tmp_path: Path) -> None:
    x = np.ones((8, 6))
    plain, staged = Chained(), Chained()
    for one in (plain, staged):
        one(x)
    plain.second.build(plain.trainable_variables)
    plain.second.apply([tf.ones(v.shape, v.dtype) for v in plain.trainable_variables])
    kdist.checkpoint.save(plain, tmp_path)
    stages = [[layer] for layer in staged.chain]
    pipeline = kdist.PipelineConfig(micro_batches=2, stages=stages)
    config = kdist.ParallelConfig(mesh=kdist.mesh(pipe=2, data=2), pipeline=pipeline)
    kdist.parallelize(staged, config)
    staged.compile("sgd", "mse")
    kdist.checkpoint.restore(staged, tmp_path)
    assert int(staged.second.iterations) == 1
    for one, other in zip(staged.second.variables, plain.second.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    staged.fit(x, x, batch_size=8, verbose=0)


class Tempered(Adversaries):
    """Has an optimizer for a variable that it does not know as its own."""

    def compile(self, **options: Any) -> None:
        super().compile(**options)
        self.t_optimizer = keras.optimizers.Adam(0.1)

    def train_step(self, real: Any) -> dict[str, Any]:
        (heat,) = HEAT
        with tf.GradientTape() as tape:
            far = (heat - 2.0) ** 2
        self.t_optimizer.apply([tape.gradient(far, heat.value)], [heat])
        return super().train_step(real)


HEAT: list[keras.Variable] = []


@pytest.mark.parametrize("mesh", ["", "data 4, level 3"])
def test_an_optimizer_of_what_no_model_has_is_told(mesh: str, tmp_path: Path) -> None:
    HEAT[:] = [keras.Variable(1.0, name="heat")]
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        models.append(placed(Tempered(), mesh))
        models[-1].compile(**two_optimizers())
    train(models[0], 1)
    with pytest.warns(UserWarning, match=r"of the model's own weights.*t_optimizer = Adam.*heat"):
        kdist.checkpoint.save(models[0], tmp_path)
    kdist.checkpoint.restore(models[1], tmp_path)
    check(*models)
