"""Tables that layouts cut by rows: rows are looked up where they are, and added up."""

from __future__ import annotations

from typing import Any

import kdist

import keras
import numpy as np
import pytest
import tensorflow as tf

ENTRIES, WIDTH, LENGTH = 256, 16, 6
CUT = {
    "tokens/embeddings": ("model", None),
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", None),
}
BY_ROWS_OF_TWO = {**CUT, "tokens/embeddings": ("expert", "model")}
MERGED = {
    "tokens/embeddings": (("model", "expert"), None),
    "up/kernel": (None, ("model", "expert")),
    "up/bias": (("model", "expert"),),
    "down/kernel": (("model", "expert"), None),
}
HYBRID = {"data": 2, "model": 2}
STEP = [(8, LENGTH)] * 3


def shifted(ids: Any) -> Any:
    return (ids + 1) % ENTRIES


def build(kind: str = "once", length: int | None = LENGTH, entries: int = ENTRIES) -> keras.Model:
    """A table, two products that are cut, and a mean; "twice" looks up twice in one table."""
    keras.utils.set_random_seed(0)
    ids = keras.Input((length,), dtype="int32")
    table = keras.layers.Embedding(entries, WIDTH, name="tokens", mask_zero=kind == "masked")
    if kind == "cut ids":
        kdist.shard(table, in_strategy=((None, "model"),))
    x = table(ids)
    if kind == "twice":
        x = keras.layers.add([x, table(keras.layers.Lambda(shifted)(ids))])
    x = keras.layers.Dense(32, name="up")(x)
    x = keras.layers.Dense(8, name="down")(x)
    if kind == "both ways":  # as a language model with one table for both ends
        x = keras.layers.Dense(WIDTH, name="back")(x)
        x = keras.layers.Lambda(
            lambda h: keras.ops.matmul(h, keras.ops.transpose(table.embeddings))
        )(x)
    return keras.Model(ids, keras.layers.GlobalAveragePooling1D()(x))


def batches(shapes: Any, width: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [(rng.integers(0, ENTRIES, s), rng.normal(size=(s[0], width))) for s in shapes]


def trained(model: keras.Model, shapes: Any, **options: Any) -> tuple[list[float], list[Any]]:
    model.compile(keras.optimizers.Adam(0.01), "mse", **options)
    data = batches(shapes, model.output_shape[-1])
    losses = [float(model.train_on_batch(*batch)) for batch in data]
    return losses, [model.predict(data[0][0], verbose=0), *model.get_weights()]


def parallel(model: keras.Model, axes: Any, layouts: Any = CUT, **options: Any) -> keras.Model:
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=layouts, **options)
    return kdist.parallelize(model, config)


