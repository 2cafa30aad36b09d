"""`kdist.verify`: equal is found equal; what is broken is found, and named."""

import io
import random

import kdist
from kdist.verification.cause import likely_cause
from kdist.verification.observed import Observed, compare_runs
from kdist.verification.study import Study
from kdist.verification.tolerance import KINDS, TOLERANCES, Difference

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from rich.console import Console

from .equivalence import zoo
from .equivalence.harness import Run, compiled, precision
from .equivalence.matrix import product, spread

MESHES = {
    "data2": {"data": 2},
    "data4": {"data": 4},
    "data2_model2": {"data": 2, "model": 2},
    "pipe2_data2": {"pipe": 2, "data": 2},
    "pipe2_data2_model2": {"pipe": 2, "data": 2, "model": 2},
}


def zoo_model(case, mesh, dtype="float32", **config):
    if "pipe" in mesh:
        config.setdefault("pipeline", kdist.PipelineConfig(micro_batches=2))
    run = Run(
        case=case,
        mesh_axes=mesh,
        optimizer=lambda **options: keras.optimizers.Adam(0.01, **options),
        config=config,
        dtype=dtype,
    )
    with precision(dtype):
        return compiled(run, "kdist")


def small(*middle, axes=None, loss="mse", metrics=(), **config):
    """A compiled model of two Dense layers with something in between."""
    inputs = keras.Input((6,), name="features")
    x = layers.Dense(8, activation="tanh", name="up")(inputs)
    for layer in middle:
        x = layer(x)
    model = keras.Model(inputs, layers.Dense(2, name="down")(x), name="small")
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(**axes or {"data": 2}), **config))
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=list(metrics))
    return model


def batch(rows=6):
    rng = np.random.default_rng(0)
    # A mean that drifts along the rows: the replicas' parts are unlike each other.
    x = rng.normal(size=(rows, 6)) + np.linspace(-1, 1, rows)[:, None]
    return x.astype("float32"), rng.normal(size=(rows, 2)).astype("float32")


EQUAL = product([c for c in zoo.ZOO if not c.has_batchnorm], MESHES)


@pytest.mark.parametrize(
    ("name", "mesh"),
    spread(
        [(case.name, mesh) for case, mesh in EQUAL],
        [("mlp", "data2_model2")],
    ),
)
def test_the_zoo_is_equal_to_one_device(name, mesh):
    case = zoo.BY_NAME[name]
    model = zoo_model(case, MESHES[mesh])
    report = kdist.verify(model, *case.data(3, 7))
    assert report.ok and report.differences == (), report
    assert report.dtype == "float64"
    assert min(report.compared[kind] for kind in ("output", "loss", "gradient", "slot")) > 0
    assert "Equal to one device" in str(report)


LEVELS = [(case.name, level) for case in (zoo.MLP, zoo.GPT, zoo.TWO_TOWER) for level in (1, 2, 3)]


@pytest.mark.parametrize(("name", "level"), spread(LEVELS, [("two_tower", 3)]))
def test_levels_are_equal_to_one_device(name, level):
    case = zoo.BY_NAME[name]
    optimizer = kdist.OptimizerConfig(level=level, threshold_kb=0)
    report = kdist.verify(zoo_model(case, {"data": 4}, optimizer=optimizer), *case.data(3, 8))
    assert report.ok and report.differences == (), report


def observable(model):
    """Everything that must stay, bit by bit."""
    variables = [*model.variables, *model.optimizer.variables]
    for metric in model.metrics:
        variables += metric.variables
    return [keras.ops.convert_to_numpy(v) for v in variables]


def test_nothing_of_the_model_changes():
    metrics = [keras.metrics.MeanAbsoluteError(name="error")]
    noise = layers.Dropout(0.3, name="noise"), layers.BatchNormalization(name="norm")
    model = small(*noise, metrics=metrics)
    x, y = batch()
    model.fit(x, y, epochs=2, verbose=0)
    before, floatx = observable(model), keras.config.floatx()
    layers.Dense(1)
    number = int(layers.Dense(1).name.split("_")[-1])
    draws = random.getstate(), np.random.get_state()[1].tolist()
    report = kdist.verify(model, x, y)
    assert report.ok, report
    after = observable(model)
    assert len(before) == len(after)
    for a, b in zip(before, after):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
    assert keras.config.floatx() == floatx
    assert (random.getstate(), np.random.get_state()[1].tolist()) == draws
    assert int(layers.Dense(1).name.split("_")[-1]) == number + 1, "a name was used up"


