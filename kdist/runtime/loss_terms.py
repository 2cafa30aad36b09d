"""What is known about a model's loss before a step is built: can replicas compute it part by part?

A compiled loss that gives one value per row can: the whole batch's loss is a weighted mean, or sum,
of the replicas' (see `kdist.program.loss`). One in which rows meet cannot (Dice over the whole
batch, a contrastive loss whose negatives are the other rows), and nothing is known of an overridden
`compute_loss`. These are computed over the whole batch: see `kdist.runtime.whole_loss`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kdist._compat import keras_trainer
from kdist.config.pipeline import PipelineConfig
from kdist.pipeline.formulas import live_formula
from kdist.rows import NotStudied, RowDependence, study
from kdist.runtime.metrics import overrides

import keras
import tensorflow as tf
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

OVERRIDDEN = "an overridden compute_loss"
"""Why the loss of a model is computed over the whole batch that says so itself."""


@dataclasses.dataclass(frozen=True)
class LossTerm:
    """One compiled loss, as far as splitting it is concerned.

    Attributes:
        name: Name of the loss, and of its output if there are several.
        couples: What makes it more than a value per row, "" if it is one value per row.
        unreduced: Whether its reduction leaves a vector.
        path: Where its output lies in what the model returns; () if that is one tensor.
    """

    name: str
    couples: str
    unreduced: bool
    path: tuple[str | int, ...] = ()


def loss_terms(model: keras.Model, data: Any) -> tuple[LossTerm, ...]:
    """What is known about each compiled loss of a built model.

    Args:
        model: The model; its compiled losses are built.
        data: Specs of a batch: (x, y, sample_weight).
    """
    compiled = keras_trainer.compiled_losses(model)
    if not compiled:  # no loss, or one that an overridden `compute_loss` makes nothing of
        return ()
    seen = [_Seen(entry.loss) for entry in compiled]
    if not (_has_dims(model) and all(one.is_known for one in seen)):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

        def look(x: Any, y: Any) -> Any:
            with keras_trainer.replaced_losses(model, seen):
                return keras_trainer.compiled_loss(model)(y, model(x))

        keras_trainer.keras_backend.compute_output_spec(look, x, y)
    several = max(len(compiled), len(getattr(model, "outputs", None) or ())) > 1
    return tuple(
        LossTerm(
            f"{one.loss.name!r}" + (f" of output {entry.name!r}" if several else ""),
            one.couples(),
            one.loss.reduction in (None, "none"),
            tuple(entry.path),
        )
        for entry, one in zip(compiled, seen)
    )


def _has_dims(model: keras.Model) -> bool:
    """Whether all outputs of a model are known to have another dim than that of rows."""
    outputs = getattr(model, "outputs", None)
    return all(len(t.shape) > 1 for t in outputs) if outputs else False


def joined_outputs(model: keras.Model, terms: Sequence[LossTerm]) -> list[tuple[str | int, ...]]:
    """Paths of the outputs that a loss over the whole batch takes; () stands for all.

    Args:
        model: The model.
        terms: What is known about its compiled losses.
    """
    if overrides(model, "compute_loss"):
        return [()]
    return [t.path for t in terms if t.couples or t.unreduced]


def whole_loss(model: keras.Model, terms: Sequence[LossTerm], parts: int) -> str:
    """Why a model's loss has to be computed over the whole batch; "" if it need not be.

    Args:
        model: The model.
        terms: What is known about its compiled losses.
        parts: Into how many parts a batch is split.
    """
    if overrides(model, "compute_loss"):
        return OVERRIDDEN
    reasons = [f"the loss {t.name} has no reduction" for t in terms if t.unreduced]
    if parts > 1:
        reasons += [
            f"the loss {t.name} couples the rows of a batch ({t.couples})"
            for t in terms
            if t.couples
        ]
    return ", ".join(reasons)


class _Seen:
    """Stands for one compiled loss during a trace without values: notes what it is called with.

    Attributes:
        is_known: Whether it is one of Keras's that give one value per row.
        specs: Of targets and outputs, once called.
    """

    def __init__(self, loss: keras.Loss) -> None:
        self.loss = loss
        self.specs: Any = None
        function, options = keras_trainer.loss_function(loss)
        own_call = type(loss).__call__ is not keras.Loss.__call__
        self.is_known = not own_call and function in ROW_WISE and options.get("axis", -1) == -1

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Any value; what it is called with is kept in `specs`."""

        def spec(value: Any) -> tf.TensorSpec:
            return tf.TensorSpec(ops.convert_to_tensor(value).shape, self.loss.dtype)

        self.specs = keras.tree.map_structure(spec, (y_true, y_pred))
        return ops.zeros((), self.loss.dtype)

    def couples(self) -> str:
        """See `LossTerm`."""
        if type(self.loss).__call__ is not keras.Loss.__call__:
            return "its __call__ is overridden"
        if self.specs is None or (self.is_known and len(self.specs[1].shape) > 1):
            return ""
        try:
            found = study(self._values_and_mask, *self.specs)
        except NotStudied as reason:
            return f"what it does could not be traced: {reason}"
        allowed = {RowDependence.ROWS}
        for flow, cause, sized in zip(found.outputs, found.causes, found.sized):
            if sized or flow not in allowed:
                return f"in {cause.operation}" if cause else "it depends on their number"
            allowed = {RowDependence.ROWS, RowDependence.CONSTANT}  # a mask
        return ""

    def _values_and_mask(self, y_true: Any, y_pred: Any) -> tuple[Any, Any]:
        """What Keras combines: the loss's values, and the mask that it may put on them."""
        values = self.loss.call(y_true, y_pred)
        return values, keras_trainer.get_mask(values)


def whole_loss_note(why: str, stages: int, pipeline: PipelineConfig | None) -> str:
    """One line for the user about a loss over the whole batch.

    Args:
        why: Why it is, as `whole_loss` says.
        stages: Number of pipeline stages.
        pipeline: Settings of the pipeline, if there is one.
    """
    how = "computed once, over the gathered outputs of all replicas"
    if pipeline is not None:
        count = pipeline.micro_batches
        usual = live_formula("1f1b", stages, count)
        how += (
            ". All forwards of a step run before its first backward, so each stage keeps the "
            f"activations of {count} micro-batches at once, where 1f1b keeps {usual} (by stage)"
        )
    return f"{why}: {how}"
