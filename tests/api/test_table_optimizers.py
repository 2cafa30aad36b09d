"""`TableConfig(optimizer=...)`: each table is updated by its own optimizer, wherever it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.graphs import executed
from kdist.layers import DistributedEmbedding, FeatureConfig, TableConfig
from kdist.layers.lazy import LazyAdagrad, LazyAdam

import keras
import numpy as np
import pytest

from ..parity import assert_same_weights

_O = keras.optimizers
ROWS = 3000
PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": {"placement": "host"},
    "device": {"placement": "device"},
    "split": {"placement": "split", "rows": (1001, 1999)},
    "columns": {"placement": "split", "columns": (1, 3)},
}


def network(users: dict[str, Any], words: dict[str, Any], rows: int = ROWS) -> keras.Model:
    keras.utils.set_random_seed(0)
    tables = [TableConfig("users", rows, 4, **users), TableConfig("words", 40, 4, **words)]
    layer = DistributedEmbedding(
        {
            "user": FeatureConfig("user", tables[0], (None,), (None, 4)),
            "title": FeatureConfig("title", tables[1], (None, 3), (None, 4)),
        },
        name="tables",
    )
    ids = {
        "user": keras.Input((), dtype="int32", name="user"),
        "title": keras.Input((3,), dtype="int32", name="title"),
    }
    found = layer(ids)
    x = keras.layers.Concatenate()([found["user"], found["title"]])
    return keras.Model(ids, keras.layers.Dense(2, name="head")(x))


def data(steps: int = 3) -> list[tuple[dict[str, np.ndarray], np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        (
            {
                "user": rng.integers(0, 9, 8).astype("int32") * 300,
                "title": rng.integers(-1, 40, (8, 3)).astype("int32"),
            },
            rng.normal(size=(8, 2)),
        )
        for _ in range(steps)
    ]


def parallel(model: keras.Model, level: int = 0) -> keras.Model:
    options: dict[str, Any] = {}
    if level:
        options["optimizer"] = kdist.OptimizerConfig(level=level, threshold_kb=0)
    return kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2), **options))


def trained(model: keras.Model, optimizer: Any) -> keras.Model:
    model.compile(optimizer, "mse")
    for x, y in data():
        model.train_on_batch(x, y)
    return model


def several(users: Any, words: Any) -> Any:
    """What the model of a single device is compiled with."""
    rules = {".*users/embeddings": users, ".*words/embeddings": words}
    return _O.MultiOptimizer(_O.OptimizerMap(_O.Adam(0.01), rules))


@pytest.mark.parametrize("place", PLACEMENTS)
def test_trains_as_one_device(place: str, float64: None) -> None:
    plain = trained(network({}, {}), several(kdist.lazy(_O.AdamW(0.1)), _O.Adam(0.1)))
    tables = {"optimizer": _O.AdamW(0.1), **PLACEMENTS[place]}, {"optimizer": _O.Adam(0.1)}
    tables[1]["dense"] = True
    model = trained(parallel(network(*tables)), _O.Adam(0.01))
    assert_same_weights(plain, model)
    for one, other in zip(plain.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-9, atol=1e-12)
    notes = model.plan().notes
    assert "table 'tables/users' is updated by LazyAdamW" in notes
    assert "table 'tables/words' is updated by Adam" in notes


DENSE = [_O.SGD(0.1, momentum=0.9), _O.Adagrad(0.1), _O.Ftrl(0.1), _O.Adam(0.1), _O.AdamW(0.1)]


@pytest.mark.parametrize("place", ["host", "split"])
@pytest.mark.parametrize("optimizer", DENSE, ids=lambda one: one.name)
def test_dense_is_the_optimizer_of_keras(optimizer: Any, place: str, float64: None) -> None:
    def own() -> Any:
        return type(optimizer).from_config(optimizer.get_config())

    plain = trained(network({}, {}, 2701), several(own(), _O.Adam(0.1)))
    where = {**PLACEMENTS[place], **({"rows": (1001, 1700)} if place == "split" else {})}
    words = {"optimizer": _O.Adam(0.1), "dense": True}
    model = parallel(network({"optimizer": own(), "dense": True, **where}, words, 2701))
    assert_same_weights(plain, trained(model, _O.Adam(0.01)))
    assert any(one.on_host for one in model.plan().weights) == (place == "host")


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("place", PLACEMENTS)
def test_averages_of_weights(place: str, level: int, float64: None) -> None:
    """Of all rows, written into all every second step, as one device's lazy optimizer has them."""

    def own() -> Any:
        return _O.Adam(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)

    plain = trained(network({}, {}), several(kdist.lazy(own()), _O.Adam(0.1)))
    tables = {"optimizer": own(), **PLACEMENTS[place]}, {"optimizer": _O.Adam(0.1), "dense": True}
    model = trained(parallel(network(*tables), level), _O.Adam(0.01))
    assert_same_weights(plain, model)
    x, y = data(1)[0]
    for one in (plain, model):  # fit ends with averages as weights
        one.fit(x, y, batch_size=8, verbose=0)
    assert_same_weights(plain, model)
    for one, other in zip(plain.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("when", ["before", "after", "trained"])
@pytest.mark.parametrize("mode", ["lora", "int8+lora"])
def test_factors_of_lora_are_updated_by_it(mode: str, when: str, float64_factors: None) -> None:
    """Enabled before or after `parallelize`, or when the table has trained."""

    def enable(model: keras.Model) -> None:
        users = model.get_layer("tables").tables["users"]
        keras.utils.set_random_seed(1)
        for step in mode.split("+"):
            users.enable_lora(2) if step == "lora" else users.quantize(step)

    def plain_optimizer() -> Any:
        rules = {".*users/.*": kdist.lazy(_O.Adagrad(0.1))}
        return _O.MultiOptimizer(_O.OptimizerMap(_O.Adam(0.01), rules))

    plain, model = network({}, {}), network({"optimizer": _O.Adagrad(0.1)}, {})
    for one, optimizer in ((plain, plain_optimizer), (model, lambda: _O.Adam(0.01))):
        if when == "before":
            enable(one)
        if one is model:
            parallel(one)
        if when == "trained":
            trained(one, optimizer())
        if when != "before":
            enable(one)
        trained(one, optimizer())
    assert_same_weights(plain, model)
    assert "table 'tables/users' is updated by LazyAdagrad" in model.plan().notes


def test_factors_for_which_another_optimizer_is_named(float64: None) -> None:
    model = parallel(network({"optimizer": "adagrad"}, {}))
    model.get_layer("tables").tables["users"].enable_lora(2)
    model.compile(several(kdist.lazy("adagrad"), _O.SGD()), "mse")
    with pytest.raises(ValueError, match=r"Adam for 'tables/users/lora_embeddings_a' of table"):
        model.train_on_batch(*data(1)[0])


@pytest.mark.parametrize("mode", ["frozen", "int8"])
def test_a_table_with_nothing_to_train(mode: str, float64: None) -> None:
    plain, model = network({}, {}), network({"optimizer": "adagrad"}, {})
    for one in (plain, model):
        users = one.get_layer("tables").tables["users"]
        if mode == "frozen":
            users.trainable = False
        else:
            users.quantize(mode)
    trained(plain, "adam"), trained(parallel(model), "adam")
    for one, other in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    said = "table 'tables/users' has nothing to train: its LazyAdagrad updates nothing"
    assert said in model.plan().notes


def test_rows_nobody_looked_up_stay(float64: None) -> None:
    model = parallel(network({"optimizer": "adam", "placement": "host"}, {}))
    before = model.get_layer("tables").tables["users"].embeddings.numpy()
    trained(model, "sgd")
    after = model.get_layer("tables").tables["users"].embeddings.numpy()
    looked_up = np.unique([x["user"] for x, _ in data()])
    changed = np.unique(np.nonzero(before != after)[0])
    np.testing.assert_array_equal(changed, looked_up)


@pytest.mark.parametrize(("replicas", "sums"), [(1, 1), (2, 3)])
def test_rows_are_summed_once(replicas: int, sums: int) -> None:
    """In each replica before they travel, and where several meet; `Unique` finds which."""
    table = kdist.layers.HostEmbedding(ROWS, 4, name="table")
    ids = keras.Input((3,), dtype="int32")
    model = keras.Model(ids, keras.layers.Dense(2)(keras.layers.Flatten()(table(ids))))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=replicas)))
    model.compile(kdist.lazy(_O.Adam(clipvalue=1.0)), "mse")
    x, y = np.zeros((4, 3), "int32"), np.zeros((4, 2))
    step = executed.largest(executed.watch(lambda: model.train_on_batch(x, y)))
    assert len(step.select("UnsortedSegmentSum")) == sums
    assert len(step.select("Unique")) == sums