def test_dropout_and_batch_normalization_are_named():
    noise = layers.Dropout(0.3, name="noise"), layers.BatchNormalization(name="norm")
    report = kdist.verify(small(*noise), *batch())
    assert report.ok and report.differences
    assert report.explained_by == ("noise", "norm")
    assert report.first_layer == "noise"
    assert report.unexplained == ()
    assert "noise" in report.cause and "norm" in report.cause
    assert "by design" in str(report)


@pytest.mark.long
def test_batch_normalization_on_one_replica_is_no_excuse():
    report = kdist.verify(small(layers.BatchNormalization(), axes={"model": 2}), *batch())
    assert report.ok and report.differences == () == report.explained_by


class Centre(layers.Layer):
    """Takes the mean over the batch off."""

    def call(self, inputs):
        return inputs - ops.mean(inputs, axis=0, keepdims=True)


def test_a_layer_in_which_rows_meet_is_named():
    noise, centre = layers.Dropout(0.3, name="noise"), Centre(name="centre")
    report = kdist.verify(small(centre, noise), *batch())
    assert not report.ok
    assert report.first_layer == "centre"
    assert "'centre'" in report.cause and "Centre" in report.cause and "Mean" in report.cause
    assert report.explained_by == ()
    assert "NOT equal" in str(report)


def test_a_dropped_gradient_is_named(monkeypatch):
    from kdist import plain

    whole = plain.PlainGradients.unit

    def dropped(self, variable, unit):
        """One replica's gradient alone, of the second layer's kernel."""
        if self.entries[variable].variable.path.endswith("down/kernel"):
            self.gradients = {0: self.gradients[0]}
        return whole(self, variable, unit)

    monkeypatch.setattr(plain.PlainGradients, "unit", dropped)
    report = kdist.verify(small(), *batch())
    assert not report.ok
    kinds = {d.kind for d in report.differences}
    assert "gradient" in kinds and not kinds & {"output", "loss"}
    assert "down/kernel" in report.cause and "gradient" in report.cause
    assert report.first_layer is None


def test_a_wrong_share_of_the_loss_is_named(monkeypatch):
    from kdist import plain

    monkeypatch.setattr(plain, "row_shares", lambda b: [tf.constant(0.6, tf.float64)] * 2)
    report = kdist.verify(small(), *batch())
    assert not report.ok
    assert "loss term 'loss'" in report.cause


class Penalty(layers.Layer):
    """Adds a sum over rows to the loss."""

    def call(self, inputs):
        self.add_loss(ops.sum(ops.square(inputs)))
        return inputs


def test_a_sum_given_to_add_loss_is_named():
    report = kdist.verify(small(Penalty(name="penalty")), *batch())
    assert not report.ok
    assert "'penalty'" in report.cause and "loss_from_layers='sum'" in report.cause


@pytest.mark.long
def test_a_sum_that_is_declared_as_one_is_equal():
    report = kdist.verify(small(Penalty(name="penalty"), loss_from_layers="sum"), *batch())
    assert report.ok and report.differences == (), report


def test_compression_is_named():
    compression = kdist.CompressionConfig(rest="bf16")
    report = kdist.verify(small(compression=compression), *batch())
    assert report.ok and report.differences
    assert report.explained_by == ("compression",)
    assert {d.kind for d in report.differences} <= {"weight", "slot"}


@pytest.mark.long
def test_compression_does_not_excuse_the_rest():
    compression = kdist.CompressionConfig(rest="bf16")
    broken = kdist.verify(small(Centre(name="centre"), compression=compression), *batch())
    assert not broken.ok and broken.explained_by == ()
    assert "'centre'" in broken.cause


def difference(kind, name="x"):
    return Difference(kind, name, 1.0, 1.0, 1e-9, "")


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (["output", "loss", "gradient"], "parallel execution"),
        (["loss", "gradient", "weight"], "loss term"),
        (["gradient", "weight", "slot"], "gradient of"),
        (["weight", "metric"], "update"),
        (["slot"], "update"),
        (["metric", "state"], "metric"),
        (["state"], "state"),
        ([], ""),
    ],
)
def test_the_cause_is_where_differences_begin(kinds, text):
    cause = likely_cause([difference(kind) for kind in kinds], Study())
    assert text in cause and bool(cause) == bool(kinds)


def test_what_cannot_be_verified_is_refused():
    with pytest.raises(ValueError, match="plain Keras model"):
        kdist.verify(keras.Sequential([keras.Input((2,)), layers.Dense(1)]), *batch())
    model = small()
    with pytest.raises(ValueError, match="dtype='half'"):
        kdist.verify(model, *batch(), dtype="half")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2)))
    with pytest.raises(ValueError, match="model.compile"):
        kdist.verify(model, *batch())


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


