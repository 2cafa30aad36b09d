"""What is declared for a layer holds where Keras runs it by another method: quantized ones."""

from __future__ import annotations

from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.calls.over_mesh import OverMesh

import keras
import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.usefixtures("float64")
MODES = pytest.mark.parametrize("mode", ["float8", "int8"])
CUTS: dict[str, Any] = {"up/kernel": (None, "model"), "down/kernel": ("model", None)}
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(8, 6, 4)), RANDOM.normal(size=(8, 6, 4))


def quantized(mode: str, *names: str) -> list[keras.layers.Dense]:
    """Layers of four features, that learn what int8 leaves to learn."""
    layers = [keras.layers.Dense(4, name=name) for name in names]
    for layer in layers:
        layer.build((None, 6, 4))
        layer.quantize(mode)
        if mode == "int8":
            layer.enable_lora(2)
    return layers


def chain(mode: str) -> keras.Model:
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((6, 4))
    for layer in quantized(mode, "up", "down"):
        x = keras.ops.tanh(layer(x))
    return keras.Model(inputs, keras.layers.Dense(4, name="last")(x))


def losses(model: keras.Model, x: Any = X) -> list[float]:
    model.compile("adam", "mse")
    return model.fit(x, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]


@MODES
def test_declared_outputs(mode: str) -> None:
    cuts = CUTS | {"down/output": (None, "model", None)}
    model = chain(mode)
    kdist.parallelize(
        model, kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), layout_map=cuts)
    )
    np.testing.assert_allclose(losses(model), losses(chain(mode)), rtol=1e-9)
    kinds = {one.kind for one in kdist.inspect(model, 4).collectives if one.layer == "down"}
    assert "reduce-scatter" in kinds, kinds  # and not a sum on all devices


