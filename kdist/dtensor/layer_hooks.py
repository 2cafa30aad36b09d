"""Declared activation layouts, applied while a program is traced for DTensor.

For the time of one trace, `call` of each declared layer (on the instance) lays its inputs and its
output out as declared. Outside of a trace, layers are untouched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from kdist._compat.keras_models import call_of, calls_kept, give_call
from kdist.config.operands import lay_out, operands
from kdist.dtensor import limits, relayout
from kdist.dtensor.along_sequence import along_sequence
from kdist.dtensor.channels import on_parts
from kdist.dtensor.model_layouts import ModelLayouts
from kdist.program.table_layers import looking_up
from kdist.sharding.dims import Dim, Dims

import keras
import tensorflow as tf

POOLING = (keras.layers.MaxPooling1D.__mro__[1], keras.layers.AveragePooling1D.__mro__[1])
"""DTensor pools on parts of the batch, not on parts of the rest, unless `windows` has it do so."""
WINDOWED = (*limits.CONVOLUTIONS, *POOLING)
"""Layers of windows; `channels` has the convolutions that run on parts of channels."""


@contextlib.contextmanager
def declared_layouts(layouts: ModelLayouts) -> Iterator[None]:
    """Applies `kdist.shard` declarations and activation patterns within the block."""
    # First, so that what a look-up on the host returns is laid out as declared.
    with looking_up(layouts.fetched_layers), _laid_out_calls(layouts):
        yield


@contextlib.contextmanager
def _laid_out_calls(layouts: ModelLayouts) -> Iterator[None]:
    declared = {id(layer): (layer, one.inputs, one.outputs) for layer, one in layouts.layers}
    patterns = {id(layer): (layer, dims) for layer, dims in layouts.outputs}
    hooked = [(*entry, patterns.pop(key, (None, None))[1]) for key, entry in declared.items()]
    hooked += [(layer, (), (), dims) for layer, dims in patterns.values()]
    hooked = [entry for entry in hooked if any(entry[1:])]
    in_parts = {id(one.layer): one for one in layouts.convolutions_in_parts()}
    # Where channels are cut, `windows` has them pooled as they come; not what a sequence is cut in.
    kinds = limits.CONVOLUTIONS if in_parts and not layouts.sequence else WINDOWED
    windowed = [layer for layer in layouts.model_layers if isinstance(layer, kinds)]
    tables = [
        (layer, _columns(layer, layouts))
        for layer in layouts.model_layers
        if isinstance(layer, keras.layers.Embedding)
        and layer.built  # one that is never called has no table
        and layouts.any_cut
        and layer not in layouts.fetched_layers
    ]
    texts = [
        layer for layer in layouts.model_layers if isinstance(layer, keras.layers.TextVectorization)
    ]
    laid_out = {id(entry[0]) for entry in hooked}
    sequence = [end for end in layouts.sequence if id(end.layer) not in laid_out]
    changed = [*windowed, *texts, *(entry[0] for entry in hooked), *(layer for layer, _ in tables)]
    changed += [end.layer for end in sequence]
    with calls_kept(changed):
        for layer in windowed if layouts.any_cut else ():
            one, call = in_parts.get(id(layer)), call_of(layer)
            give_call(layer, on_parts(call, one) if one else _channels_whole(call))
        for layer in texts:
            give_call(layer, _rows_known(call_of(layer)))
        for layer, dim in tables:
            give_call(layer, _columns_pinned(call_of(layer), dim, layer.output_dim))
        for end in sequence:
            give_call(end.layer, along_sequence(end))
        for layer, inputs, outputs, every in hooked:
            give_call(layer, _laid_out(layer, inputs, outputs, every))
        yield


def _channels_whole(call: Callable) -> Callable:
    """`call` on values, and with results and gradients, that are cut by rows of the batch at most.

    What reads the results may be cut by channels; DTensor would cut those of the inputs alike.
    """

    def whole(*args: Any, **kwargs: Any) -> Any:
        rows_only = relayout.masked(relayout.rows_only)
        # One input, under whatever name.
        args, kwargs = keras.tree.map_structure(rows_only, (args, kwargs))
        return keras.tree.map_structure(rows_only, call(*args, **kwargs))

    return whole


def _rows_known(call: Callable) -> Callable:
    """`call` of a layer whose output says how many rows it has: splitting texts loses that."""

    def known(*args: Any, **kwargs: Any) -> Any:
        outputs = call(*args, **kwargs)
        if not isinstance(outputs, tf.Tensor) or outputs.shape.rank is None:  # a ragged one
            return outputs
        rows = operands((args, kwargs))[0].shape[0]
        return tf.ensure_shape(outputs, [rows, *outputs.shape[1:]])

    return known


def _columns(layer: keras.layers.Layer, layouts: ModelLayouts) -> Dim:
    """What cuts the columns of an embedding table as it is read."""
    return layouts.read(id(layer.weights[0]))[1]


def _columns_pinned(call: Callable, dim: Dim, columns: int) -> Callable:
    """`call` of an embedding whose output is cut by columns as its table is.

    Otherwise what reads the output decides its layout, and DTensor's look-up takes no other cut of
    the columns than the table's. What has another number of columns is no look-up: logits, of a
    `ReversibleEmbedding`.
    """

    def pinned(*args: Any, **kwargs: Any) -> Any:
        made = call(*args, **kwargs)
        looked_up = isinstance(made, tf.Tensor) and made.shape[-1:] == [columns]
        return relayout.masked(relayout.last_dim_cut)(made, dim) if looked_up else made

    return pinned


def _laid_out(
    layer: keras.layers.Layer,
    inputs: tuple[Dims, ...],
    outputs: tuple[Dims, ...],
    every: Dims | None,
) -> Callable:
    """`call` with inputs and outputs as declared; `every` is for all outputs, and wins."""
    call, name = call_of(layer), f"layer {layer.path or layer.name!r}"
    change = relayout.masked(relayout.relayout_active)

    def laid_out(*args: Any, **kwargs: Any) -> Any:
        written = [list(args), list(kwargs.values())]
        args, values = lay_out(written, inputs, "input", name, change)
        results = call(*args, **dict(zip(kwargs, values, strict=True)))
        wanted = outputs if every is None else (every,) * len(operands(results))
        return lay_out(results, wanted, "output", name, change)

    return laid_out
