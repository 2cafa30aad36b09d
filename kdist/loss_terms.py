"""What is known about a model's loss before a step is built: can replicas compute it part by part?

A compiled loss that gives one value per row can: the whole batch's loss is a weighted mean, or sum,
of the replicas' (see `kdist.loss`). One in which rows meet cannot (Dice over the whole batch, a
contrastive loss whose negatives are the other rows), and about an overridden `compute_loss` nothing
is known. These are computed over the whole batch: see `kdist.whole_loss`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kdist import _private
from kdist.metrics import overrides

import keras
from keras import losses, ops

ROW_WISE = frozenset(
    {
        losses.binary_crossentropy,
        losses.binary_focal_crossentropy,
        losses.categorical_crossentropy,
        losses.categorical_focal_crossentropy,
        losses.categorical_generalized_cross_entropy,
        losses.categorical_hinge,
        losses.cosine_similarity,
        losses.ctc,
        losses.hinge,
        losses.huber,
        losses.kl_divergence,
        losses.log_cosh,
        losses.mean_absolute_error,
        losses.mean_absolute_percentage_error,
        losses.mean_squared_error,
        losses.mean_squared_logarithmic_error,
        losses.poisson,
        losses.sparse_categorical_crossentropy,
        losses.squared_hinge,
    }
)
"""Keras's own losses that give one value per row, where outputs have another dim than that of rows
and `axis` is the last one."""


@dataclasses.dataclass(frozen=True)
class LossTerm:
    """One compiled loss, as far as splitting it is concerned.

    Attributes:
        name: Name of the loss, and of its output if there are several.
        couples: What makes it more than a value per row, "" if it is one value per row.
        unreduced: Whether its reduction leaves a vector.
    """

    name: str
    couples: str
    unreduced: bool


def loss_terms(model: keras.Model, data: Any) -> tuple[LossTerm, ...]:
    """What is known about each compiled loss of a built model.

    Args:
        model: The model; its compiled losses are built.
        data: Specs of a batch: (x, y, sample_weight).
    """
    compiled = _private.compiled_losses(model)
    seen = [_Seen(entry.loss) for entry in compiled]
    if not (_has_dims(model) and all(one.is_known for one in seen)):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

        def look(x: Any, y: Any) -> Any:
            with _private.replaced_losses(model, seen):
                return _private.compiled_loss(model)(y, model(x))

        _private.keras_backend.compute_output_spec(look, x, y)
    several = len(compiled) > 1
    return tuple(
        LossTerm(
            f"{one.loss.name!r}" + (f" of output {entry.name!r}" if several else ""),
            one.couples,
            one.loss.reduction in (None, "none"),
        )
        for entry, one in zip(compiled, seen)
    )


def _has_dims(model: keras.Model) -> bool:
    """Whether all outputs of a model are known to have another dim than that of rows."""
    outputs = getattr(model, "outputs", None)
    return all(len(t.shape) > 1 for t in outputs) if outputs else False


def whole_loss(model: keras.Model, terms: Sequence[LossTerm], parts: int) -> str:
    """Why a model's loss has to be computed over the whole batch; "" if it need not be.

    Args:
        model: The model.
        terms: What is known about its compiled losses.
        parts: Into how many parts a batch is split.
    """
    if overrides(model, "compute_loss"):
        return "an overridden compute_loss"
    reasons = [f"the loss {t.name} has no reduction" for t in terms if t.unreduced]
    if parts > 1:
        reasons += [
            f"the loss {t.name} couples the rows of a batch ({t.couples})"
            for t in terms
            if t.couples
        ]
    return ", ".join(reasons)


class _Seen:
    """Stands for one compiled loss during a trace without values: notes what its `call` gives.

    Attributes:
        is_known: Whether it is one of Keras's that give one value per row.
        couples: See `LossTerm`.
    """

    def __init__(self, loss: keras.Loss) -> None:
        self.loss = loss
        self.couples = ""
        self.function, self.options = _private.loss_function(loss)
        self.is_known = self.function in ROW_WISE and self.options.get("axis", -1) == -1
        if type(loss).__call__ is not keras.Loss.__call__:
            self.is_known, self.couples = False, "its __call__ is overridden"

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Any value; what is seen is kept in `couples`."""
        self.couples = self.couples or self._look(
            *keras.tree.map_structure(self._cast, (y_true, y_pred))
        )
        return ops.zeros((), self.loss.dtype)

    def _cast(self, value: Any) -> Any:
        return ops.convert_to_tensor(value, dtype=self.loss.dtype)

    def _look(self, y_true: Any, y_pred: Any) -> str:
        if self.function is losses.circle:
            return "it compares rows with each other"
        if self.function in (losses.dice, losses.tversky):
            axis = self.options.get("axis")
            axes = () if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
            if 0 in axes or -len(y_pred.shape) in axes:
                return f"axis={axis}"
        if len(ops.shape(self.loss.call(y_true, y_pred))) == 0:
            return "it gives one number per batch"
        return ""
