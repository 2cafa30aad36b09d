"""Random small Functional models on random meshes with random legal layouts."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest

from .case import CLASSES, Case, Data, Layout
from .harness import compare
from .optimizer_zoo import OPTIMIZERS
from .repeatable import repeatable

ACTIVATIONS = ("linear", "relu", "gelu", "tanh", "sigmoid", "softplus", "swish", "elu")
WIDTHS = (4, 8, 12)
MESHES = ({"data": 2}, {"data": 3}, {"model": 2}, {"data": 2, "model": 2}, {"data": 2, "model": 4})
FEATURES = 8


@dataclasses.dataclass(frozen=True)
class Net:
    """Dense layers; layer i reads one earlier tensor and may add another of its own width."""

    widths: tuple[int, ...]
    activations: tuple[str, ...]
    sources: tuple[int, ...]
    skips: tuple[int | None, ...]
    norms: tuple[bool, ...]
    cuts: tuple[str, ...]

    def build(self) -> keras.Model:
        tensors = [keras.Input((FEATURES,), name="features")]
        for i, width in enumerate(self.widths):
            x = tensors[self.sources[i] % len(tensors)]
            if self.norms[i]:
                x = keras.layers.LayerNormalization(name=f"norm{i}")(x)
            x = keras.layers.Dense(width, self.activations[i], name=f"dense{i}")(x)
            skip = self.skips[i]
            same = [t for t in tensors if t.shape[-1] == width]
            if skip is not None and same:
                x = keras.layers.Add(name=f"add{i}")([x, same[skip % len(same)]])
            tensors.append(x)
        joint = tensors[1:] if len(tensors) > 2 else [*tensors]
        x = keras.layers.Concatenate(name="joint")(joint)
        return keras.Model(tensors[0], keras.layers.Dense(CLASSES, name="head")(x))

    def layouts(self) -> dict[str, Layout]:
        found: dict[str, Layout] = {}
        for i, cut in enumerate(self.cuts):
            if cut == "columns":
                found[f"dense{i}/kernel"] = (None, "model")
                found[f"dense{i}/bias"] = ("model",)
            elif cut == "rows":
                found[f"dense{i}/kernel"] = ("model", None)
        return found


@st.composite
def nets(draw: Any) -> Net:
    depth = draw(st.integers(1, 4))

    def each(strategy: st.SearchStrategy) -> tuple:
        return tuple(draw(strategy) for _ in range(depth))

    return Net(
        widths=each(st.sampled_from(WIDTHS)),
        activations=each(st.sampled_from(ACTIVATIONS)),
        sources=each(st.integers(0, 3)),
        skips=each(st.none() | st.integers(0, 3)),
        norms=each(st.booleans()),
        cuts=each(st.sampled_from(("whole", "columns", "rows"))),
    )


def _data(seed: int, samples: int) -> Data:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, FEATURES))
    y = rng.integers(0, CLASSES, samples).astype("int32")
    return x, y, rng.uniform(0.1, 3, samples)


def _check(net: Net, axes: dict[str, int], samples: int, engine: str) -> None:
    case = Case(
        name="random",
        build=net.build,
        data=_data,
        layout_map=net.layouts(),
    )
    compare(
        case,
        axes,
        optimizer=OPTIMIZERS["sgd_momentum"],
        engine=engine,
        samples=samples,
        epochs=1,
    )


GIVEN = {
    "net": nets(),
    "axes": st.sampled_from(MESHES),
    "samples": st.integers(1, 16),
}


@repeatable(2)
@hypothesis.given(**GIVEN)
def test_random_models_equal_one_device(
    engine: str, net: Net, axes: dict[str, int], samples: int
) -> None:
    _check(net, axes, samples, engine)


@pytest.mark.long
@repeatable(100)
@hypothesis.given(**GIVEN)
def test_many_random_models_equal_one_device(
    engine: str, net: Net, axes: dict[str, int], samples: int
) -> None:
    _check(net, axes, samples, engine)
