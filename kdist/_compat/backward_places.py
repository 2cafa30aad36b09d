"""TensorFlow internals for the devices on which tapes differentiate.

A tape hands each operation to its gradient with the name scope in which it was made, but without
its device: what the gradient makes in a graph gets none, and TensorFlow puts it on the first one.
(`tf.gradients` keeps the device.) So `placed` opens a name scope that tells the device, and
`kept_places` reads it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop, record

_SCOPE = "kdist_placed"
_NUMBER = re.compile(rf"(?:^|/){_SCOPE}(\d+)(?=_|/|$)")
_DEVICES: list[str] = []
"""By the number in the name scope."""


@contextlib.contextmanager
def placed(device: str) -> Iterator[None]:
    """Meanwhile, operations run on a device; within `kept_places`, so do their gradients."""
    if device not in _DEVICES:
        _DEVICES.append(device)
    scope = f"{_SCOPE}{_DEVICES.index(device)}"
    recorded = record.record_operation

    def keeping(
        op_type: str,
        output_tensors: Any,
        input_tensors: Any,
        backward_function: Callable,
        forward_function: Any = None,
    ) -> None:
        """For functions, loops, and what has a gradient of its own: TensorFlow calls that."""

        def there(*gradients: Any) -> Any:
            with placed(device):
                return backward_function(*gradients)

        recorded(op_type, output_tensors, input_tensors, there, forward_function)

    record.record_operation = keeping
    try:
        with tf.device(device), tf.name_scope(scope):
            yield
    finally:
        record.record_operation = recorded


@contextlib.contextmanager
def kept_places() -> Iterator[None]:
    """Meanwhile, tapes compute gradients where `placed` had the operations run."""

    def gradient(*of_operation: Any) -> Any:
        found = _NUMBER.search(of_operation[-1] or "")
        with tf.device(_DEVICES[int(found[1])]) if found else contextlib.nullcontext():
            return backprop._gradient_function(*of_operation)

    def total(gradients: Sequence[Any]) -> Any:
        """Adds up gradients of what several operations take."""
        devices = {one.device for one in gradients}
        with tf.device(devices.pop()) if len(devices) == 1 else contextlib.nullcontext():
            return backprop._aggregate_grads(gradients)

    pywrap_tfe.TFE_Py_RegisterGradientFunction(gradient)
    pywrap_tfe.TFE_Py_RegisterVSpace(backprop._default_vspace._replace(aggregate_fn=total))
    try:
        yield
    finally:
        pywrap_tfe.TFE_Py_RegisterGradientFunction(backprop._gradient_function)
        pywrap_tfe.TFE_Py_RegisterVSpace(backprop._default_vspace)
