"""What changes a loss, a gradient or an update, as declarations that apply to any zoo model.

A feature edits a freshly built model, and adds options to the optimizer, to `compile` and to `fit`.
Both runs of a comparison get the same edits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
from keras import ops

from .case import CLASSES, Case

Options = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feature:
    """One loss-changing feature.

    Attributes:
        name: Unique name, used as test id.
        edit: Changes a built, uncompiled model in place.
        optimizer: Options added to the optimizer's constructor.
        edit_optimizer: Changes an unbuilt optimizer, given the built model.
        compile: `compile(case)` gives options that replace those of the case.
        fit: Options added to `fit`.
        sample_weight: Train and evaluate with the case's sample weights.
        reduction: Reduction of the case's losses.
        needs: Tags that the case must have.
        excludes: Tags that the case must not have.
        synchronized: BatchNormalization sees the whole batch, so the reference is plain.
    """

    name: str
    edit: Callable[[keras.Model], None] = lambda model: None
    optimizer: Options = dataclasses.field(default_factory=dict)
    edit_optimizer: Callable[[keras.optimizers.Optimizer, keras.Model], None] = (
        lambda optimizer, model: None
    )
    compile: Callable[[Case], Options] = lambda case: {}
    fit: Options = dataclasses.field(default_factory=dict)
    sample_weight: bool = False
    reduction: str = "sum_over_batch_size"
    needs: frozenset[str] = frozenset()
    excludes: frozenset[str] = frozenset()
    synchronized: bool = False

    def fits(self, case: Case) -> bool:
        """Whether the feature has a meaning for the case."""
        return self.needs <= case.tags and not self.excludes & case.tags

    def __hash__(self) -> int:
        return hash(self.name)


def _swap_class(target: Any, mixin: type) -> None:
    """Gives one object a subclass of its own class: what a user's own subclass would be."""
    base = type(target)
    target.__class__ = type(f"{mixin.__name__}{base.__name__}", (mixin, base), {})


def _dense(model: keras.Model) -> list[keras.layers.Layer]:
    return [layer for layer in model.layers if isinstance(layer, keras.layers.Dense)]


def _regularize(part: str) -> Callable[[keras.Model], None]:
    def edit(model: keras.Model) -> None:
        for variable in model.trainable_variables:
            if variable.name == part:
                variable.regularizer = keras.regularizers.L2(0.05)

    return edit


def _regularize_activity(model: keras.Model) -> None:
    for layer in _dense(model):
        layer.activity_regularizer = keras.regularizers.L2(0.05)


def _unroll(model: keras.Model) -> None:
    model.unrolled_steps_per_execution = 2


def _constrain(model: keras.Model) -> None:
    # Norms run along dim 0, which the layouts of `down` and `head` split: the norm must be global.
    for variable in model.trainable_variables:
        if variable.name == "kernel" and len(variable.shape) == 2:
            variable.constraint = keras.constraints.MaxNorm(0.5, axis=0)


def _freeze(model: keras.Model) -> None:
    for layer in [layer for layer in model.layers if layer.trainable_variables][1::2]:
        layer.trainable = False


def _synchronize(model: keras.Model) -> None:
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True


