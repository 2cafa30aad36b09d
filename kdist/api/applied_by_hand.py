"""Gradients that users apply themselves, in a loop of their own or by the optimizer's `apply`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kdist._compat import keras_applied
from kdist.optimizer.wrappers import unwrap

import keras
import tensorflow as tf

if TYPE_CHECKING:
    from kdist.api.parallelize import Parallel


def apply_whole(parallel: Parallel, gradients: Sequence[Any]) -> None:
    """Updates the weights of a model, on their owners' devices.

    Args:
        parallel: Of a compiled model.
        gradients: One whole gradient, or None, per trainable variable.

    Raises:
        ValueError: The number of gradients is not that of the trainable variables, or all are None;
            or the model has not trained yet.
    """
    model = parallel.model
    count = len(model.trainable_variables)
    if len(gradients) != count:
        raise ValueError(
            "Pass one gradient (or None) per variable of model.trainable_variables: "
            f"{count} of them. Received: {len(gradients)} gradients"
        )
    step = parallel.step_for(None)
    if count and all(gradient is None for gradient in gradients):
        raise ValueError(
            "At least one gradient is needed: check that the loss depends on trainable weights. "
            f"Received: None for all {count} variables of model {model.name!r}"
        )
    step.apply_whole(list(gradients))


def hand_over(parallel: Parallel) -> None:
    """Makes the compiled optimizer's `apply` and `apply_gradients` update over the mesh.

    Its state lies with local optimizers, which Keras's own code would pass by.

    Args:
        parallel: Of a model that has an update.
    """
    optimizer = parallel.model.optimizer
    keras_applied.replace_apply(optimizer, _by_mesh(parallel, optimizer))


def _by_mesh(parallel: Parallel, optimizer: Any) -> Callable[..., None]:
    @tf.autograph.experimental.do_not_convert
    def apply(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if parallel.own_updates.running:
            own = functools.partial(type(optimizer).apply, optimizer)
            parallel.own_updates.apply(optimizer, own, grads, trainable_variables)
            return
        _refuse(parallel, optimizer)
        gradients = list(grads)
        if trainable_variables is not None:
            gradients = _in_order(parallel.model, gradients, list(trainable_variables))
        apply_whole(parallel, gradients)

    return apply


def _refuse(parallel: Parallel, optimizer: Any) -> None:
    model, own = parallel.model, f"{type(optimizer).__name__} {optimizer.name!r}"
    if model.optimizer is not optimizer:
        raise ValueError(
            "An optimizer updates the weights of a parallelized model while the model is compiled "
            "with it. Call model.compile(optimizer, ...) again, or use model.optimizer. Received: "
            f"{own}, and model {model.name!r} is compiled with another"
        )
    found = unwrap(optimizer)
    if found.loss_scale is not None or getattr(found.inner, "loss_scale_factor", None):
        raise ValueError(
            "An optimizer that scales the loss divides gradients by its scale, and kdist cannot "
            "see whether these carry it. Use loss, gradients = kdist.gradients(model, x, y) and "
            f"kdist.apply_gradients(model, gradients), which scale and unscale. Received: {own}"
        )


def by_weight(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> dict[int, Any]:
    """Gradients by the identity of what they are for; those that are None are left out.

    Raises:
        ValueError: Two are for one weight.
    """
    found: dict[int, Any] = {}
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is not None and id(variable) in found:
            raise ValueError(
                "A weight is updated once in a step over a mesh; Keras updates one that comes "
                "twice two times, one after the other. Pass each weight once, with its gradient: "
                "list({id(v): v for v in weights}.values()). Received: "
                f"{getattr(variable, 'path', variable)!r} twice in apply of "
                f"{type(optimizer).__name__} {optimizer.name!r}"
            )
        if gradient is not None:
            found[id(variable)] = gradient
    return found


def _in_order(model: keras.Model, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """One gradient, or None, per trainable variable of the model."""
    known = {id(v) for v in model.trainable_variables}
    for variable in variables:
        if id(variable) not in known:
            raise ValueError(
                "The optimizer of a parallelized model updates the model's trainable weights "
                "alone: see kdist.apply_gradients. Give other variables an optimizer of their own. "
                f"Received: {getattr(variable, 'path', variable)!r}, not a trainable weight of "
                f"model {model.name!r}"
            )
    found = by_weight(model.optimizer, gradients, variables)
    return [found.get(id(v)) for v in model.trainable_variables]