class Parts(keras.Model):
    """Its step calls the layers itself."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.up, self.down = quantized(mode, "up", "down")

    def call(self, x: Any) -> Any:
        return self.down(keras.ops.tanh(self.up(x)))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self.down(keras.ops.tanh(self.up(x))) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@MODES
def test_steps_of_the_users_own(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    run = OverMesh.__call__

    def noted(self: OverMesh) -> Any:
        ran.append(self.layer.name)
        return run(self)

    monkeypatch.setattr(OverMesh, "__call__", noted)

    def trained(parallel: bool) -> list[float]:
        keras.utils.set_random_seed(0)
        model = Parts(mode)
        model(X[:1])
        if parallel:
            kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
        return losses(model)

    np.testing.assert_allclose(trained(True), trained(False), rtol=1e-9)
    assert set(ran) == {"up", "down"}


def test_stages_of_listed_layers() -> None:
    """Their calls are recorded."""

    class Plain(Parts):
        train_step = keras.Model.train_step

        def call(self, x: Any) -> Any:
            return self.down(self.up(x))

    def plain() -> Plain:
        keras.utils.set_random_seed(0)
        model = Plain("float8")
        model(X[:1])
        return model

    model = plain()
    pipeline = kdist.PipelineConfig(micro_batches=2, stages=[[model.up], [model.down]])
    config = kdist.ParallelConfig(mesh=kdist.mesh(pipe=2), pipeline=pipeline)
    kdist.parallelize(model, config)
    np.testing.assert_allclose(losses(model), losses(plain()), rtol=1e-9)


@pytest.mark.parametrize("mode", ["lora", "int8", "int8+lora", "int4+lora"])
@pytest.mark.parametrize("tied", [False, True])
def test_plans_know_before_a_step_which_gradients_are_rows(mode: str, tied: bool) -> None:
    table = (
        keras.layers.ReversibleEmbedding(32, 4, name="table")
        if tied
        else keras.layers.Embedding(32, 4, name="table")
    )
    ids = keras.Input((6,), dtype="int32")
    x = keras.layers.Dense(4, name="last")(table(ids))
    model = keras.Model(ids, table(x, reverse=True) if tied else x)
    for step in mode.split("+"):
        table.enable_lora(2) if step == "lora" else table.quantize(step)
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    model.compile("adam", "mse")
    before = attached(model).look_ups()
    model.plan(batch_size=8)
    model.fit(np.zeros((8, 6), "int32"), np.zeros((8, *model.output.shape[1:])), verbose=0)
    assert set(before) == set(attached(model).look_ups())


def attention() -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(26, 8, name="table")(inputs)
    layer = keras.layers.MultiHeadAttention(2, 4, name="mixed")
    model = keras.Model(inputs, keras.layers.Dense(4, name="last")(x + layer(x, x)))
    for one in layer._flatten_layers():
        if isinstance(one, keras.layers.EinsumDense):
            one.quantize("float8")
    return model


def test_float8_values_are_gathered() -> None:
    """In inference; DTensor gathers by a sum with zeros, and those of float8 are no constants."""
    cuts: dict[str, Any] = {".*mixed/(query|key|value)/kernel": (None, "model", None)}
    cuts["table/embeddings"] = (None, "model")
    ids = RANDOM.integers(0, 26, (8, 6))
    plain, model = attention(), attention()
    kdist.parallelize(
        model, kdist.ParallelConfig(mesh=kdist.mesh(data=2, model=2), layout_map=cuts)
    )
    np.testing.assert_allclose(losses(model, ids), losses(plain, ids), rtol=1e-9)
    expected = plain.predict(ids, verbose=0)
    np.testing.assert_allclose(model.predict(ids, verbose=0), expected, rtol=1e-9)


@pytest.mark.parametrize(
    "config",
    [
        keras.quantizers.Int8QuantizationConfig(),
        keras.quantizers.Int4QuantizationConfig(block_size=2),
    ],
    ids=["int8", "int4"],
)
def test_a_reversible_embedding_in_two_stages(config: Any) -> None:
    """A quantized one that is not tied: its scales are where the table is that they are of."""

    def build() -> keras.Model:
        keras.utils.set_random_seed(0)
        table = keras.layers.ReversibleEmbedding(26, 8, tie_weights=False, name="table")
        x = keras.layers.Dense(16, name="up")(table(ids := keras.Input((6,), dtype="int32")))
        x = table(keras.layers.Dense(8, name="down")(x), reverse=True)
        model = keras.Model(ids, keras.layers.Dense(4, name="last")(x))
        table.quantize(config=config)
        return model

    ids = RANDOM.integers(0, 26, (8, 6))
    model = build()
    pipeline = kdist.PipelineConfig(micro_batches=2)
    kdist.parallelize(
        model, kdist.ParallelConfig(mesh=kdist.mesh(pipe=2, data=2), pipeline=pipeline)
    )
    np.testing.assert_allclose(losses(model, ids), losses(build(), ids), rtol=1e-9)


def heads(packed: bool) -> keras.Model:
    """A kernel of three dims, which int4 packs into rows and columns."""
    keras.utils.set_random_seed(0)
    layer = keras.layers.EinsumDense("abc,cde->abde", (6, 2, 4), bias_axes="de", name="heads")
    x = keras.layers.Flatten()(layer(inputs := keras.Input((6, 4))))
    model = keras.Model(inputs, keras.layers.Dense(4, name="last")(x))
    if packed:
        layer.quantize("int4")
    return model


def test_kernels_that_int4_packs_have_two_dims() -> None:
    mesh, y = kdist.mesh(data=2, model=2), Y[:, 0]
    cuts: dict[str, Any] = {"heads/kernel": (None, "model", None)}
    why = r"3 entries and the tensor 2 dims.*quantize before parallelize, and lay out these two"
    with pytest.raises(ValueError, match=why):
        kdist.parallelize(heads(packed=True), kdist.ParallelConfig(mesh=mesh, layout_map=cuts))
    late = kdist.parallelize(heads(False), kdist.ParallelConfig(mesh=mesh, layout_map=cuts))
    late.get_layer("heads").quantize("int4")
    with pytest.raises(ValueError, match=why):
        late.compile("adam", "mse")
    plain, model = heads(packed=True), heads(packed=True)
    rows = kdist.ParallelConfig(mesh=mesh, layout_map={"heads/kernel": (None, "model")})
    found = []
    for one in (plain, kdist.parallelize(model, rows)):
        one.compile("adam", "mse")
        found.append(one.fit(X, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history)
    np.testing.assert_allclose(found[1]["loss"], found[0]["loss"], rtol=1e-9)


MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "data2_model2": ({"data": 2, "model": 2}, {"layout_map": CUTS}),
    "data4": ({"data": 4}, {}),
    "pipe2_data2": ({"pipe": 2, "data": 2}, {"pipeline": kdist.PipelineConfig(micro_batches=2)}),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_level_3_stores_codes_cut(mesh: str) -> None:
    axes, options = MESHES[mesh]
    level = kdist.OptimizerConfig(level=3, threshold_kb=0)
    model = chain("int8")
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), optimizer=level, **options)
    kdist.parallelize(model, config)
    found = losses(model)
    np.testing.assert_allclose(found, losses(chain("int8")), rtol=1e-9)
    weights, slices = {one.path: one for one in model.plan().weights}, model.plan().topology.slices
    places = [(s, k) for s, one in enumerate(slices) for k in range(len(one.devices))]
    for name in ("up", "down"):  # every integer is kept once, by whoever
        kernel = weights[f"{name}/kernel"]
        assert kernel.gathered
        assert sum(kernel.stored_bytes(at) for at in places) == kernel.nbytes == 16
