"""Level 3 stores weights that do not train cut, too, and gathers them where they are used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest
from keras import layers, ops

from .case import CLASSES, Case, Data, labels, weights
from .features import Feature
from .harness import compare, precision
from .matrix import level_config, product, spread
from .optimizer_zoo import OPTIMIZERS
from .own_steps import Taped
from .whole_losses import BY_NAME as WHOLE

LENGTH, WIDTH, WORDS = 4, 8, 12


class Tail(layers.Layer):
    """A layer of its author's own, with a weight that no dim of divides by two."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(3, 1), initializer="random_normal", name="scale")

    def call(self, x: Any) -> Any:
        return x * (1.0 + ops.sum(self.scale))


def _tuned() -> keras.Model:
    """Of a backbone what is small trains, and a new head, as fine-tuning does."""
    inputs = keras.Input((LENGTH,), dtype="int32", name="ids")
    x = layers.Embedding(WORDS, WIDTH, name="words")(inputs)
    for i in range(2):
        h = layers.MultiHeadAttention(4, 2, name=f"attention_{i}")(x, x)
        x = layers.LayerNormalization(name=f"norm_{i}")(layers.Add(name=f"sum_{i}")([x, h]))
        h = layers.Dense(16, activation="tanh", name=f"up_{i}")(x)
        x = layers.Add(name=f"added_{i}")([x, layers.Dense(WIDTH, name=f"down_{i}")(h)])
    x = layers.BatchNormalization(name="statistics")(Tail(name="tail")(x))
    x = layers.GlobalAveragePooling1D(name="means")(x)
    model = keras.Model(inputs, layers.Dense(CLASSES, name="head")(x), name="tuned")
    for variable in model.trainable_variables:
        # Biases and norms train, and the head, and one product in the middle.
        vector = len(variable.shape) < 2 or "query/bias" in variable.path
        variable.trainable = vector or variable.path in ("head/kernel", "up_1/kernel")
    for name in ("words", "tail", "statistics"):
        model.get_layer(name).trainable = False
    return model


def _of_dtype(add: Callable, wanted: str, **options: Any) -> Any:
    return add(**{**options, "dtype": wanted})


def _adapted() -> keras.Model:
    """The same with LoRA on most of its products, whose factors Keras makes in float32."""
    model = _tuned()
    found = model._flatten_layers(include_self=False)
    for layer in [one for one in found if isinstance(one, layers.Dense | layers.EinsumDense)]:
        if layer.name not in ("head", "key"):
            add, dtype = layer.add_weight, layer.variable_dtype
            wide = functools.partial(_of_dtype, add, dtype)
            object.__setattr__(layer, "add_weight", wide)
            layer.enable_lora(2)
            object.__delattr__(layer, "add_weight")
    return model


def _own_step() -> keras.Model:
    """The same with a step of the author's own."""
    model = _tuned()
    return Taped(model.inputs, model.outputs, name="tuned")


def _data(seed: int, samples: int) -> Data:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, WORDS, (samples, LENGTH)).astype("int32")
    return x, labels(rng, samples), weights(rng, samples)


LAYOUTS = {
    r".*attention_.*/(query|key|value)/kernel": (None, "model", None),
    r".*attention_.*/attention_output/kernel": ("model", None, None),
    r".*up_./kernel": (None, "model"),
    r".*down_./kernel": ("model", None),
    "words/embeddings": (None, "model"),
}
CASES = {
    build.__name__: Case(name=build.__name__, build=build, data=_data, layout_map=LAYOUTS)
    for build in (_tuned, _adapted, _own_step)
}
STAGES = {"pipeline": kdist.PipelineConfig(micro_batches=2)}
IN_TURN = {"pipeline": kdist.PipelineConfig(micro_batches=2, schedule="interleaved", chunks=2)}
HALVES = {"pipeline": kdist.PipelineConfig(micro_batches=2, schedule="zero_bubble")}
AGAIN = {"recompute": kdist.RecomputeConfig(layers=["attention_.*", "up_.*"])}
CUT = level_config("level3")
KEPT = {"optimizer": kdist.OptimizerConfig(level=3, threshold_kb=0, keep_gathered=True)}
BY_OWNER = {"optimizer": kdist.OptimizerConfig(level=3, threshold_kb=0, partition="parameter")}
BY_INDEX = kdist.FusionConfig(mode="index", index=(2, 5))
ROWS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "data4": ({"data": 4}, CUT),
    "data3 by owner": ({"data": 3}, BY_OWNER),
    "data4 kept": ({"data": 4}, KEPT),
    "data4 again": ({"data": 4}, {**CUT, **AGAIN}),
    "data2 model2": ({"data": 2, "model": 2}, CUT),
    "data2 model2 again": ({"data": 2, "model": 2}, {**CUT, **AGAIN}),
    "sequence": ({"data": 2, "model": 2}, {**CUT, "sequence_parallel": True}),
    "whole batch": ({"data": 2, "model": 2}, {**CUT, "batch_semantics": "global"}),
    "no overlap": ({"data": 4}, {**CUT, "fusion": kdist.FusionConfig(overlap=False)}),
    "one bucket an id": (
        {"data": 4},
        {**CUT, "fusion": kdist.FusionConfig(mode="index", index=(2, 5))},
    ),
    "pipe2 data2": ({"pipe": 2, "data": 2}, {**STAGES, **CUT}),
    "pipe2 data2 in turn": ({"pipe": 2, "data": 2}, {**IN_TURN, **CUT}),
    "pipe2 data2 model2 in halves": ({"pipe": 2, "data": 2, "model": 2}, {**HALVES, **CUT}),
    "pipe2 data2 model2": ({"pipe": 2, "data": 2, "model": 2}, {**STAGES, **CUT, **AGAIN}),
}
QUICK = [("_tuned", "data4")]
WIDE = [
    ("_adapted", "data2 model2"),
    ("_tuned", "data3 by owner"),
    ("_tuned", "data2 model2"),
    ("_tuned", "whole batch"),
    ("_tuned", "pipe2 data2"),
    ("_tuned", "pipe2 data2 model2 in halves"),
    ("_adapted", "pipe2 data2 in turn"),
    ("_adapted", "data4"),
    ("_adapted", "data2 model2 again"),
    ("_adapted", "sequence"),
    ("_adapted", "pipe2 data2 model2"),
    ("_own_step", "data4"),
    ("_own_step", "data2 model2"),
]