class Noise(layers.Layer):
    """Adds noise, in inference too."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, inputs):
        return inputs + keras.random.normal(ops.shape(inputs), seed=self.seeds, dtype=inputs.dtype)


def test_a_layer_that_always_draws_is_named():
    report = kdist.verify(small(Noise(name="noise")), *batch())
    assert not report.ok
    assert "'noise'" in report.cause and "draws random numbers" in report.cause


class Wrapped(keras.Model):
    """Cannot be made again: its configuration has no layer."""

    def __init__(self, inner):
        super().__init__(name="wrapped")
        self.inner = inner

    def call(self, inputs, training=False):
        return self.inner(inputs, training=training)


def wrapped(*middle, **config):
    inner = [layers.Dense(8, activation="tanh", name="up"), *middle, layers.Dense(2, name="down")]
    model = Wrapped(keras.Sequential([keras.Input((6,)), *inner]))
    kdist.parallelize(model, kdist.ParallelConfig(mesh=kdist.mesh(data=2), **config))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def test_a_model_without_a_twin_is_compared_itself():
    x, y = batch()
    histories = []
    for verify in (None, "first_step"):
        keras.utils.set_random_seed(0)
        noise = layers.Dropout(0.3, name="noise"), layers.BatchNormalization(name="norm")
        model = wrapped(*noise, verify=verify)
        histories.append(model.fit(x, y, epochs=3, verbose=0).history)
    assert histories[0] == histories[1]
    before = observable(model)
    report = kdist.verify(model, x, y)
    assert report.ok and report.explained_by == ("noise", "norm"), report
    assert report.dtype == "float32"
    assert "the model itself" in report.way and "without an update" in report.way
    for a, b in zip(before, observable(model)):
        np.testing.assert_array_equal(a, b)
    model.fit(x, y, verbose=0)
    assert not kdist.verify(wrapped(Centre(name="centre")), x, y).ok
    with pytest.raises(ValueError, match="compressed"):
        kdist.verify(wrapped(compression=kdist.CompressionConfig(rest="bf16")), x, y)


class Hidden(layers.Layer):
    """Has a factor that its configuration does not have."""

    def call(self, inputs):
        return inputs * getattr(self, "_factor", 1.0)


def test_a_twin_that_predicts_otherwise_is_no_twin():
    layer = Hidden()
    layer._factor = 3.0
    report = kdist.verify(small(layer), *batch())
    assert report.ok, report
    assert "predicts another output" in report.way


def test_what_was_set_after_construction_is_the_twins_too():
    dropout = layers.Dropout(0.5, name="noise")
    model = small(dropout)
    dropout.rate = 0.0
    assert kdist.verify(model, *batch()).differences == ()


def test_a_model_that_does_not_fit_one_device_is_refused():
    model = small()
    weights = 8 * sum(int(np.prod(v.shape)) for v in model.weights)
    # Gradients, the outputs of both layers, the optimizer's two scalars.
    least = 2 * weights + 8 * 6 * (8 + 2) + 8 * 2
    assert kdist.verify(model, *batch(), memory_limit=least).ok
    with pytest.raises(ValueError, match=f"{least} bytes at least.*has {least - 1} bytes"):
        kdist.verify(model, *batch(), memory_limit=least - 1)


class Norm(layers.Layer):
    """Divides by the root of the mean square, in float32 whatever the policy; then a product."""

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], 8), name="kernel")

    def call(self, inputs):
        x = ops.cast(inputs, "float32")
        x = x / ops.sqrt(ops.mean(x * x, axis=-1, keepdims=True) + 1e-5)
        return ops.matmul(ops.cast(x, self.compute_dtype), self.kernel)


def test_a_model_that_rounds_inside_gets_a_wider_tolerance_and_says_so():
    layout = {".*mid/kernel": (None, "model")}
    middle = Norm(), Norm(), Norm(), layers.Dense(4, name="mid")
    report = kdist.verify(small(*middle, axes={"data": 2, "model": 2}, layout_map=layout), *batch())
    assert report.ok, report
    assert report.tolerance.relative["loss"] == 1e-5
    assert any("rounds to fewer bits" in note for note in report.notes)


POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
CASES = [case.name for case in zoo.ZOO if not case.has_batchnorm]
FIRST = [("mlp", "mixed_float16", "data4")]


@pytest.mark.parametrize(
    ("name", "policy", "mesh"),
    spread(product(CASES, POLICIES, ("data2", "data4", "data2_model2")), FIRST),
)
def test_the_zoo_is_equal_in_its_own_dtype(name, policy, mesh):
    case = zoo.BY_NAME[name]
    with precision(policy):
        model = zoo_model(case, MESHES[mesh], policy)
        loss = case.loss("sum_over_batch_size")
        model.compile(keras.optimizers.Adam(0.01), loss, case.loss_weights, case.metrics())
        report = kdist.verify(model, *case.data(3, 8), dtype="own")
    assert report.ok and report.differences == (), report
    assert report.dtype == policy


# A weight that is off by this much of itself on the mesh must be found.
FOUND = {"float64": 1e-8, "float32": 1e-3, "mixed_float16": 0.2, "mixed_bfloat16": 1.0}


@pytest.mark.parametrize(
    "policy", spread([(policy,) for policy in FOUND], [("float64",), ("mixed_float16",)])
)
def test_a_slightly_wrong_weight_is_found(policy, monkeypatch):
    from kdist.verification import trial

    make = trial._mesh_twin

    def wrong(*args):
        twin, parallel = make(*args)
        kernel = twin.get_layer("down").kernel
        kernel.assign(kernel * (1 + FOUND[policy]))
        return twin, parallel

    monkeypatch.setattr(trial, "_mesh_twin", wrong)
    dtype = "float64" if policy == "float64" else "own"
    with precision("float32" if policy == "float64" else policy):
        model = small()
    report = kdist.verify(model, *batch(), dtype=dtype)
    assert not report.ok and report.dtype == policy
    assert {d.kind for d in report.differences} >= {"output", "loss", "gradient"}
    assert "output" in report.cause


@pytest.mark.long
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "model": 2}])
def test_global_semantics_need_no_excuse(axes):
    middle = Centre(name="centre"), layers.BatchNormalization(name="norm")
    report = kdist.verify(small(*middle, axes=axes, batch_semantics="global"), *batch())
    assert report.ok and report.differences == (), report


def test_a_report_shows_whole_names_at_any_width():
    name = "sequential/a_block_with_a_long_name/attention_output/kernel"
    found = tuple(Difference(kind, name, 1.0, 2.0, 1e-9, "1 and 2") for kind in KINDS)
    report = kdist.Verification(
        ok=False,
        differences=found,
        cause="a cause",
        first_layer="up",
        explained_by=(),
        unexplained=found[:1],
        dtype="float64",
        way="twins",
        compared={"output": 1, "loss": 2},
        tolerance=TOLERANCES["float64"],
        seconds=1.0,
        notes=("a note [in brackets]",),
    )
    for width in (60, 80, 120):
        text = io.StringIO()
        report.summary(Console(file=text, width=width))
        assert text.getvalue().count(name) == len(KINDS) + 1
        assert "a note [in brackets]" in text.getvalue()
    assert "NOT equal" in str(report) and "a cause" in str(report)


def test_arrays_are_compared_by_their_own_scale():
    one = {"a": np.array([1e6, 1.0]), "b": np.array([1e-3]), "c": np.array([0.0])}
    off = {"a": one["a"] * (1 + 1e-8), "b": one["b"] + 1e-11, "c": one["c"] + 1e-5}
    empty = {"output": {}, "metric": {}, "gradient": None, "state": {}}
    runs = [Observed(**{**empty, "loss": arrays}) for arrays in (one, off)]
    found = compare_runs(*runs, TOLERANCES["float64"])
    assert [d.name for d in found.differences] == ["c", "a"]
    missing = Observed(**{**empty, "loss": {"a": one["a"]}})
    found = compare_runs(missing, runs[0], TOLERANCES["float64"])
    assert {d.name for d in found.differences} == {"b", "c"}
    assert all(d.error == np.inf for d in found.differences)


def test_what_only_rounding_decides_is_left_out():
    """A gradient of 1e-20 gives Lion a whole step, of either sign; an exact zero gives none."""
    gradient = {"up/kernel": np.array([1.0, 1e-20, 0.0])}
    empty = {"output": {}, "loss": {}, "metric": {}, "state": {}, "gradient": gradient}
    one = {"weight": {"up/kernel": np.ones(3)}, "slot": {"lion/up_kernel_momentum": np.ones(3)}}
    for entry, found in ((0, 2), (1, 0), (2, 2)):
        moved = np.ones(3)
        moved[entry] = 0.9
        mesh = {kind: dict.fromkeys(arrays, moved) for kind, arrays in one.items()}
        runs = Observed(**empty, **one), Observed(**empty, **mesh)
        assert len(compare_runs(*runs, TOLERANCES["float64"]).differences) == found
