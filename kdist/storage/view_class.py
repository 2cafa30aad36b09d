"""What a logical variable is to Keras: the view of what is stored behind it."""

from __future__ import annotations

import functools
from typing import Any

from kdist._compat import keras_trainer
from kdist._compat.custom_gradients import read_of, watched
from kdist._compat.keras_trainer import KEY
from kdist._compat.variable_internals import give_key

import keras
import numpy as np
import tensorflow as tf

ATTRIBUTE = "_kdist_stored"
"""Of a view: what is behind it, with `whole()` and `assign(value)`."""


@functools.cache
def view_class(base: Any) -> type:
    """The subclass of a variable class whose instances read and write their local copies.

    Args:
        base: The class of a Keras variable.
    """

    def assign(self: Any, new: Any) -> Any:
        if ATTRIBUTE not in self.__dict__:  # reading it, to make `new`, made it a plain variable
            return type(self).assign(self, new)
        # Keras makes a whole tensor of it, on one device; of an array each device needs its part.
        array = isinstance(new, np.ndarray) and new.shape == tuple(self.shape)
        if not array or not tf.executing_eagerly() or keras_trainer.is_stateless():
            return base.assign(self, new)
        self.__dict__[ATTRIBUTE].assign(new)
        return new

    body = {
        "value": property(_value),
        "handle": property(_handle),
        "assign": assign,
        "_direct_assign": _direct_assign,
        "_serialize_to_tensors": _serialize_to_tensors,
        "_restore_from_tensors": _restore_from_tensors,
        "_export_to_saved_model_graph": _refuse_saved_model,
        "_shared_name": property(_shared_name),
        "__deepcopy__": _deepcopy,
        "__module__": base.__module__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (base,), body)


def _value(self: Any) -> Any:
    """The value as a trace maps it; else the plain variable's, or the parts put together."""
    mapped = keras_trainer.current_value(self)
    if getattr(self.__dict__[ATTRIBUTE], "by_rows", False):
        raise self.__dict__[ATTRIBUTE].read_whole()
    if mapped is not None:
        return keras_trainer.autocast(self, mapped)
    tensor = keras_trainer.tf_variable(self)
    if tensor is None:
        tensor = self.__dict__[ATTRIBUTE].whole()
        if ATTRIBUTE in self.__dict__:  # reading may have made it a plain variable
            tensor = _anchored(tensor, self.__dict__[ATTRIBUTE])
            give_key(tensor, self.__dict__[KEY])
    return keras_trainer.autocast(self, tensor)


def _handle(self: Any) -> Any:
    """What a tape watches: the handle of a weight that every device has whole, or of its anchor."""
    anchor = getattr(self.__dict__[ATTRIBUTE], "anchor", None)
    tensor = self.value if anchor is None else anchor
    if not isinstance(tensor, tf.Variable):
        raise AttributeError(
            "A tape does not see a weight that is cut over devices. Call kdist.gradients(model, "
            "x, y) in its place, in a callback too, or write the loop as kdist.function(step, "
            "model). A plain model with layers of a parallel one goes through kdist.parallelize "
            "too. "
            f"Received: weight {self.path!r}"
        )
    return tensor.handle


def _direct_assign(self: Any, new: Any) -> None:
    self.__dict__[ATTRIBUTE].assign(new)


def _serialize_to_tensors(self: Any) -> dict[str, Any]:
    return {"VARIABLE_VALUE": tf.convert_to_tensor(self.value)}


def _restore_from_tensors(self: Any, restored: dict[str, Any]) -> Any:
    self.assign(restored["VARIABLE_VALUE"])
    return self.value


def _refuse_saved_model(self: Any, *_: Any, **__: Any) -> Any:
    # What a function that was traced before reads are the parts, which no object there has.
    raise ValueError(
        "tf.saved_model.save and keras.export.ExportArchive take weights that are one variable "
        "each, which those of a parallel model are not. Use model.export(path), of which "
        "format='litert' writes a file for TensorFlow Lite, or kdist.export.saved_model(model, "
        "path, signatures=...), whose signatures have functions before and after the model. "
        f"Received: weight {self.path!r}"
    )


def _shared_name(self: Any) -> str:
    # What tf.train.Checkpoint calls the variable; a value assembled from parts has no name.
    return self.path


def _deepcopy(self: Any, memo: dict) -> keras.Variable:
    return keras.Variable(
        tf.convert_to_tensor(self.value), trainable=self.trainable, name=self.name
    )


def _anchored(tensor: Any, stored: Any) -> Any:
    """What is read of a weight, for tapes as if it were read of its anchor, if it has one."""
    anchor = getattr(stored, "anchor", None)
    if anchor is None:
        return tensor
    watched(anchor)
    return read_of(anchor, tensor)
