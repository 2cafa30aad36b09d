"""Random Functional graphs in which masks come, go and are taken off.

Every tensor is (batch, tokens, width), so that every operation takes every tensor. Some have the
mask of an embedding. Attention takes the mask off its inputs, a layer without effect hands its
input itself on, and layers and a nested model are called several times: what a tensor's mask is
then depends on which object it is, and on what ran before.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import keras
import numpy as np
from keras import layers

TOKENS, WIDTH, VOCABULARY = 3, 4, 8
KINDS = ("dense", "add", "multiply", "attention", "norm", "nothing", "nested", "concatenate")


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        kind: One of `KINDS`.
        a: Which earlier tensor it takes, modulo their number.
        b: The second one of those that take two.
        shared: Whether the layer is the one that all steps of the kind share.
    """

    kind: str
    a: int
    b: int
    shared: bool


@dataclasses.dataclass(frozen=True)
class Net:
    """A graph: its steps, and which of their tensors are outputs besides the last one."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    def name(self, i: int) -> str:
        """The name of the layer that step `i` calls."""
        step = self.steps[i]
        return step.kind if step.shared or step.kind == "nested" else f"{step.kind}{i}"

    def build(self) -> keras.Model:
        """The model: (tokens, features) -> outputs of shape (batch, tokens, width)."""
        keras.utils.set_random_seed(0)
        made: dict[str, Any] = {"nested": _nested()}
        tokens = keras.Input((TOKENS,), dtype="int32", name="tokens")
        features = keras.Input((TOKENS, WIDTH), name="features")
        table = layers.Embedding(VOCABULARY, WIDTH, "normal", mask_zero=True, name="table")
        tensors = [features, table(tokens)]
        for i, step in enumerate(self.steps):
            a, b = (tensors[-1 - n % len(tensors)] for n in (step.a, step.b))
            name = self.name(i)
            layer = made.get(name) or _layer(step.kind, name)
            made[name] = layer
            tensors.append(_call(layer, step.kind, a, b))
        chosen = [tensors[-1], *(tensors[-1 - n % len(tensors)] for n in self.outputs)]
        outputs = list({id(t): t for t in chosen}.values())
        return keras.Model([tokens, features], outputs, name="net")


def _layer(kind: str, name: str) -> keras.Layer:
    makers = {
        "dense": lambda: layers.Dense(WIDTH, "tanh", name=name),
        "add": lambda: layers.Add(name=name),
        "multiply": lambda: layers.Multiply(name=name),
        "attention": lambda: layers.MultiHeadAttention(2, 2, name=name),
        "norm": lambda: layers.LayerNormalization(name=name),
        "nothing": lambda: layers.Dropout(0.0, name=name),
        "concatenate": lambda: layers.Concatenate(name=name),
    }
    return makers[kind]()


def _call(layer: Any, kind: str, a: Any, b: Any) -> Any:
    if kind == "attention":
        return layer(a, b)
    if kind in ("add", "multiply"):
        return layer([a, b])
    if kind == "concatenate":
        return layer([a, b])[:, :, ::2]
    return layer(a)


def _nested() -> keras.Model:
    """The block of the first transformer."""
    x = inputs = keras.Input((TOKENS, WIDTH))
    x = layers.Add()([x, layers.MultiHeadAttention(1, WIDTH)(x, x)])
    return keras.Model(inputs, layers.LayerNormalization()(x), name="nested")


@st.composite
def nets(draw: Any) -> Net:
    """Random graphs, those that take masks off more often than others."""
    kinds = st.sampled_from((*KINDS, "attention", "add"))
    near = st.integers(0, 3)
    step = st.builds(Step, kinds, near, near, st.booleans())
    steps = draw(st.lists(step, min_size=2, max_size=8))
    return Net(tuple(steps), tuple(draw(st.lists(near, max_size=2))))


def data(seed: int, samples: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Inputs of a net, and targets for one output."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, VOCABULARY, (samples, TOKENS)).astype("int32")
    lengths = 1 + np.arange(samples) % TOKENS
    tokens[np.arange(TOKENS)[None, :] >= lengths[:, None]] = 0
    features = rng.normal(size=(samples, TOKENS, WIDTH))
    return [tokens, features], rng.normal(size=(samples, TOKENS, WIDTH))
