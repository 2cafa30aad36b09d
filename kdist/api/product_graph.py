"""Which products of a graph of layers reach which, with nothing but elementwise layers between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kdist._compat import keras_models
from kdist.plan.products import Product

import keras

ELEMENTWISE_LAYERS = (
    keras.layers.Activation,
    keras.layers.ActivityRegularization,
    keras.layers.Add,
    keras.layers.Dropout,
    keras.layers.ELU,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
    keras.layers.Identity,
    keras.layers.LeakyReLU,
    keras.layers.Multiply,
    keras.layers.PReLU,
    keras.layers.ReLU,
    keras.layers.Rescaling,
    keras.layers.Subtract,
)
ELEMENTWISE_OPERATIONS = frozenset(
    ["Abs", "Add", "Cast", "Celu", "Divide", "Elu", "Exp", "Gelu", "HardSigmoid", "HardSilu"]
    + ["LeakyRelu", "LogSigmoid", "Maximum", "Minimum", "Multiply", "Negative", "Relu", "Relu6"]
    + ["Selu", "Sigmoid", "Silu", "Softplus", "Softsign", "Square", "Subtract", "Tanh"]
    + ["TrueDivide"]
)


class ProductGraph:
    """The products of a model that is a graph of layers, and of the graphs of layers inside it.

    Args:
        functional: The model's graph.
        products: What layers of the model multiply by, by identity of the layer.

    Attributes:
        products: Those of the graph, in the order in which they run.
    """

    def __init__(self, functional: Any, products: Mapping[int, Product]) -> None:
        self._known = products
        self._made_by: dict[int, Any] = {}
        self._same: dict[int, list[Any]] = {}  # what an inner graph takes: given at each call
        self._taken: dict[int, list[Any]] = {}  # by each operation, at all of its calls
        for node in self._walked(functional):
            taken = self._taken.setdefault(id(node.operation), [])
            taken += node.arguments.keras_tensors
        self.products = [products[key] for key in self._taken if key in products]

    def _walked(self, functional: Any) -> Iterator[Any]:
        """Nodes in the order in which they run; a graph inside is joined to where it is called."""
        for node in keras_models.nodes_in_order(functional):
            inner = keras_models.functional_of(node.operation)
            if inner is None or len(inner.inputs) != len(node.arguments.keras_tensors):
                self._made_by |= {id(out): node for out in node.outputs}
                yield node
                continue
            yield from self._walked(inner)
            for own, given in zip(inner.inputs, node.arguments.keras_tensors):
                self._same.setdefault(id(own), []).append(given)
            for out, own in zip(node.outputs, inner.outputs):
                self._same[id(out)] = [own]

    def sources(self, product: Product) -> list[Product]:
        """The products that reach one elementwise; none if something else does too."""
        layer = next(key for key in self._taken if self._known.get(key) is product)
        found: dict[str, Product] = {}
        queue, seen = list(self._taken[layer]), set()
        for tensor in queue:
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if id(tensor) in self._same:
                queue += self._same[id(tensor)]
                continue
            maker = self._made_by.get(id(tensor))
            source = None if maker is None else self._known.get(id(maker.operation))
            if source is not None:
                found[source.path] = source
            elif maker is not None and is_elementwise(maker):
                queue += maker.arguments.keras_tensors
            else:
                return []
        return list(found.values())


def is_elementwise(node: Any) -> bool:
    """Whether each feature of what a node gives is made of that feature alone."""
    operation = node.operation
    if isinstance(operation, keras.layers.BatchNormalization):
        return operation.axis in (-1, len(node.outputs[0].shape) - 1)
    if isinstance(operation, keras.layers.Layer):
        return isinstance(operation, ELEMENTWISE_LAYERS)
    return type(operation).__name__ in ELEMENTWISE_OPERATIONS
