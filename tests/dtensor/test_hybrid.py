"""`kdist.shard` inside a slice: which collectives a declared cut makes, and that numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist
from kdist.api.inspection import Inspection

import keras
import numpy as np
import pytest

import hybrid_matmul
from ..parity import assert_close, assert_same_weights

pytestmark = pytest.mark.usefixtures("float64")
MODEL = {"model": 4}
X = np.random.default_rng(0).normal(size=(8, 8))
Y = np.random.default_rng(1).normal(size=(8, 8))
# After `one`, `two` takes columns: it sums its parts, and its own kernel's gradient is gathered.
SUMMED = ("all-reduce", "two", "forward", (8, 8))
GATHERED = ("all-gather", "two", "backward", (16, 8))


def two_layers(declare: Callable[[Any, Any], Any], between: Callable = lambda h: h) -> keras.Model:
    """8 features to 16 to 8, through layers `one` and `two`.

    Args:
        declare: Called with both layers.
        between: What happens to the tensor between them.
    """
    keras.utils.set_random_seed(0)
    one = keras.layers.Dense(16, "tanh", name="one")
    two = keras.layers.Dense(8, name="two")
    inputs = keras.Input((8,))
    one.build((None, 8))
    two.build((None, 16))
    declare(one, two)
    return keras.Model(inputs, two(between(one(inputs))), name="net")


def no_declaration(one: Any, two: Any) -> None:
    pass


def momentum() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(learning_rate=0.01, momentum=0.9)


def trained(
    build: Callable[[], keras.Model],
    axes: dict[str, int] | None = None,
    layout_map: Any = None,
    *,
    x: Any = X,
    y: Any = Y,
    loss: Any = "mse",
    alltoall: bool = False,
) -> Inspection:
    """Trains three batches on one device and on a mesh, compares, and returns what ran."""
    plain, parallel = build(), build()
    mesh = kdist.mesh(**(axes or MODEL))
    config = kdist.ParallelConfig(mesh=mesh, layout_map=layout_map, enable_alltoall=alltoall)
    kdist.parallelize(parallel, config)
    losses = []
    for model in (plain, parallel):
        model.compile(momentum(), loss)
        losses.append([float(model.train_on_batch(x, y)) for _ in range(3)])
    assert_close(*losses)
    assert_close(plain.get_weights(), parallel.get_weights())
    assert losses[0][2] < losses[0][0]
    inspection = kdist.inspect(parallel)
    assert not inspection.fallbacks
    return inspection


def table(inspection: Inspection) -> list[tuple]:
    return [(c.kind, c.layer, c.phase, c.shape) for c in inspection.collectives]


# -- the classic network -------------------------------------------------------------------------


def classic() -> keras.Model:
    keras.utils.set_random_seed(0)
    return hybrid_matmul.build(hidden=16)


def test_the_classic_network_gathers_once_between_its_products() -> None:
    x = np.random.default_rng(0).normal(size=(8, 64))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    inspection = trained(classic, x=x, y=np.arange(8) % 10, loss=loss)
    forward = [row for row in table(inspection) if row[2] == "forward" and row[1] != "logits"]
    assert forward == [("all-gather", "relu_1", "forward", (8, 16))]
    assert inspection.count("all-gather", phase="forward") == 1
    assert inspection.count("all-to-all") == 0
    # Each device has some rows, then some columns: their gradients are summed, once each, and of
    # what columns took each device gets the sum of its rows.
    assert inspection.count("all-reduce", "rows", "backward") == 1
    assert inspection.count("reduce-scatter", "columns", "backward") == 1
    assert inspection.count("all-reduce", "columns") == 0


def test_cut_otherwise_the_classic_network_has_no_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count above is of what was lowered: columns, then rows of the kernel, need none."""
    monkeypatch.setattr(hybrid_matmul, "ROWS", ((1, 1), (1, 4)))
    monkeypatch.setattr(hybrid_matmul, "COLUMNS", ((1, 4), (4, 1)))
    x = np.random.default_rng(0).normal(size=(8, 64))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    inspection = trained(classic, x=x, y=np.arange(8) % 10, loss=loss)
    assert inspection.count("all-gather") == 0
    assert inspection.count("all-reduce", "columns", "forward") == 1


