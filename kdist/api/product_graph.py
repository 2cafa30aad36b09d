"""Which products of a graph of layers reach which, with nothing but elementwise layers between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kdist._compat import keras_graphs, keras_models
from kdist.plan.column_row import ProductGroup
from kdist.plan.convolutions import convolution_of
from kdist.plan.products import Product, Role

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
OVER_PLACES = frozenset(["Amax", "Amin", "Max", "Mean", "Min", "Sum"])
"""Operations along dims that they are told."""
TOGETHER = (
    keras.activations.glu,
    keras.activations.log_softmax,
    keras.activations.softmax,
    keras.activations.sparsemax,
)
"""Activations in which features meet."""


class ProductGraph:
    """The products of a model that is a graph of layers, and of the graphs of layers inside it.

    Layers with a `call` of their own are graphs too, if they have convolutions. What has weights
    for each feature may stand between two products: it is cut as these are.

    Args:
        functional: The model's graph.
        products: What layers of the model multiply by, by identity of the layer.

    Attributes:
        between: By path of a product that is cut by rows, weights of what lies before it, each
            with its dim of features.
        opened: Identities of layers with a `call` of their own whose graphs are part of it.
        closed: Why other such layers are not, by path of what they have inside.
    """

    def __init__(self, functional: Any, products: Mapping[int, Product]) -> None:
        self._known = products
        self.opened: set[int] = set()
        self.closed: dict[str, str] = {}
        self.between: dict[str, list[Weight]] = {}
        self._same: dict[int, list[Any]] = {}  # what an inner graph takes: given at each call
        self._calls: dict[int, list[Any]] = {}  # by identity of an operation: nodes
        self._made_by: dict[int, int] = {}  # by that of a tensor
        self._read_by: dict[int, list[int]] = {}
        for node in [*self._walked(functional)]:
            operation = id(node.operation)
            self._calls.setdefault(operation, []).append(node)
            self._made_by |= {id(out): operation for out in node.outputs}
            for tensor in self._given(node):
                self._read_by.setdefault(id(tensor), []).append(operation)
        for tensor in functional.outputs:
            for one in self._origins(tensor):
                self._read_by.setdefault(id(one), []).append(id(functional))

    def _walked(self, functional: Any) -> Iterator[Any]:
        """Its nodes, with those of the graphs inside in their place."""
        for node in keras_models.nodes_in_order(functional):
            inner = keras_models.functional_of(node.operation) or self._opened(node)
            if inner is None or len(inner.inputs) != len(node.arguments.keras_tensors):
                yield node
                continue
            yield from self._walked(inner)
            for own, given in zip(inner.inputs, node.arguments.keras_tensors):
                self._same.setdefault(id(own), []).append(given)
            for out, own in zip(node.outputs, inner.outputs):
                self._same[id(out)] = [own]

    def _opened(self, node: Any) -> Any:
        """The graph of a layer that computes by itself; None if it is none."""
        layer, given = node.operation, node.arguments
        if id(layer) in self._known or not has_convolutions(layer):
            return None
        try:
            graph = keras_graphs.called_graph(layer, given.args, given.kwargs)
        except keras_graphs.NoGraph as error:
            self.closed |= closed_in(layer, self._known, error)
            return None
        self.opened.add(id(layer))
        return graph

    def _given(self, node: Any) -> list[Any]:
        """What an operation is given at a call, each tensor where it was made."""
        return [one for t in node.arguments.keras_tensors for one in self._origins(t)]

    def _origins(self, tensor: Any) -> list[Any]:
        """What a tensor is, where it was made; several of one that an inner graph is given."""
        found, waiting, seen = [], [tensor], set()
        for one in waiting:
            if id(one) not in seen:
                seen.add(id(one))
                found += [] if id(one) in self._same else [one]
                waiting += self._same.get(id(one), [])
        return found

    def groups(self) -> list[ProductGroup]:
        """Products that reach each other elementwise, if nothing else is made of what lies between.

        In the order in which they run.
        """
        found, seen = [], set[int]()
        for layer in self._calls:
            if layer in self._known and layer not in seen:
                roles, closed = self._roles(layer)
                seen |= {one for one, role in roles.items() if role == "rows"}
                found += [self._grouped(roles)] if closed else []
        return [one for one in found if one is not None]

    def _roles(self, layer: int) -> tuple[dict[int, Role | None], bool]:
        """Roles of what makes and takes all that is cut if a product is by rows; None: between.

        And whether they may have these. If not, some may be missing.
        """
        roles: dict[int, Role | None] = {layer: "rows"}
        tensors, seen = self._around(layer, "rows"), set()
        for tensor in tensors:
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            ends: list[tuple[int, Role]] = [(self._made_by.get(id(tensor), 0), "columns")]
            ends += [(one, "rows") for one in self._read_by.get(id(tensor), ())]
            for operation, end in ends:
                role = end if operation in self._known else None
                if operation not in roles and self._may(operation, role):
                    roles[operation] = role
                    tensors += self._around(operation, role)
                elif operation not in roles or roles[operation] != role:
                    return roles, False
        return roles, True

    def _around(self, operation: int, role: Role | None) -> list[Any]:
        """What is cut of that which an operation takes, and gives, at all of its calls."""
        found: list[Any] = []
        for node in self._calls[operation]:
            found += [] if role == "columns" else self._given(node)
            found += [] if role == "rows" else node.outputs
        return found

    def _may(self, operation: int, role: Role | None) -> bool:
        """Whether an operation has a role in a group, or may lie between."""
        calls = self._calls.get(operation, [])  # none of the graph itself, which takes its results
        if not calls or role != "rows" and _meet(calls[0].operation):
            return False
        return role is not None or all(map(is_elementwise, calls))

    def _grouped(self, roles: Mapping[int, Role | None]) -> ProductGroup | None:
        """The group of operations with roles; notes weights between."""
        operations = {one: self._calls[one][0].operation for one in self._calls if one in roles}
        between = [one for key, one in operations.items() if roles[key] is None]
        pictures = any(isinstance(one, CHANNEL_BY_CHANNEL) for one in between)
        convolved = any(
            convolution_of(one) is not None for key, one in operations.items() if roles[key]
        )
        if pictures and not convolved:
            return None
        columns, rows = (
            tuple(self._known[one] for one in operations if roles[one] == role)
            for role in ("columns", "rows")
        )
        weights = [weight for one in between for weight in weights_of_features(one)]
        for key, operation in operations.items():
            if roles[key] == "rows":
                self.between[self._known[key].path] = [*weights, *_before(operation)]
        return ProductGroup(columns, rows)


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


def _before(operation: Any) -> Iterator[Weight]:
    """Weights for each channel that a convolution takes, beside those of its product."""
    one = convolution_of(operation)
    if one is not None and one.before is not None:
        yield one.before, len(one.before.shape) - 2


def _meet(operation: Any) -> bool:
    """Whether the activation of a layer makes a feature of several."""
    return getattr(operation, "activation", None) in TOGETHER


def is_elementwise(node: Any) -> bool:
    """Whether each feature of what a node gives is made of that feature alone."""
    operation = node.operation
    if isinstance(operation, keras.layers.BatchNormalization):
        return operation.axis in (-1, len(node.outputs[0].shape) - 1)
    if isinstance(operation, (keras.layers.Flatten, keras.layers.Reshape)):
        return bool(node.outputs[0].shape[-1] == node.arguments.keras_tensors[0].shape[-1])
    if isinstance(operation, CHANNEL_BY_CHANNEL):
        return _looks_at_channels(operation)
    if isinstance(operation, keras.layers.Layer):
        one = convolution_of(operation)
        return isinstance(operation, ELEMENTWISE_LAYERS) or one is not None and one.by_channel
    return type(operation).__name__ in ELEMENTWISE_OPERATIONS or _is_over_places(node)


def _is_over_places(node: Any) -> bool:
    """Whether an operation reduces dims other than those of rows and of features."""
    operation = node.operation
    axis = getattr(operation, "axis", None)
    if type(operation).__name__ not in OVER_PLACES or axis is None:
        return False
    rank = len(node.arguments.keras_tensors[0].shape)
    dims = {one % rank for one in ([axis] if isinstance(axis, int) else axis)}
    return not dims & {0, rank - 1}


def closed_in(
    layer: keras.layers.Layer, products: Mapping[int, Product], why: Exception
) -> dict[str, str]:
    """Why the convolutions in a layer are in no graph, by their paths."""
    inside = keras_models.flat_layers(layer)[1:]
    found = [one for one in inside if id(one) in products and convolution_of(one) is not None]
    return {products[id(one)].path: f"in layer {layer.name!r}: {why}" for one in found}


def has_convolutions(operation: Any) -> bool:
    """Whether a layer has convolutions inside."""
    if not isinstance(operation, keras.layers.Layer):
        return False
    inside = keras_models.flat_layers(operation)[1:]
    return any(convolution_of(one) is not None for one in inside)


def _looks_at_channels(layer: Any) -> bool:
    """Whether a layer of `CHANNEL_BY_CHANNEL` does so on parts of them."""
    if getattr(layer, "data_format", "channels_last") != "channels_last":
        return False
    resized = getattr(layer, "interpolation", "nearest") in _RESIZED
    return resized and not getattr(layer, "antialias", False)
