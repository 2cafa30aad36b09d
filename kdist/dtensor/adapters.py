"""How the two factors of LoRA (Hu et al., 2021) are cut where the weight that they adapt is.

A layer adds their product to that weight. Factors that are whole would have each device compute
that product whole, and in the backward pass gather the whole gradient of the weight. Cut like the
dims of the weight that they have, what is left to send is of the size of a factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kdist.sharding.dims import Dims

import keras

ADAPTED = {
    keras.layers.Dense: "kernel",
    keras.layers.EinsumDense: "kernel",
    keras.layers.Embedding: "embeddings",
}
"""The weight that Keras adapts, by layer; convolutions keep factors whole."""


def adapter_layouts(
    layers: Iterable[keras.layers.Layer], cut: Mapping[int, Dims]
) -> Iterator[tuple[keras.Variable, Dims]]:
    """The factors whose weight is cut, and their layouts.

    Args:
        layers: Layers of a model.
        cut: By identity, the layout of each weight.
    """
    for layer in layers:
        name = next((n for kind, n in ADAPTED.items() if isinstance(layer, kind)), "")
        weights = {v.name: v for v in layer.weights}
        names = (name, f"lora_{name}_a", f"lora_{name}_b")
        found = [weights[one] for one in names if one in weights]
        if len(found) < len(names):
            continue
        weight, first, second = found
        dims, shapes = cut[id(weight)], [tuple(one.shape) for one in found]
        # A kernel that is quantized to four bits has another shape.
        if shapes[1][:-1] == shapes[0][:-1] and shapes[2][1:] == shapes[0][-1:]:
            yield first, (*dims[:-1], None)
            yield second, (None, dims[-1])