def test_the_classic_network_as_a_pipeline_equals_one_device() -> None:
    """Two products cut in two ways, a stage each, four micro-batches; velocities are equal too."""
    x, y = np.random.default_rng(0).normal(size=(32, 64)), np.arange(32) % 10
    plain, staged = classic(), hybrid_matmul.parallel(classic(), stages=2)
    hybrid_matmul.compiled(plain)
    losses = [[float(m.train_on_batch(x, y)) for _ in range(3)] for m in (plain, staged)]
    assert_close(*losses)
    assert losses[0][2] < losses[0][0]
    assert_same_weights(plain, staged)
    inspection = kdist.inspect(staged, batch_size=32)
    assert not inspection.fallbacks
    # Of a micro-batch: 8 rows of 16 features, gathered where the second product begins.
    gathered = [c for c in inspection.collectives if (c.kind, c.phase) == ("all-gather", "forward")]
    assert [c.shape for c in gathered] == [(8, 16)]
    assert inspection.count("all-reduce", "rows", "backward") == 1
    stages = {w.path: {s for s, _ in w.shards[0].holders} for w in staged.plan().weights}
    assert stages["rows/kernel"] == {0}
    assert stages["columns/kernel"] == stages["logits/kernel"] == {1}


# -- forms of a declaration ----------------------------------------------------------------------


def both(one_in: Any, two_in: Any) -> Callable[[], keras.Model]:
    def declare(one: Any, two: Any) -> None:
        kdist.shard(one, in_strategy=one_in)
        kdist.shard(two, in_strategy=two_in)

    return lambda: two_layers(declare)


def test_names_and_counts_are_the_same() -> None:
    named = trained(both(((None, None), (None, "model")), ((None, "model"), ("model", None))))
    counted = trained(both(((1, 1), (1, 4)), ((1, 4), (4, 1))))
    # `two` takes what `one` gives as it is: a declared layout that is there already moves nothing.
    assert table(named) == table(counted) == [SUMMED]
    assert named.memory == counted.memory


def test_names_and_counts_are_the_same_with_a_data_axis() -> None:
    axes = {"data": 2, "model": 4}
    batch = ("data", None), (None, "model")
    named = trained(both(batch, (("data", "model"), ("model", None))), axes)
    counted = trained(both(((2, 1), (1, 4)), ((2, 4), (4, 1))), axes)
    # A slice has half of the rows.
    assert table(named) == table(counted) == [("all-reduce", "two", "forward", (4, 8))]


def by_weights(one: Any, two: Any) -> None:
    kdist.shard(one, weights={"kernel": (None, "model"), "bias": ("model",)})


def by_output(one: Any, two: Any) -> None:
    kdist.shard(one, out_strategy=(None, "model"))


def on_tensor(tensor: Any) -> Any:
    return kdist.shard(tensor, out_strategy=(None, "model"))


def on_result(tensor: Any) -> Any:
    return kdist.shard(keras.ops.sin(tensor), out_strategy=(1, 4))


@pytest.mark.parametrize(
    ("declare", "between", "layout_map"),
    [
        (by_weights, None, None),
        (by_output, None, None),
        (no_declaration, on_tensor, None),
        (no_declaration, on_result, None),
        (no_declaration, None, {"one/output": (None, "model")}),
        (no_declaration, None, {"one/kernel": (None, "model"), "one/bias": ("model",)}),
    ],
    ids=["weights", "out_strategy", "tensor", "result", "output pattern", "weight patterns"],
)
def test_every_way_to_cut_the_same_tensor(declare: Any, between: Any, layout_map: Any) -> None:
    build = lambda: two_layers(declare, between or (lambda h: h))  # noqa: E731
    found = table(trained(build, layout_map=layout_map))
    assert [row for row in found if row[2] == "forward"] == [SUMMED]
    assert GATHERED in found