class AddsLoss:
    """A Dense layer that adds a penalty on its own outputs."""

    def call(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = super().call(inputs, *args, **kwargs)
        self.add_loss(0.3 * ops.mean(ops.square(outputs)))
        return outputs


class OwnLoss:
    """A model that overrides `compute_loss`: adds `extra` to the compiled loss."""

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        loss = super().compute_loss(x, y, y_pred, sample_weight, training=training)
        # Not `+`: in half precision what is made of outputs is 16 bit wide, while losses, penalties
        # and weights are not.
        return ops.add(loss, self.extra(x, y, y_pred, training))

    def extra(self, x: Any, y: Any, y_pred: Any, training: bool) -> Any:
        """A mean over the batch, of every output."""
        return sum(0.1 * ops.mean(ops.square(one)) for one in keras.tree.flatten(y_pred))


class OwnMetrics:
    """A model that overrides `compute_metrics`: one more entry in the logs."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        logs = super().compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        logs["twice_the_loss"] = 2.0 * logs["loss"]
        return logs


def _add_loss(model: keras.Model) -> None:
    _swap_class(_dense(model)[0], AddsLoss)


def _exclude(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> None:
    for inner in getattr(optimizer, "optimizers", None) or [optimizer]:
        getattr(inner, "inner_optimizer", inner).exclude_from_weight_decay(var_names=["bias"])


def _label_metrics(case: Case) -> Options:
    def confusion() -> list[keras.metrics.Metric]:
        return [
            keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
            keras.metrics.MeanIoU(
                CLASSES, sparse_y_pred=False, sparse_y_true=True, name="mean_iou"
            ),
            keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="entropy"),
        ]

    return {"metrics": confusion(), "weighted_metrics": confusion()}


def _binary_metrics(case: Case) -> Options:
    def ranking() -> list[keras.metrics.Metric]:
        return [
            keras.metrics.AUC(from_logits=True, name="auc"),
            keras.metrics.Precision(thresholds=0.0, name="precision"),
            keras.metrics.Recall(thresholds=0.0, name="recall"),
        ]

    return {"metrics": ranking(), "weighted_metrics": ranking()}


@keras.saving.register_keras_serializable("kdist_tests")
class _Decay(keras.optimizers.schedules.ExponentialDecay):
    """In floatx: Keras's is in float32 always, which Muon cannot multiply with float64."""

    def __call__(self, step: Any) -> Any:
        return keras.ops.cast(super().__call__(step), keras.config.floatx())


def _schedule() -> keras.optimizers.schedules.LearningRateSchedule:
    return _Decay(0.02, decay_steps=1, decay_rate=0.5)


def _tags(*tags: str) -> frozenset[str]:
    return frozenset(tags)


NONE = Feature(name="none")
FEATURES: tuple[Feature, ...] = (
    NONE,
    Feature(name="sample_weight", sample_weight=True),
    Feature(
        name="class_weight",
        fit={"class_weight": {0: 0.2, 1: 1.0, 2: 2.5, 3: 4.0}},
        needs=_tags("labels"),
    ),
    Feature(name="reduction_sum", reduction="sum"),
    Feature(
        name="mean_with_sample_weight", reduction="mean_with_sample_weight", sample_weight=True
    ),
    Feature(name="sum_with_sample_weight", reduction="sum", sample_weight=True),
    Feature(name="add_loss", edit=_add_loss),
    Feature(name="kernel_regularizer", edit=_regularize("kernel")),
    Feature(name="bias_regularizer", edit=_regularize("bias")),
    Feature(name="activity_regularizer", edit=_regularize_activity),
    Feature(name="constraint", edit=_constrain),
    Feature(name="frozen", edit=_freeze),
    Feature(
        name="synchronized_batchnorm", edit=_synchronize, needs=_tags("norm"), synchronized=True
    ),
    Feature(name="gradient_accumulation", optimizer={"gradient_accumulation_steps": 2}),
    Feature(name="clipnorm", optimizer={"clipnorm": 0.05}),
    Feature(name="global_clipnorm", optimizer={"global_clipnorm": 0.05}),
    Feature(name="clipvalue", optimizer={"clipvalue": 0.01}),
    Feature(name="ema", optimizer={"use_ema": True, "ema_momentum": 0.6}),
    Feature(
        name="ema_overwrite",
        optimizer={"use_ema": True, "ema_momentum": 0.6, "ema_overwrite_frequency": 3},
    ),
    Feature(name="weight_decay", optimizer={"weight_decay": 0.1}),
    Feature(name="weight_decay_exclude", optimizer={"weight_decay": 0.1}, edit_optimizer=_exclude),
    Feature(name="schedule", optimizer={"learning_rate": _schedule()}),
    # Keras divides gradients by the factor, which it cannot do with those of an embedding.
    Feature(
        name="loss_scale_factor",
        optimizer={"loss_scale_factor": 64.0},
        excludes=_tags("embedding"),
    ),
    Feature(
        name="label_metrics", compile=_label_metrics, sample_weight=True, needs=_tags("labels")
    ),
    Feature(
        name="binary_metrics", compile=_binary_metrics, sample_weight=True, needs=_tags("binary")
    ),
    Feature(name="own_compute_loss", edit=lambda model: _swap_class(model, OwnLoss)),
    Feature(name="own_compute_metrics", edit=lambda model: _swap_class(model, OwnMetrics)),
    Feature(name="steps_per_execution", compile=lambda case: {"steps_per_execution": 2}),
    Feature(name="three_steps_per_execution", compile=lambda case: {"steps_per_execution": 3}),
    Feature(
        name="steps_without_barrier",
        compile=lambda case: {"steps_per_execution": 3},
        edit=_unroll,
    ),
    Feature(name="run_eagerly", compile=lambda case: {"run_eagerly": True}),
)
BY_NAME: Mapping[str, Feature] = {feature.name: feature for feature in FEATURES}


def select(names: Iterable[str]) -> tuple[Feature, ...]:
    """The features of the given names, in order."""
    return tuple(BY_NAME[name] for name in names)
