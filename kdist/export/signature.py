"""What a served function takes and gives, around the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kdist._compat import keras_saving

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Signature:
    """A served function: the model, and what is computed before and after it.

    Attributes:
        inputs: Specs of its arguments (`tf.TensorSpec`, `keras.InputSpec`); None for the model's
            own. A dim of None is any size.
        before: Makes the model's input of the arguments: a function of tensors, or a layer, whose
            vocabulary is saved with it. None if they are the input.
        after: Makes what is returned of the model's output. None if it is returned.

    Example:
        >>> bytes_ = [tf.TensorSpec([None, 16], tf.uint8)]
        >>> scores = kdist.export.Signature(bytes_, keras.layers.Rescaling(1 / 255), tf.nn.softmax)
        >>> kdist.export.saved_model(model, "served", signatures={"scores": scores})
    """

    inputs: Sequence[Any] | None = None
    before: Callable[..., Any] | None = None
    after: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.inputs is None and self.before is not None:
            raise ValueError(
                "What comes before the model has inputs of its own. Give their specs: "
                "Signature([tf.TensorSpec(...)], before). Received: inputs=None, "
                f"before={self.before!r}"
            )
        for name in ("before", "after"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ValueError(f"`{name}` is a function or a layer. Received: {name}={value!r}")

    def specs(self, model: keras.Model) -> list[Any]:
        """Specs of the arguments: those given, else those that the model is called with."""
        return list(keras_saving.input_signature(model) if self.inputs is None else self.inputs)

    def around(self, call: Callable[[Any], Any]) -> Callable[..., Any]:
        """The function that is served, by one that computes the model."""
        before, after = self.before, self.after

        def serve(*inputs: Any) -> Any:
            if before is not None:
                x = before(*inputs)
            else:
                x = inputs[0] if len(inputs) == 1 else list(inputs)
            y = call(x)
            return y if after is None else after(y)

        return serve

    def build_layers(self, model: keras.Model) -> None:
        """Builds the layers around the model, if need be: what is saved has its variables."""
        if isinstance(self.before, keras.layers.Layer) and not self.before.built:
            self.before(*map(_symbol, self.specs(model)))
        if isinstance(self.after, keras.layers.Layer) and not self.after.built:
            self.after(model(keras.tree.map_structure(_symbol, input_specs(model))))

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """Whose vocabularies belong to the file."""
        return [one for one in (self.before, self.after) if isinstance(one, keras.layers.Layer)]


def input_specs(model: keras.Model) -> Any:
    """Specs of what a built model is called with."""
    x = keras_saving.input_signature(model)
    return x[0] if isinstance(x, list) and len(x) == 1 else x


def _symbol(spec: Any) -> Any:
    return keras.KerasTensor(tuple(spec.shape), keras.backend.standardize_dtype(spec.dtype))


def leaf_specs(x: Any) -> Any:
    """Specs of a structure of tensors."""
    return keras.tree.map_structure(tf.type_spec_from_value, x)