PEAKS = """
import kdist
kdist.init(cpu_devices=3)
import keras
import tensorflow as tf
from tests.api.test_table_optimizers import data, network, parallel

info = lambda: tf.config.experimental.get_memory_info("CPU:0")
split = {"placement": "split", "rows": (1_000_000, 2_000_000)}
host = {"placement": "host"}
for users, scaled in ((host, 0), (host, 1), (split, 1), ({**host, "dense": True}, 0)):
    own = keras.optimizers.Adagrad(0.1, global_clipnorm=1.0)
    model = parallel(network({"optimizer": own, **users}, {}, rows=3_000_000))
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer, "mse")
    batches = data()
    for x, y in batches[:2]:  # the first write of rows gives the table a buffer of its own
        model.train_on_batch(x, y)
    before = info()["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    model.train_on_batch(*batches[2])
    print("peak", info()["peak"] - before)
"""


def test_a_step_allocates_nothing_of_the_size_of_the_table() -> None:
    """A table of 48 MB, in a process of its own; see `tests/runtime/test_pipeline_memory.py`."""
    done = subprocess.run(
        [sys.executable, "-c", PEAKS],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *lazy, dense = [int(one.split()[1]) for one in done.stdout.splitlines() if "peak" in one]
    assert len(lazy) == 3
    assert max(lazy) < 1_000_000, lazy
    assert dense > 40_000_000, dense


@pytest.mark.parametrize(
    "make",
    [
        lambda: _O.LossScaleOptimizer(_O.SGD()),
        lambda: kdist.ShardedOptimizer("sgd"),
        lambda: _O.LossScaleOptimizer(kdist.ShardedOptimizer("sgd")),
    ],
)
def test_wrappers_stay_outside(make: Any) -> None:
    model = parallel(network({"optimizer": "adagrad"}, {}))
    given = make()
    model.compile(given, "mse")
    inner = model.optimizer
    assert inner is given
    while hasattr(inner, "inner_optimizer"):
        inner = inner.inner_optimizer
    assert isinstance(inner, _O.MultiOptimizer)
    assert [type(one) for one in inner.optimizers] == [LazyAdagrad, _O.SGD]
    (x, y) = data(1)[0]
    model.train_on_batch(x, y)
    assert np.isfinite(model.evaluate(x, y, verbose=0))


def test_saved_and_loaded(tmp_path: Path, float64: None) -> None:
    """A file holds the optimizers of tables and their state; plain Keras goes on as kdist does."""
    own = _O.Adam(_O.schedules.ExponentialDecay(0.1, 2, 0.5))
    model = parallel(network({"optimizer": own, "placement": "host"}, {"optimizer": "ftrl"}))
    trained(model, "adam")
    model.save(tmp_path / "model.keras")
    plain = keras.saving.load_model(tmp_path / "model.keras")
    again = parallel(keras.saving.load_model(tmp_path / "model.keras"))
    for one in (plain, again):
        assert type(one.optimizer.optimizers[0]) is LazyAdam
        np.testing.assert_equal(
            [v.numpy() for v in one.optimizer.variables],
            [v.numpy() for v in model.optimizer.variables],
        )
    for one in (model, plain, again):
        for x, y in data(2):
            one.train_on_batch(x, y)
    assert_same_weights(model, plain)
    assert_same_weights(model, again)


def test_weights_take_the_state_along(tmp_path: Path, float64: None) -> None:
    """Keras's `save_weights` writes optimizers too, whole: another level takes them up."""
    model = parallel(network({"optimizer": "adam", "placement": "host"}, {"optimizer": "ftrl"}))
    trained(trained(model, "adam"), "adam").save_weights(tmp_path / "a.weights.h5")
    users = {"optimizer": "adam", "placement": "host"}
    again = trained(parallel(network(users, {"optimizer": "ftrl"}), level=2), "adam")
    again.load_weights(tmp_path / "a.weights.h5")
    for one, other in (
        (model.weights, again.weights),
        (model.optimizer.variables, again.optimizer.variables),
    ):
        np.testing.assert_equal([v.numpy() for v in one], [v.numpy() for v in other])
    (x, y) = data(1)[0]
    for one in (model, again):
        one.train_on_batch(x, y)
    assert_same_weights(model, again)


def test_own_loops(float64: None) -> None:
    plain = trained(network({}, {}), several(kdist.lazy("adam"), kdist.lazy("ftrl")))
    users = {"optimizer": "adam", "placement": "host"}
    model = parallel(network(users, {"optimizer": "ftrl"}), level=1)
    model.compile("adam", "mse")
    model.optimizer.optimizers[-1].learning_rate = 0.01
    for x, y in data():
        kdist.apply_gradients(model, kdist.gradients(model, x, y)[1])
    assert_same_weights(plain, model)


def test_compiling_again_starts_anew() -> None:
    own = _O.Adagrad(0.1)
    model = trained(parallel(network({"optimizer": own}, {})), "sgd")
    trained(model, "sgd")
    assert not own.built
    assert int(model.optimizer.optimizers[0].iterations) == 3
    assert "table 'tables/users' is updated by LazyAdagrad" in attached(model).plan().notes


@pytest.mark.parametrize("optimizer", ["adam", several(kdist.lazy("sgd"), _O.SGD())])
def test_another_optimizer_for_the_table_is_refused(optimizer: Any) -> None:
    model = network({"optimizer": "adagrad"}, {})
    model.compile(optimizer, "mse")
    model = parallel(model)
    (x, y) = data(1)[0]
    with pytest.raises(ValueError, match="which asks for LazyAdagrad"):
        model.train_on_batch(x, y)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: TableConfig("t", 5, 2, optimizer="nadam"), "Nadam"),
        (lambda: TableConfig("t", 5, 2, dense=True), "dense=True"),
        (lambda: TableConfig("t", 5, 2, optimizer=_O.LossScaleOptimizer(_O.SGD())), "LossScale"),
        (lambda: TableConfig("t", 5, 2, optimizer=kdist.lazy("sgd"), dense=True), "LazySGD"),
    ],
)
def test_what_is_refused(make: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        make()


def test_a_built_optimizer_is_refused() -> None:
    model = parallel(network({"optimizer": "adagrad"}, {}))
    optimizer = _O.Adam()
    optimizer.build(model.trainable_variables)
    with pytest.raises(ValueError, match="built with them"):
        model.compile(optimizer, "mse")


def test_codes_are_refused() -> None:
    model = network({"optimizer": "adagrad"}, {})
    formats = kdist.OptimizerConfig(state_format=kdist.StateFormatConfig(second="bf16"))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2), optimizer=formats))
    model.compile("adam", "mse")
    (x, y) = data(1)[0]
    with pytest.raises(ValueError, match="codes are read whole"):
        model.train_on_batch(x, y)
