"""Models whose gradients travel compressed: meshes, optimizers, and what is compared of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import kdist
from kdist import CompressionConfig, PowerSGD
from kdist.config.compression import Compressor

import keras
import numpy as np

from .matrix import MESHES

CUTS = {".*up/kernel": (None, "model"), ".*up/bias": ("model",), ".*down/kernel": ("model", None)}
STORED_CUT = {".*up/kernel": ("data", None), ".*down/kernel": (None, "data")}
STORED_CUT_TWICE = {".*up/kernel": ("data", "model"), ".*down/kernel": ("model", "data")}
PIPES = {
    "pipe2_data2": {"pipe": 2, "data": 2},
    "pipe2_data2_model2": {"pipe": 2, "data": 2, "model": 2},
}
# The same gradients, since no layer of the model couples rows; of one program for all replicas.
GLOBALS = {f"global_{name}": MESHES[name] for name in ("data4", "data2_model2")}
GLOBALS |= {f"global_{name}": axes for name, axes in PIPES.items()}
ROWS, INPUTS, OUTPUTS, STEPS = 8, 12, 8, 4
WARM = PowerSGD(rank=2)
COLD = PowerSGD(rank=2, warm_start=False)
BLIND = PowerSGD(rank=2, error_feedback=False)
RULES: Mapping[str, Compressor] = {
    "fp16": "fp16",
    "bf16": "bf16",
    "rank2": WARM,
    "cold": COLD,
    "blind": BLIND,
}


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(0.2, momentum=0.9, **options)


def scaled(**options: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(
        sgd(**options), initial_scale=2.0**10, dynamic_growth_steps=2
    )


def adam(**options: Any) -> Any:
    return keras.optimizers.Adam(0.01, **options)


def lamb(**options: Any) -> Any:
    return keras.optimizers.Lamb(0.01, **options)


OPTIMIZERS: Mapping[str, Callable[..., Any]] = {
    "sgd": sgd,
    "scaled": scaled,
    "lamb": lamb,  # sees whole tensors: of cut ones, parts come together on one device
    "clipped": lambda: adam(global_clipnorm=0.05),
    "accumulating": lambda: sgd(gradient_accumulation_steps=2),
    "averaging": lambda: adam(use_ema=True, ema_overwrite_frequency=3),
}


def build(inputs: int = INPUTS) -> keras.Model:
    keras.utils.set_random_seed(7)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            layers.Dense(16, "gelu", name="up"),
            layers.Dense(OUTPUTS, name="down"),
        ]
    )


def batches(
    rows: int = ROWS, steps: int = STEPS, inputs: int = INPUTS
) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        (rng.normal(size=(rows, inputs)), rng.normal(size=(rows, OUTPUTS))) for _ in range(steps)
    ]


def parallel(
    mesh: Mapping[str, int],
    by: Any,
    compression: Any,
    run_eagerly: bool = False,
    model: Callable[[], keras.Model] = build,
    **config: Any,
) -> keras.Model:
    config.setdefault("layout_map", CUTS if "model" in mesh else None)
    if "pipe" in mesh:
        together = config.get("batch_semantics") == "global"
        pipeline = kdist.PipelineConfig(micro_batches=1 if together else 2)
        config.setdefault("pipeline", pipeline)
    settings = kdist.ParallelConfig(mesh=kdist.mesh(**mesh), compression=compression, **config)
    made = kdist.parallelize(model(), settings)
    made.compile(by, "mse", run_eagerly=run_eagerly)
    return made


def train(model: keras.Model, data: Any) -> list[float]:
    return [float(model.train_on_batch(x, y)) for x, y in data]


def loop(model: keras.Model, data: Any) -> None:
    for x, y in data:
        _, gradients = kdist.gradients(model, x, y)
        kdist.apply_gradients(model, gradients)


def weights(model: keras.Model) -> dict[str, np.ndarray]:
    return {"/".join(v.path.split("/")[-2:]): v.numpy() for v in model.weights}


def assert_equal(model: keras.Model, other: keras.Model) -> None:
    for (name, a), b in zip(weights(model).items(), weights(other).values()):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9, err_msg=name)


def halves(dim: int, size: int) -> list[tuple[slice, ...]]:
    cut = [slice(0, size // 2), slice(size // 2, size)]
    return [tuple(c if d == dim else slice(None) for d in range(2)) for c in cut]


PARTS = {"up/kernel": halves(1, 16), "down/kernel": halves(0, 16)}


def rule_of(compressor: Compressor) -> tuple[CompressionConfig, Callable[[str], Compressor]]:
    """A compressor for the kernels; norms and vectors travel as they are."""
    config = CompressionConfig(patterns={".*kernel": compressor})
    return config, lambda name: compressor if name.endswith("kernel") else "none"
