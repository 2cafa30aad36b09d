"""Sequence parallelism: tensors between products that are cut over an axis are cut along dim 1.

What ends in a sum over an inner axis gives each device a part of the sequence, a reduce-scatter in
the place of an all-reduce; what a kernel cut by columns takes is gathered. Norms, dropout and sums
in between follow DTensor's propagation, on a part of the tokens each (Korthikanti et al. 2022,
arXiv:2205.05198).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kdist._compat.keras_models import call_of
from kdist.dtensor import relayout
from kdist.plan.products import gives_dim_of_input, product_of
from kdist.sharding.dims import Dim, Dims

import keras
import tensorflow as tf

SEQUENCE = 1
"""The dim of a tensor (batch, length, ...) that is cut."""


@dataclasses.dataclass(frozen=True)
class End:
    """A layer at the end of a stretch of tensors that are cut along the sequence.

    Attributes:
        layer: The layer.
        sums_over: Cuts what it sums over, so what it gives is a sum of parts; None if nothing does.
        takes_whole: Whether it takes all of the sequence, since its columns are cut.
        columns: Of a table, the number of its columns: what has others is no look-up.
    """

    layer: keras.layers.Layer
    sums_over: Dim = None
    takes_whole: bool = False
    columns: int | None = None


def ends(layers: Iterable[keras.layers.Layer], read: Callable[[Any], Dims]) -> Iterator[End]:
    """The ends among layers: `Dense`, `EinsumDense` and `Embedding` whose weights are cut.

    Args:
        layers: Of a built model.
        read: Tells the layout of a weight as operations read it.
    """
    for layer in layers:
        if isinstance(layer, keras.layers.Embedding) and layer.built:
            rows, columns = read(layer.weights[0])
            if rows and not columns:
                # Turned round, it is a product of the same table, by columns.
                yield End(layer, rows, takes_whole=True, columns=layer.output_dim)
            continue
        product = product_of(layer)
        if product is None:
            continue
        dims = read(next(v for v in layer.weights if v.path == product.path))
        taken = [dims[dim] for dim in product.takes if dims[dim]]
        given = [dims[dim] for dim in product.gives if dims[dim]]
        if given and not taken:
            yield End(layer, takes_whole=True)
        elif len(taken) == 1 and not given and gives_dim_of_input(layer, SEQUENCE):
            yield End(layer, taken[0])


def along_sequence(end: End) -> Callable:
    """`call` of a layer at an end: what it takes is whole along the sequence, what it gives cut."""
    call = call_of(end.layer)

    def whole(value: Any) -> Any:
        return relayout.masked(relayout.gathered)(value) if _has_sequence(value) else value

    def laid_out(*args: Any, **kwargs: Any) -> Any:
        if end.takes_whole:  # one input, under whatever name
            args, kwargs = keras.tree.map_structure(whole, (args, kwargs))
        made = call(*args, **kwargs)
        if end.sums_over is None or not _has_sequence(made):
            return made
        if end.columns is not None and made.shape[-1] != end.columns:
            return made
        return relayout.masked(relayout.cut_along)(made, SEQUENCE, end.sums_over)

    return laid_out


def _has_sequence(tensor: Any) -> bool:
    """Whether a tensor is (batch, length, features...)."""
    known = isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating  # not a ragged one
    return known and (tensor.shape.rank or 0) > 2
