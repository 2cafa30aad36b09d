"""Keras's calls on a parallel model: `fit`, `evaluate`, `predict`, `export`, files of weights."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kdist._compat import keras_saving, keras_trainer
from kdist.api.own_methods import Arguments
from kdist.api.own_steps import has_own_step, own_name
from kdist.api.stepped_model import SteppedModel
from kdist.cluster.joining import has_joined, naming_failures
from kdist.config.parallel import ParallelConfig
from kdist.display.progress import silenced
from kdist.runtime.keras_contract import adapt_callbacks
from kdist.runtime.worker_data import WorkerDatasets, is_dataset
from kdist.storage.variables import materialised

import keras


class ArrangeAgain(Exception):
    """What a callback with `arrange` has found out means another beginning."""


class Position(Protocol):
    """Where a `fit` is that may begin within an epoch."""

    def passes(self, iterator: Any, batches: int) -> bool:
        """Whether a step was done by a run before, and is passed over."""


class FittedModel(SteppedModel):
    """A model with steps, as Keras calls it.

    Attributes:
        position: Where a `fit` is whose callback saves and resumes; else None.
        batch_rows: Of the batches that it trains with, as far as that is known before they come.
    """

    def __init__(self, model: keras.Model, config: ParallelConfig) -> None:
        super().__init__(model, config)
        self.position: Position | None = None
        self.batch_rows: int | None = None
        self.datasets = WorkerDatasets(self.warn_once)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """`keras.Model.fit`; a callback with `arrange` may change what it is called with.

        If it raises `ArrangeAgain` before the first step, it is asked again.
        """
        call = Arguments(self.model, "fit", args, kwargs)
        with naming_failures(), silenced(call.get("verbose") == 0):
            return self._fit(call)

    def _fit(self, call: Arguments) -> Any:
        self.batch_rows = _batch_rows(call) or self.batch_rows
        arguments = self._read_by_workers(call.named, "train")
        adapt_callbacks(arguments.get("callbacks"))
        arranging = _arranging(arguments.get("callbacks"))
        if arranging is None:
            return call.call(arguments)
        try:
            while True:
                with contextlib.suppress(ArrangeAgain):
                    return call.call(arranging.arrange(self, dict(arguments)))
        finally:
            self.position = None
            arranging.finish()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """`keras.Model.evaluate`."""
        call = Arguments(self.model, "evaluate", args, kwargs)
        with naming_failures(), silenced(call.get("verbose") == 0):
            arguments = self._read_by_workers(call.named, "test")
            adapt_callbacks(arguments.get("callbacks"))
            return call.call(arguments)

    def _read_by_workers(self, arguments: dict[str, Any], kind: str) -> dict[str, Any]:
        """Arguments of `fit`, `evaluate` or `predict`, whose datasets each process reads.

        Args:
            arguments: By name.
            kind: "train", "test" or "predict".
        """
        kinds = {"x": kind, "validation_data": "test"}
        match arguments.get("validation_data"):  # Keras takes such a tuple for the dataset itself
            case [one, *rest] if is_dataset(one) and all(other is None for other in rest):
                arguments = arguments | {"validation_data": one}
        names = [n for n in kinds if is_dataset(arguments.get(n))]
        if not has_joined() or not names:
            return arguments
        cause = self._read_by_process_0([kinds[n] for n in names])
        if cause is not None:
            self.datasets.stays(cause)
            return arguments
        weights = arguments.get("class_weight")
        if "x" in names and weights is not None:
            weighted = keras_trainer.class_weighted(arguments["x"], weights)
            arguments = arguments | {"x": weighted, "class_weight": None}
        first = self.topology.group(0)  # whose slices have the inputs
        devices = [self.topology.slices[s].devices[0] for s in first]
        in_parts = kind == "predict"
        read = self.datasets.read([arguments[n] for n in names], devices, in_parts)
        return arguments | dict(zip(names, read, strict=True))

    def _read_by_process_0(self, kinds: Sequence[str]) -> str | None:
        """Why steps of some kinds take whole batches, None where they take each replica's rows."""
        for kind in kinds:
            if has_own_step(self.model, kind):
                return f"{own_name(kind)} takes whole batches"
        if self._whole_batch() is not None:
            return "layers that see the whole batch share rows"
        if self.model.run_eagerly or self.config.verify is not None:
            return "verify and run_eagerly look at whole batches"
        return None

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """`keras.Model.predict`."""
        call = Arguments(self.model, "predict", args, kwargs)
        with naming_failures(), silenced(call.get("verbose") == 0):
            arguments = self._read_by_workers(call.named, "predict")
            adapt_callbacks(arguments.get("callbacks"))
            return call.call(arguments)

    def export(self, *args: Any, **kwargs: Any) -> Any:
        """`keras.Model.export`, with the weights gathered into plain variables meanwhile."""
        with self.whole_variables():
            return type(self.model).export(self.model, *args, **kwargs)

    def load_weights(self, *args: Any, **kwargs: Any) -> Any:
        """`keras.Model.load_weights`; of each weight, devices read the part that they hold."""
        with keras_saving.mapped_files():
            return type(self.model).load_weights(self.model, *args, **kwargs)

    def load_task_weights(self, *args: Any, **kwargs: Any) -> Any:
        """`keras_hub.models.Task.load_task_weights`, as `load_weights`."""
        with keras_saving.mapped_files():
            return type(self.model).load_task_weights(self.model, *args, **kwargs)

    def save(self, *args: Any, **kwargs: Any) -> Any:
        """`keras.Model.save`."""
        self._read_files()
        return type(self.model).save(self.model, *args, **kwargs)

    def save_weights(self, *args: Any, **kwargs: Any) -> Any:
        """`keras.Model.save_weights`."""
        self._read_files()
        return type(self.model).save_weights(self.model, *args, **kwargs)

    def _read_files(self) -> None:
        """Reads what weights begin with from its files: the next one may be written over them."""
        for entry in self.entries.values():
            entry.stored_parts()

    def whole_variables(self, but: Sequence[keras.Variable] = ()) -> AbstractContextManager[None]:
        """Meanwhile, each weight, but for some, is a plain variable with its whole value."""
        left = set(map(id, but))
        return materialised([e.variable for key, e in self.entries.items() if key not in left])

    def passes(self, source: Any) -> bool:
        """Whether a training step is passed over; see `Position`."""
        position = self.position
        return position is not None and position.passes(source, self.model.steps_per_execution)


def _batch_rows(call: Arguments) -> int | None:
    """Rows of the batches of a `fit`, the last one apart; None where they are not known."""
    data = call.get("x")
    leaves = keras.tree.flatten(data.element_spec if is_dataset(data) else data)
    try:
        size = tuple(leaves[0].shape)[0]
    except (AttributeError, IndexError, TypeError, ValueError):  # no array, or of no known shape
        return None
    if size is None or is_dataset(data):
        return size
    rows = int(size * (1 - (call.get("validation_split") or 0)))
    return min(call.get("batch_size") or 32, rows) or None


def _arranging(callbacks: Any) -> Any:
    """The callback that says where training begins, if there is one.

    Raises:
        ValueError: There are two.
    """
    members = keras.tree.flatten(getattr(callbacks, "callbacks", callbacks))
    found = [one for one in members if hasattr(one, "arrange")]
    if len(found) > 1:
        raise ValueError(
            "One callback says where training begins and saves it. Leave the others out. "
            f"Received: {[type(one).__name__ for one in found]}"
        )
    return found[0] if found else None
