"""Running the nodes of a virtual stage, as the model's own call would run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist._compat import keras_models, keras_trainer
from kdist.program.blocks import named
from kdist.program.program import Program
from kdist.stages.stages import StagedModel

import keras


class StageCall(keras.layers.Layer):
    """Runs a stage's nodes with the call context that the model's own call would give them."""

    def __init__(self, run: Callable[[], Any], policy: Any) -> None:
        super().__init__(dtype=policy)
        self._run = run
        self.supports_masking = True
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Runs the nodes; `inputs` reach them by name."""
        return self._run()

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Masks of the outputs are those that the nodes put on them."""


def walk(
    program: Program, staged: StagedModel, virtual: int, table: dict[str, Any], training: bool
) -> dict[str, set[str]]:
    """Runs the nodes of a virtual stage.

    Args:
        program: The model's program.
        staged: The cut.
        virtual: Which virtual stage.
        table: Values of tensors by name; gets those that the nodes make.
        training: Training or inference.

    Returns:
        Per node, the tensors that it took the Keras mask off.
    """
    sources = {n: staged.described.sources[n] for n in staged.partition.stages[virtual]}
    # As Keras's trainer: a model whose `call` does not take it passes none to its layers.
    flag = training if keras_models.takes_training(program.model) else None
    unmasked: dict[str, set[str]] = {}

    def run() -> None:
        for name, source in sources.items():
            arguments = source.node.arguments
            values = {id(t): table[n] for t, n in zip(arguments.keras_tensors, source.inputs)}
            args, kwargs = arguments.fill_in(values)
            operation = source.node.operation
            if flag is not None and keras_models.takes_training(operation):
                kwargs["training"] = flag
            masked = [x for x in values.values() if _has_mask(x)]
            made = keras.tree.flatten(operation(*args, **kwargs))
            bare = {id(x) for x in masked if not _has_mask(x)}
            unmasked[name] = {n for n, x in table.items() if id(x) in bare}
            table.update(zip(source.outputs, made))

    call = StageCall(run, program.model.dtype_policy)
    tensors = [t for t in table.values() if t is not None]
    with keras_models.as_model_call(call), named(program.blocks):
        call(tensors, training=flag)
    return unmasked


def _has_mask(value: Any) -> bool:
    return value is not None and keras_trainer.get_mask(value) is not None
