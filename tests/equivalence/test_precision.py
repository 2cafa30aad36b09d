"""float32, and mixed policies with their loss scale."""

from __future__ import annotations

import kdist

import keras
import numpy as np
import pytest

from .harness import Run, compare, compiled, precision
from .matrix import LEVELS, MESHES, level_config, product, spread
from .optimizer_zoo import OPTIMIZERS
from .outcome import Outcome
from .zoo import BY_NAME

ROWS = product(BY_NAME, ("data4", "data2_model2"))


@pytest.mark.parametrize(("name", "mesh"), spread(ROWS, [("mlp", "data2_model2")]))
def test_float32_loss_over_20_steps(name: str, mesh: str, engine: str) -> None:
    compare(
        BY_NAME[name],
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        engine=engine,
        dtype="float32",
        samples=32,
        epochs=5,
    )


@pytest.mark.parametrize(
    ("name", "mesh", "dtype"),
    spread(
        [(*row, dtype) for row in ROWS for dtype in ("mixed_float16", "mixed_bfloat16")],
        [("mlp", "data4", "mixed_float16"), ("mlp", "data2_model2", "mixed_bfloat16")],
    ),
)
def test_mixed_policy_loss(name: str, mesh: str, dtype: str, engine: str) -> None:
    expected, actual = compare(
        BY_NAME[name],
        MESHES[mesh],
        optimizer=OPTIMIZERS["loss_scale_sgd" if dtype == "mixed_float16" else "sgd_momentum"],
        engine=engine,
        dtype=dtype,
    )
    _check_exact(expected, actual)


def _check_exact(expected: Outcome, actual: Outcome) -> None:
    """Weights stay float32; counts and the loss scale are exact, however the rest is rounded."""
    for part in ("weights", "slots"):
        left, right = getattr(expected, part), getattr(actual, part)
        assert list(left) == list(right)
        for path in left:
            assert left[path].dtype == right[path].dtype, path
            if path.endswith(("iteration", "step_counter", "dynamic_scale", "learning_rate")):
                np.testing.assert_array_equal(left[path], right[path], err_msg=path)


DTYPES = ("float64", "float32", "mixed_float16", "mixed_bfloat16")


@pytest.mark.parametrize(
    ("level", "dtype", "mesh"),
    spread(
        product(LEVELS, DTYPES, ("data4", "data2_model2")),
        [("level2", "mixed_float16", "data4"), ("level3", "mixed_bfloat16", "data4")],
    ),
)
def test_level_in_every_precision(level: str, dtype: str, mesh: str, engine: str) -> None:
    # Chunks of levels 2 and 3 compute casts of gathered parameters again.
    expected, actual = compare(
        BY_NAME["mlp"],
        MESHES[mesh],
        optimizer=OPTIMIZERS["loss_scale_sgd" if dtype == "mixed_float16" else "sgd_momentum"],
        engine=engine,
        dtype=dtype,
        config=level_config(level),
    )
    _check_exact(expected, actual)


def _state(model: keras.Model) -> dict[str, np.ndarray]:
    variables = [*model.weights, *model.optimizer.variables]
    return {v.path: np.array(keras.ops.convert_to_numpy(v)) for v in variables}


@pytest.mark.parametrize(
    ("mesh", "row"),
    spread(product(("data4", "data2_model2"), (0, 7)), [("data4", 7), ("data2_model2", 0)]),
)
def test_one_overflow_anywhere_skips_the_step_everywhere(mesh: str, row: int, engine: str) -> None:
    run = Run(
        case=BY_NAME["mlp"],
        mesh_axes=MESHES[mesh],
        optimizer=lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), initial_scale=2.0**10
        ),
        dtype="mixed_float16",
    )
    with precision(run.dtype):
        model = compiled(run, engine)
        assert model.layers[1].compute_dtype == "float16"
        x, y, _ = run.case.data(0, 8)
        model.train_on_batch(x, y)
        before = _state(model)
        broken = x.copy()
        broken[row] = np.inf
        model.train_on_batch(broken, y)
        after = _state(model)
        scales = [path for path in before if path.endswith("dynamic_scale")]
        assert len(scales) == 1
        assert after[scales[0]] == before[scales[0]] / 2
        for path, value in before.items():
            if not path.endswith(("dynamic_scale", "step_counter")):
                np.testing.assert_array_equal(after[path], value, err_msg=path)
        model.train_on_batch(x, y)
        moved = _state(model)
        assert (moved["up/kernel"] != after["up/kernel"]).any()
        assert np.isfinite(moved["up/kernel"]).all()


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_loss_scale_optimizer_around_sgd_skips_too(dtype: str, engine: str) -> None:
    run = Run(
        case=BY_NAME["mlp"],
        mesh_axes={"data": 4},
        optimizer=OPTIMIZERS["loss_scale_sgd"],
        dtype=dtype,
    )
    with precision(dtype):
        model = compiled(run, engine)
        x, y, _ = run.case.data(0, 8)
        model.train_on_batch(x, y)
        before = _state(model)
        x[5] = np.nan
        model.train_on_batch(x, y)
        after = _state(model)
        for path, value in before.items():
            if not path.endswith(("dynamic_scale", "step_counter")):
                np.testing.assert_array_equal(after[path], value, err_msg=path)


class _Kept(keras.layers.Layer):
    """Has state of the dtype in which it computes."""

    def build(self, shape: object) -> None:
        self.kept = self.add_weight(
            shape=(2,), initializer="zeros", trainable=False, dtype=self.compute_dtype
        )

    def call(self, inputs: object, training: bool = False) -> object:
        if training:
            self.kept.assign(keras.ops.convert_to_tensor([30000.0, 1.0], self.kept.dtype))
        return inputs


@pytest.mark.parametrize("stages", [False, True])
def test_a_mean_of_state_in_16_bits_is_no_sum_in_16_bits(stages: bool) -> None:
    """Replicas' states are averaged; the sum of four of them is more than float16 has."""
    axes, pipeline = {"data": 4}, None
    if stages:
        axes, pipeline = {"pipe": 2, "data": 4}, kdist.PipelineConfig(micro_batches=2)
    layers = [keras.Input((4,)), keras.layers.Dense(4), _Kept(dtype="mixed_float16")]
    model = keras.Sequential([*layers, keras.layers.Dense(4)])
    mesh = kdist.mesh(**axes)
    kdist.parallelize(model, kdist.ParallelConfig(mesh=mesh, pipeline=pipeline))
    model.compile("sgd", "mse")
    model.train_on_batch(np.ones((8, 4)), np.ones((8, 4)))
    kept = model.layers[1].kept
    assert kept.dtype == "float16"
    np.testing.assert_array_equal(kept.numpy(), np.array([30000.0, 1.0], "float16"))
