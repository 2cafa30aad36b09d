"""What a model does with some of its layers: their calls, and what is around them, as one graph.

While a model is traced, every outermost call of a watched layer is recorded. What goes into and
comes out of these calls is *marked*, so that the graph between them can be read without looking
inside the layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kdist._compat import keras_models, keras_trainer

import keras
import tensorflow as tf

Mark = tuple[Any, ...]
"""What a tensor is: ("input", path), or ("output" | "loss" | "state", number of the call, ...)."""


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call of a watched layer.

    Attributes:
        layer: The layer.
        arguments: By path, what its `call` was given: tensors and everything else, flat.
    """

    layer: keras.Layer
    arguments: dict[str, Any]


@dataclasses.dataclass
class CallRecord:
    """One trace of a model.

    Attributes:
        calls: Calls of the watched layers, in order.
        outputs: What the model returned.
        masks: The Keras mask, or None, of each flat output.
        losses: What `add_loss` and activity regularizers collected.
        updates: New value of each variable that was written, by identity of the variable.
        marks: What some tensors of the graph are, by `tensor_key`.
    """

    calls: list[LayerCall] = dataclasses.field(default_factory=list)
    outputs: Any = None
    masks: list[Any] = dataclasses.field(default_factory=list)
    losses: list[Any] = dataclasses.field(default_factory=list)
    updates: dict[int, Any] = dataclasses.field(default_factory=dict)
    marks: dict[Any, Mark] = dataclasses.field(default_factory=dict)

    def mark(self, value: Any, mark: Mark) -> None:
        """Notes what the tensors of a structure are; the first mark of a tensor stays."""
        for path, leaf in flat(value).items():
            if tf.is_tensor(leaf):
                self.marks.setdefault(tensor_key(leaf), (*mark, path))

    def mark_of(self, tensor: Any) -> Mark | None:
        """What a tensor is, None if it is neither an input nor made inside of a watched call."""
        return self.marks.get(tensor_key(tensor))


def record_calls(
    model: keras.Model, layers: Sequence[keras.Layer], x: tf.Tensor, flags: Mapping[str, Any]
) -> CallRecord:
    """Calls a model on a symbolic tensor; nothing is written to a variable.

    Args:
        model: A built model.
        layers: The layers to watch.
        x: Its input.
        flags: Further arguments of the call.
    """
    record = CallRecord()
    x = tf.identity(x)  # an object of its own: layers put masks on it and take them off
    record.mark(x, ("input",))
    scope = keras.StatelessScope(collect_losses=True)
    with scope, _watched(layers, record, scope):
        record.outputs = model(x, **flags)
    record.masks = [keras_trainer.get_mask(leaf) for leaf in keras.tree.flatten(record.outputs)]
    record.losses = keras_trainer.add_loss_values(scope)
    record.updates = dict(scope.state_mapping)
    return record


@contextlib.contextmanager
def _watched(
    layers: Sequence[keras.Layer], record: CallRecord, scope: keras.StatelessScope
) -> Iterator[None]:
    """Records the outermost calls of some layers within the block."""
    every = list({id(layer): layer for layer in layers}.values())
    inside: list[keras.Layer] = []
    with keras_models.calls_kept(every):
        for layer in every:
            call = keras_models.call_of(layer)
            keras_models.give_call(layer, _recorded(layer, call, record, scope, inside))
        yield


def _recorded(
    layer: keras.Layer,
    call: Callable,
    record: CallRecord,
    scope: keras.StatelessScope,
    inside: list[keras.Layer],
) -> Callable:
    """`call` of a layer that is noted unless another watched layer makes it."""
    signature = inspect.signature(layer.call)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        if inside:
            return call(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        number = len(record.calls)
        record.calls.append(LayerCall(layer, flat(dict(bound.arguments))))
        losses, state = len(keras_trainer.add_loss_values(scope)), dict(scope.state_mapping)
        inside.append(layer)
        try:
            outputs = call(*args, **kwargs)
        finally:
            inside.pop()
        record.mark(outputs, ("output", number))
        for k, value in enumerate(keras_trainer.add_loss_values(scope)[losses:]):
            record.mark(value, ("loss", number, k))
        for key, value in scope.state_mapping.items():
            if value is not state.get(key):
                record.mark(value, ("state", number, key))
        return outputs

    return recorded


def flat(structure: Any) -> dict[str, Any]:
    """The leaves of a structure by path; None is a leaf."""
    leaves = keras.tree.flatten_with_path(structure)
    return {"/".join(str(part) for part in path): leaf for path, leaf in leaves}


def tensor_key(tensor: Any) -> Any:
    """Tells the tensors of a trace apart; one that is no node of a graph is itself."""
    return (id(tensor.graph), tensor.name) if tf.is_symbolic_tensor(tensor) else id(tensor)
