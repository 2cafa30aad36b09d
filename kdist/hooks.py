"""Declared activation layouts, applied while a program is traced for DTensor.

For the time of one trace, `call` of each declared layer (on the instance) lays its inputs and its
output out as declared. Outside of a trace, layers are untouched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from kdist import spmd
from kdist.dims import Dims
from kdist.store import ModelLayouts


@contextlib.contextmanager
def declared_layouts(layouts: ModelLayouts) -> Iterator[None]:
    """Applies `kdist.shard` declarations and activation patterns within the block."""
    wanted: dict[int, tuple[keras.layers.Layer, tuple[Dims | None, ...], Dims | None]] = {}
    for layer, resolved in layouts.layers:
        wanted[id(layer)] = (layer, resolved.inputs, resolved.output)
    for layer, dims in layouts.outputs:
        _, inputs, _ = wanted.get(id(layer), (layer, (), None))
        wanted[id(layer)] = (layer, inputs, dims)
    hooked = [entry for entry in wanted.values() if any(entry[1]) or entry[2] is not None]
    for layer, inputs, output in hooked:
        object.__setattr__(layer, "call", _laid_out(layer.call, inputs, output))
    try:
        yield
    finally:
        for layer, _, _ in hooked:
            object.__delattr__(layer, "call")


def _laid_out(call: Callable, inputs: tuple[Dims | None, ...], output: Dims | None) -> Callable:
    def laid_out(*args: Any, **kwargs: Any) -> Any:
        operands = list(args)
        for i, dims in enumerate(inputs):
            if dims is not None and i < len(operands):
                operands[i] = _relayout(operands[i], dims)
        outputs = call(*operands, **kwargs)
        return outputs if output is None else _relayout(outputs, output)

    return laid_out


def _relayout(value: Any, dims: Dims) -> Any:
    return keras.tree.map_structure(lambda t: spmd.relayout_active(t, dims), value)