def test_without_a_declaration_nothing_is_cut() -> None:
    inspection = trained(lambda: two_layers(no_declaration))
    assert inspection.collectives == ()


def test_a_tensor_inside_a_layer() -> None:
    @keras.saving.register_keras_serializable("test_hybrid")
    class Sine(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return kdist.shard(keras.ops.sin(x), out_strategy=(None, "model"))

    found = table(trained(lambda: two_layers(no_declaration, Sine(name="sine"))))
    assert [row for row in found if row[2] == "forward"] == [SUMMED]
    assert GATHERED in found


def test_a_batch_that_is_cut_over_an_inner_axis() -> None:
    def rows(one: Any, two: Any) -> None:
        kdist.shard(one, in_strategy=("model", None))

    inspection = trained(lambda: two_layers(rows))
    # Rows stay cut through both layers: every weight's gradient is a sum over them.
    assert inspection.count("all-reduce", "one", "backward") == 2
    assert inspection.count("all-reduce", "two", "backward") == 2
    assert {c.shape for c in inspection.collectives if c.kind == "all-reduce"} == {
        (8, 16),
        (16,),
        (16, 8),
        (8,),
    }
    # The loss reads all rows.
    assert [c.shape for c in inspection.collectives if c.kind == "all-gather"] == [(8, 8)]


# -- all-to-all ----------------------------------------------------------------------------------


def relaid_layers(one: Any, two: Any) -> None:
    kdist.shard(one, out_strategy=("model", None))
    kdist.shard(two, in_strategy=(None, "model"))


def relaid_tensors(tensor: Any) -> Any:
    rows = kdist.shard(tensor, out_strategy=("model", None))
    return kdist.shard(rows, out_strategy=(None, "model"))


@pytest.mark.parametrize(
    ("declare", "between"),
    [(relaid_layers, lambda h: h), (no_declaration, relaid_tensors)],
    ids=["layers", "tensors"],
)
@pytest.mark.parametrize("order", [(False, True), (True, False)], ids=["off, on", "on, off"])
def test_all_to_all_is_per_model(order: Any, declare: Any, between: Any) -> None:
    """Two models of one process, in either order, each as it was configured."""
    for alltoall in order:
        inspection = trained(lambda: two_layers(declare, between), alltoall=alltoall)
        found = [c for c in inspection.collectives if c.kind == "all-to-all"]
        assert len(found) == alltoall
        assert inspection.count("all-gather", phase="forward") == (not alltoall)
        if alltoall:
            # Each of the four devices ends up with all 8 rows of a quarter of the columns.
            assert found[0].bytes == 8 * 16 * 8 // 4
            assert found[0].phase == "forward"


def there_and_back(tensor: Any) -> Any:
    """Rows, columns, rows; the sine between them keeps the gradient where the tensor is."""
    rows, columns = ("model", None), (None, "model")
    for cut in (rows, columns, rows):
        tensor = kdist.shard(keras.ops.sin(tensor), out_strategy=cut)
    return tensor


@pytest.mark.parametrize("alltoall", [True, False])
def test_gradients_are_laid_out_by_all_to_all_too(alltoall: bool) -> None:
    inspection = trained(lambda: two_layers(no_declaration, there_and_back), alltoall=alltoall)
    for phase in ("forward", "backward"):
        assert inspection.count("all-to-all", phase=phase) == (2 if alltoall else 0)
        gathered = [c for c in inspection.collectives if c.kind == "all-gather"]
        # The tensor between the layers, or its gradient; `two` gathers its own smaller result.
        moved = [c for c in gathered if c.phase == phase and c.bytes == 8 * 16 * 8]
        assert bool(moved) == (not alltoall)
