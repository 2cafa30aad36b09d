"""Which convolutions run on the channels that a device has, and how what they take is cut then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kdist.dtensor import limits, relayout
from kdist.plan.convolutions import convolution_of, convolves
from kdist.sharding.dims import Dim, Dims

import keras


@dataclasses.dataclass(frozen=True)
class ConvInParts:
    """A convolution that runs on parts of its filters.

    Attributes:
        layer: The layer.
        weights: Those of which it takes parts; its filters first.
        taken: How many channels it takes, and what cuts them.
        given: How many it gives, and what cuts them.
    """

    layer: keras.layers.Layer
    weights: tuple[keras.Variable, ...]
    taken: tuple[int, Dim]
    given: tuple[int, Dim]


def convolutions_in_parts(
    layers: Sequence[Any], read: Callable[[keras.Variable], Dims]
) -> Iterator[ConvInParts]:
    """The convolutions whose channels are cut; `kdist.dtensor.windows` says how they run.

    Not those in recurrent cells, whose weights are gathered.

    Args:
        layers: Layers of a model.
        read: Tells the layout in which a device has a weight.
    """
    cells: list[Any] = [
        one for one in layers if isinstance(one, limits.GATHER_ON_READ) and not convolves(one)
    ]
    in_cells = {id(variable) for cell in cells for variable in cell.weights}
    for layer in layers:
        one = convolution_of(layer)
        if one is None or id(one.filters) in in_cells:
            continue
        dims = read(one.filters)
        if {n for n, dim in enumerate(dims) if dim} - {one.taken, one.given} or not any(dims):
            continue
        shape = one.filters.shape
        taken, given = ((shape[dim], dims[dim]) for dim in (one.taken, one.given))
        weights = [one.filters]
        if one.before is not None:
            rest = (None,) * (len(one.before.shape) - 2)
            if read(one.before) != (*rest, taken[1], None):
                continue
            weights.append(one.before)
        if one.bias is not None and read(one.bias) == given[1:]:
            weights.append(one.bias)
        yield ConvInParts(layer, tuple(weights), taken, given)


def on_parts(call: Callable, one: ConvInParts) -> Callable:
    """`call` of a convolution with channels cut as its filters are, of the gradients too.

    A class of one's own may take and give other tensors too, such as masks: these are whole.
    """
    rank = len(one.weights[0].shape)

    def laid_out(tensor: Any, channels: int, over: Dim) -> Any:
        shape = getattr(tensor, "shape", None)
        if shape is not None and len(shape) == rank and shape[-1] == channels:
            return relayout.masked(relayout.channels_cut)(tensor, over)
        return relayout.masked(relayout.rows_only)(tensor)

    def cut(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = keras.tree.map_structure(lambda x: laid_out(x, *one.taken), (args, kwargs))
        return keras.tree.map_structure(lambda y: laid_out(y, *one.given), call(*args, **kwargs))

    return cut
