"""Keras's calls on a parallel model: `fit`, `evaluate`, `predict`, `export`, `load_weights`."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kdist._compat import keras_saving
from kdist.api.stepped_model import SteppedModel
from kdist.cluster.joining import naming_failures
from kdist.config.parallel import ParallelConfig
from kdist.runtime.keras_contract import adapt_callbacks
from kdist.storage.variables import materialised

import keras


class Position(Protocol):
    """Where a `fit` is that may begin within an epoch."""

    def passes(self, iterator: Any, batches: int) -> bool:
        """Whether a step was done by a run before, and is passed over."""


class FittedModel(SteppedModel):
    """A model with steps, as Keras calls it.

    Attributes:
        position: Where a `fit` is whose callback saves and resumes; else None.
    """

    def __init__(self, model: keras.Model, config: ParallelConfig) -> None:
        super().__init__(model, config)
        self.position: Position | None = None

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """`keras.Model.fit`; a callback with `arrange` may change what it is called with."""
        with naming_failures():
            return self._fit(*args, **kwargs)

    def _fit(self, *args: Any, **kwargs: Any) -> Any:
        plain = type(self.model).fit
        given = inspect.signature(plain).bind(self.model, *args, **kwargs).arguments
        del given[next(iter(given))]  # the model
        arguments = {**given.pop("kwargs", {}), **given}
        adapt_callbacks(arguments.get("callbacks"))
        arranging = _arranging(arguments.get("callbacks"))
        if arranging is None:
            return plain(self.model, *args, **kwargs)
        try:
            return plain(self.model, **arranging.arrange(self, arguments))
        finally:
            self.position = None
            arranging.finish()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """`keras.Model.evaluate`."""
        adapt_callbacks(kwargs.get("callbacks"))
        with naming_failures():
            return type(self.model).evaluate(self.model, *args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """`keras.Model.predict`."""
        adapt_callbacks(kwargs.get("callbacks"))
        with naming_failures():
            return type(self.model).predict(self.model, *args, **kwargs)

    def export(self, *args: Any, **kwargs: Any) -> Any:
        """`keras.Model.export`, with the weights gathered into plain variables meanwhile."""
        with self.whole_variables():
            return type(self.model).export(self.model, *args, **kwargs)

    def load_weights(self, *args: Any, **kwargs: Any) -> Any:
        """`keras.Model.load_weights`; of each weight, devices read the part that they hold."""
        with keras_saving.mapped_files():
            return type(self.model).load_weights(self.model, *args, **kwargs)

    def whole_variables(self) -> AbstractContextManager[None]:
        """Meanwhile, each weight is a plain variable with its whole value."""
        return materialised([entry.variable for entry in self.entries.values()])

    def passes(self, source: Any) -> bool:
        """Whether a training step is passed over; see `Position`."""
        position = self.position
        return position is not None and position.passes(source, self.model.steps_per_execution)


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