# A step of one's own has no stages, and computes nothing again.
FITS = [row for row in product(CASES, ROWS) if row[0] != "_own_step" or row in WIDE]


@pytest.mark.parametrize(("name", "row"), spread(FITS, [*QUICK, *WIDE], quick=1))
def test_frozen_weights_equal_one_device(name: str, row: str, engine: str) -> None:
    axes, options = ROWS[row]
    optimizer = OPTIMIZERS["adam"]
    compare(CASES[name], axes, optimizer=optimizer, engine=engine, config=options, samples=13)


def _freeze(model: keras.Model) -> None:
    for variable in model.trainable_variables[:2]:
        variable.trainable = False


LOSSES = [("dice", "data4"), ("centres", "data2 model2")]


@pytest.mark.parametrize(
    ("loss", "row"), spread(product(("dice", "centres"), ("data4", "data2 model2")), LOSSES, 0)
)
def test_a_loss_over_the_whole_batch_too(loss: str, row: str, engine: str) -> None:
    axes, options = ROWS[row]
    frozen = Feature(name="frozen", edit=_freeze)
    optimizer = OPTIMIZERS["adam"]
    compare(
        WHOLE[loss], axes, optimizer=optimizer, engine=engine, config=options, features=[frozen]
    )


@pytest.mark.wide
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("row", ["data4", "data2 model2"])
def test_in_sixteen_bits(row: str, dtype: str, engine: str) -> None:
    """With LoRA, whose factors and whose kernels are cast apart."""
    axes, options = ROWS[row]
    name = "loss_scale_sgd" if dtype == "mixed_float16" else "sgd_momentum"
    compare(
        CASES["_adapted"],
        axes,
        optimizer=OPTIMIZERS[name],
        engine=engine,
        config=options,
        dtype=dtype,
    )


def test_they_are_gathered_op_by_op(engine: str) -> None:
    """`run_eagerly`, where no chunks are."""
    compare(
        CASES["_tuned"],
        {"data": 2},
        optimizer=OPTIMIZERS["sgd_momentum"],
        engine=engine,
        config=CUT,
        compile={"run_eagerly": True},
    )


class Masked(keras.Model):
    """A model with a `call` of its own, masks in it, and most weights frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.words = layers.Embedding(WORDS, WIDTH, mask_zero=True)
        self.attention = layers.MultiHeadAttention(4, 2)
        self.up, self.down = layers.Dense(16, "tanh"), layers.Dense(WIDTH)
        self.cell, self.head = layers.LSTM(8), layers.Dense(CLASSES)

    def call(self, ids: Any) -> Any:
        mask = self.words.compute_mask(ids)
        x = self.words(ids)
        x = x + self.attention(x, x, attention_mask=mask[:, None, :])
        x = x + self.down(self.up(x))
        return self.head(self.cell(x, mask=mask))


def _losses(axes: dict[str, int]) -> list[float]:
    keras.utils.set_random_seed(0)
    model = Masked()
    x, y, weight = _data(0, 13)
    model(x)
    for layer in (model.words, model.up, model.down, model.attention.query_dense):
        layer.trainable = False
    if axes:
        layouts = {".*(query|key|value)/kernel": (None, "model", None)} if "model" in axes else None
        config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=layouts, **CUT)
        kdist.parallelize(model, config)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    found = model.fit(x, y, 5, 2, 0, shuffle=False, sample_weight=weight).history["loss"]
    if axes:
        assert len(model.plan().frozen) == 7  # a table, and three kernels with their biases
    return list(found)


@pytest.mark.wide
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "model": 2}], ids=str)
def test_masks_of_a_subclassed_model_too(axes: dict[str, int]) -> None:
    with precision("float64"):
        np.testing.assert_allclose(_losses(axes), _losses({}), rtol=1e-9)