LEVEL_3 = {"optimizer": kdist.OptimizerConfig(level=3, threshold_kb=0)}
REPEATED = {"recompute": kdist.RecomputeConfig(layers=["tokens", "up", "down"])}
STAGES = {"pipeline": kdist.PipelineConfig(micro_batches=2)}
ROWS: dict[str, tuple[Any, ...]] = {
    # kind, axes, layouts, options, options of compile, shapes, all-gathers of the forward pass
    "replicas": ("once", HYBRID, CUT, {}, {}, STEP, 0),
    "one slice": ("once", {"model": 4}, CUT, {}, {}, STEP, 0),
    "masks": ("masked", HYBRID, CUT, {}, {}, STEP, 0),
    "twice": ("twice", HYBRID, CUT, {}, {}, STEP, 0),
    "rows and columns": ("once", {"model": 2, "expert": 2}, BY_ROWS_OF_TWO, {}, {}, STEP, 1),
    "two axes together": ("once", {"model": 2, "expert": 2}, MERGED, {}, {}, STEP, 0),
    "level 3": ("once", HYBRID, CUT, LEVEL_3, {}, STEP, 0),
    "recompute": ("once", HYBRID, CUT, REPEATED, {}, STEP, 0),
    "xla": ("once", HYBRID, CUT, {}, {"jit_compile": True}, STEP, 0),
    "stages": ("once", {"pipe": 2, **HYBRID}, CUT, STAGES, {}, STEP, 0),
    "many sizes": ("once", HYBRID, CUT, {}, {}, [(8, 6), (8, 5), (8, 7), (6, 4), (6, 3)], 0),
    "over data too": (
        "once",
        HYBRID,
        {**CUT, "tokens/embeddings": ("model", "data")},
        {},
        {},
        STEP,
        0,
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_it_equals_one_device_and_gathers_no_table(row: str, float64: None) -> None:
    kind, axes, layouts, options, compiled, shapes, gathers = ROWS[row]
    length = None if row == "many sizes" else LENGTH
    model = parallel(build(kind, length), axes, layouts, **options)
    found, wanted = trained(model, shapes, **compiled), trained(build(kind, length), shapes)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-9)
    for one, other in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    inspection = kdist.inspect(model)
    forward = [one for one in inspection.collectives if one.phase == "forward"]
    assert sum(one.kind == "all-gather" for one in forward) == gathers
    assert max(one.bytes for one in forward) < ENTRIES * WIDTH * 8  # float64: the table


def test_what_is_told_is_what_a_slice_looks_up(float64: None) -> None:
    """One slice has 4 rows of 6 ids, each of 16 features in float64."""
    model = parallel(build(), HYBRID)
    trained(model, STEP)
    first = kdist.inspect(model).collectives[0]
    told = first.kind, first.shape, first.bytes
    assert told == ("all-reduce", (4, LENGTH, WIDTH), 4 * LENGTH * WIDTH * 8)


@pytest.mark.parametrize(("kind", "gathers"), [("both ways", False), ("few entries", True)])
def test_a_table_is_gathered_where_that_sends_less(kind: str, gathers: bool, float64: None) -> None:
    """48 ids are more than half of 64; a table that makes the logits too has parts of these."""
    entries = 64 if gathers else ENTRIES
    models = [build(kind, entries=entries) for _ in range(2)]
    parallel(models[0], {"model": 2})
    for model in models:
        model.compile("sgd", "mse")
        for x, y in batches(STEP, model.output_shape[-1]):
            model.train_on_batch(x % entries, y)
    for one, other in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    shapes = [one.shape for one in kdist.inspect(models[0]).collectives if one.kind == "all-gather"]
    assert ((entries, WIDTH) in shapes) is gathers


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_rows_are_those_of_the_table_bit_by_bit(policy: str) -> None:
    """All but one of the summands are zero."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        table = keras.layers.Embedding(ENTRIES, WIDTH, name="tokens")
        model = keras.Sequential([keras.Input((LENGTH,), dtype="int32"), table])
        ids = np.random.default_rng(0).integers(0, ENTRIES, (8, LENGTH))
        wanted = model.predict(ids, verbose=0)
        parallel(model, HYBRID, {".*tokens/embeddings": ("model", None)})
        model.compile("sgd", "mse")
        np.testing.assert_array_equal(model.predict(ids, verbose=0), wanted)
        assert kdist.inspect(model).count("all-gather") == 0
    finally:
        keras.config.set_dtype_policy(before)


def test_an_id_that_the_table_has_not_is_an_error() -> None:
    model = parallel(build(), HYBRID)
    model.compile("sgd", "mse")
    ids, y = np.zeros((8, LENGTH), "int32"), np.zeros((8, 8))
    model.train_on_batch(ids, y)
    ids[3, 2] = ENTRIES + 44
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"indices\[3,2\] = 300 is not in"):
        model.train_on_batch(ids, y)


def test_devices_that_look_up_other_ids_gather_the_table(float64: None) -> None:
    """Rows of different ids are not to be added up; over another axis than theirs they are."""
    axes = {"model": 2, "expert": 2}
    gathered = []
    for layouts in (CUT, {**CUT, "tokens/embeddings": ("expert", None)}):
        model = parallel(build("cut ids"), axes, layouts)
        found, wanted = trained(model, STEP), trained(build(), STEP)
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-9)
        for one, other in zip(found[1], wanted[1], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
        forward = [one for one in kdist.inspect(model).collectives if one.phase == "forward"]
        gathered.append((ENTRIES, WIDTH) in [one.shape for one in forward])
    assert gathered == [True, False]


@pytest.mark.parametrize("dims", [("data", "model", None), ("data", None, "model")])
def test_rows_that_are_cut_at_once_are_scattered(dims: Any, float64: None) -> None:
    model = parallel(build(), HYBRID, {**CUT, "tokens/output": dims})
    found, wanted = trained(model, STEP), trained(build(), STEP)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-9)
    for one, other in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    first = kdist.inspect(model).collectives[0]
    told = first.kind, first.shape, first.bytes
    assert told == ("reduce-scatter", (4, LENGTH, WIDTH), 4 * LENGTH * WIDTH * 8)
