"""Which products of a graph of layers reach which, with nothing but elementwise layers between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kdist._compat import keras_models
from kdist.plan.convolutions import convolution_of
from kdist.plan.products import Product

import keras

Weight = tuple[keras.Variable, int]
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
_PICTURES = ["AveragePooling", "Cropping", "GlobalAveragePooling", "GlobalMaxPooling", "MaxPooling"]
_PICTURES += ["SpatialDropout", "UpSampling", "ZeroPadding"]
CHANNEL_BY_CHANNEL: tuple[type, ...] = (
    *(getattr(keras.layers, f"{one}{dims}D") for one in _PICTURES for dims in (1, 2, 3)),
    keras.layers.Resizing,
)
"""Layers that look at each channel by itself, where a convolution gave or takes them."""
_RESIZED = ("bicubic", "bilinear", "nearest")
"""Interpolations of which `kdist.dtensor.windows` resizes parts."""
ELEMENTWISE_OPERATIONS = frozenset(
    ["Abs", "Add", "Cast", "Celu", "Divide", "Elu", "Exp", "Gelu", "HardSigmoid", "HardSilu"]
    + ["LeakyRelu", "LogSigmoid", "Maximum", "Minimum", "Multiply", "Negative", "Relu", "Relu6"]
    + ["Selu", "Sigmoid", "Silu", "Softplus", "Softsign", "Square", "Subtract", "Tanh"]
    + ["TrueDivide"]
)


TOGETHER = (
    keras.activations.glu,
    keras.activations.log_softmax,
    keras.activations.softmax,
    keras.activations.sparsemax,
)
"""Activations in which features meet."""


class ProductGraph:
    """The products of a model that is a graph of layers, and of the graphs of layers inside it.

    What has weights for each feature may stand between two of them: it is cut as these are.

    Args:
        functional: The model's graph.
        products: What layers of the model multiply by, by identity of the layer.

    Attributes:
        products: Those of the graph, in the order in which they run.
        between: By path of a product, weights between its sources and it, each with its dim of
            features.
    """

    def __init__(self, functional: Any, products: Mapping[int, Product]) -> None:
        self._known = products
        self._convolutions: set[int] = set()
        self.between: dict[str, list[Weight]] = {}
        self._made_by: dict[int, Any] = {}
        self._same: dict[int, list[Any]] = {}  # what an inner graph takes: given at each call
        self._taken: dict[int, list[Any]] = {}  # by each operation, at all of its calls
        self._read: dict[int, set[int]] = {}  # by which operations
        for node in [*self._walked(functional)]:
            given = [one for t in node.arguments.keras_tensors for one in self._origins(t)]
            if convolution_of(node.operation) is not None:
                self._convolutions.add(id(node.operation))
            self._taken.setdefault(id(node.operation), []).extend(given)
            for tensor in given:
                self._read.setdefault(id(tensor), set()).add(id(node.operation))
        for tensor in functional.outputs:
            for one in self._origins(tensor):
                self._read.setdefault(id(one), set()).add(id(functional))
        self.products = [products[key] for key in self._taken if key in products]

    def _walked(self, functional: Any) -> Iterator[Any]:
        """Its nodes, with those of the graphs inside in their place."""
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

    def _origins(self, tensor: Any) -> list[Any]:
        """What a tensor is, where it was made; several of one that an inner graph is given."""
        found, waiting, seen = [], [tensor], set()
        for one in waiting:
            if id(one) not in seen:
                seen.add(id(one))
                found += [] if id(one) in self._same else [one]
                waiting += self._same.get(id(one), [])
        return found

    def sources(self, product: Product) -> list[Product]:
        """The products that reach one elementwise; none if something else does too.

        Nor if anything else reads what lies between, which is to be cut.
        """
        layer = next(key for key in self._taken if self._known.get(key) is product)
        found: dict[str, Product] = {}
        between: list[Weight] = []
        queue, seen, inside = list(self._taken[layer]), set(), {layer}
        convolved, pictures = layer in self._convolutions, False
        for tensor in queue:
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            maker = self._made_by.get(id(tensor))
            source = None if maker is None else self._known.get(id(maker.operation))
            if maker is not None and _meet(maker.operation):
                return []
            if maker is not None and source is not None:
                found[source.path] = source
                convolved |= id(maker.operation) in self._convolutions
            elif maker is not None and is_elementwise(maker):
                pictures |= isinstance(maker.operation, CHANNEL_BY_CHANNEL)
                inside.add(id(maker.operation))
                for given in maker.arguments.keras_tensors:
                    queue += self._origins(given)
                between += weights_of_features(maker.operation)
            else:
                return []
        if any(self._read[one] - inside for one in seen) or pictures and not convolved:
            return []
        self.between[product.path] = between
        return list(found.values())


def weights_of_features(operation: Any) -> Iterator[Weight]:
    """Weights of what is elementwise that have an entry for each feature, and the dim of these."""
    if isinstance(operation, keras.layers.BatchNormalization):
        yield from ((variable, 0) for variable in operation.weights if len(variable.shape) == 1)
    elif isinstance(operation, keras.layers.PReLU):
        last = len(operation.alpha.shape) - 1
        if operation.alpha.shape[last] > 1:  # not one for all features
            yield operation.alpha, last
    elif (one := convolution_of(operation)) is not None:
        yield one.filters, one.taken
        if one.bias is not None:
            yield one.bias, 0


def _meet(operation: Any) -> bool:
    """Whether the activation of a layer makes a feature of several."""
    return getattr(operation, "activation", None) in TOGETHER


def is_elementwise(node: Any) -> bool:
    """Whether each feature of what a node gives is made of that feature alone."""
    operation = node.operation
    if isinstance(operation, keras.layers.BatchNormalization):
        return operation.axis in (-1, len(node.outputs[0].shape) - 1)
    if isinstance(operation, CHANNEL_BY_CHANNEL):
        return _looks_at_channels(operation)
    if isinstance(operation, keras.layers.Layer):
        one = convolution_of(operation)
        return isinstance(operation, ELEMENTWISE_LAYERS) or one is not None and one.by_channel
    return type(operation).__name__ in ELEMENTWISE_OPERATIONS


def _looks_at_channels(layer: Any) -> bool:
    """Whether a layer of `CHANNEL_BY_CHANNEL` does so on parts of them."""
    if getattr(layer, "data_format", "channels_last") != "channels_last":
        return False
    resized = getattr(layer, "interpolation", "nearest") in _RESIZED
    return resized and not getattr(layer, "antialias", False)
