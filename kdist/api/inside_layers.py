"""What layers communicate over the inner axes, read from programs, for `plan` and `inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kdist.plan.inside_layers import InsideTraffic, inside_traffic
from kdist.program.batch import part_bounds
from kdist.runtime.metrics import overrides

import keras
import tensorflow as tf

if TYPE_CHECKING:
    from kdist.api.parallelize import Parallel
    from kdist.dtensor.lowered import Collective


def refuse_batch_size(batch_size: Any) -> None:
    """Refuses what is no number of rows.

    Raises:
        ValueError: It is none, nor None.
    """
    whole = isinstance(batch_size, int) and not isinstance(batch_size, bool)
    if batch_size is not None and not (whole and batch_size > 0):
        shown = repr(batch_size) if whole else type(batch_size).__name__
        raise ValueError(
            "batch_size is the number of rows of a batch; the data is not needed. "
            f"Received: batch_size={shown}"
        )


def over_inner_axes(parallel: Parallel) -> bool:
    """Whether steps run programs over inner axes."""
    return parallel.over_inner_axes and not parallel.fallbacks


def inside_layers(parallel: Parallel, batch_size: int | None) -> list[InsideTraffic] | None:
    """What a step communicates inside layers; None while no program is lowered, nor asked for.

    Args:
        parallel: What kdist attached to a model.
        batch_size: Rows of a batch of which it is to be known: a program is lowered if need be.

    Raises:
        ValueError: It cannot be known for such a batch.
    """
    if not over_inner_axes(parallel):
        return []
    found = _read(parallel)
    if batch_size is None:
        return found
    if found is not None and all(one.nbytes(batch_size) is not None for one in found):
        return found
    if parallel.update is None or parallel.batch_specs is None:
        lower_without_loss(parallel, batch_size)
    else:
        _trace(parallel, batch_size)
    found = _read(parallel)
    if found is None or any(one.nbytes(batch_size) is None for one in found):
        parts = parallel.topology.data_size * _micro_batches(parallel)
        number = f"a multiple of {parts}" if parts > 1 else "the rows of a batch"
        raise ValueError(
            "What layers communicate does not follow from the programs for a batch of so many rows "
            f"(one serves all sizes, or they differ in more). Give {number}, of "
            f"inputs of known sizes, or leave batch_size out. Received: batch_size={batch_size}"
        )
    return found


def _read(parallel: Parallel) -> list[InsideTraffic] | None:
    programs = {} if parallel.program is None else parallel.mesh_runner().recorded_by_rows()
    if not programs:
        return None
    compute = parallel.compute
    return inside_traffic(
        programs,
        compute.data_size * _micro_batches(parallel),
        compute.inner_size,
        parallel.topology.axis_size,
    )


def _micro_batches(parallel: Parallel) -> int:
    pipeline = parallel.config.pipeline
    return 1 if pipeline is None else pipeline.micro_batches


def collectives_of(parallel: Parallel, batch_size: int | None) -> list[Collective]:
    """Those of one slice, for a batch of so many rows if that is lowered, else those lowered first.

    Of a model that has not trained, those of a forward and backward pass without a loss. None of
    one that has no inputs of its own, such as a pair of networks that its `train_step` calls.
    """
    runner = parallel.mesh_runner()
    if not (runner.recorded() or runner.recorded_by_rows()):  # what is lowered may have none
        if calls_layers_itself(parallel) and not _input_shapes(parallel.model):
            return []
        lower_without_loss(parallel, batch_size or len(parallel.topology.devices))
    first = list(runner.recorded())
    if batch_size is None:
        return first
    return runner.recorded_by_rows().get(_parts(parallel, batch_size)[0], first)


def _parts(parallel: Parallel, rows: int) -> list[int]:
    """Rows of the parts of a batch that programs get: one number, or two; the largest first."""
    parts = parallel.compute.data_size * _micro_batches(parallel)
    sizes = {end - begin for begin, end in part_bounds(rows, parts)}
    return sorted(sizes - {0}, reverse=True)


def lower_without_loss(parallel: Parallel, rows: int) -> None:
    """Lowers a forward and backward pass of a model that has not trained, for a batch.

    Raises:
        ValueError: It has inputs of unknown shape.
    """
    for part in _parts(parallel, rows):
        parallel.mesh_runner().lower_without_loss(_zeros(parallel, part))


def _trace(parallel: Parallel, rows: int) -> None:
    """Traces a training step for a number of rows, and runs nothing."""
    step: Any = parallel.step_for(None)

    def with_rows(spec: Any) -> Any:
        if spec is None or not len(spec.shape):
            return spec
        return tf.TensorSpec([rows, *spec.shape[1:]], spec.dtype)

    specs = keras.tree.map_structure(with_rows, parallel.batch_specs)
    step.by_shape(step.train).for_specs(specs, True)


def calls_layers_itself(parallel: Parallel) -> bool:
    """Whether steps of the user's own call the layers."""
    return parallel.user_steps or overrides(parallel.model, "train_step")


def _inputs(model: keras.Model) -> Any:
    """What stands for the model's inputs; None where nothing does."""
    if isinstance(model, keras.Sequential) and model.inputs:
        return model.inputs[0]
    return getattr(model, "input", None) if isinstance(model, keras.Model) and model.built else None


def _input_shapes(model: keras.Model) -> list[tuple[int, ...]]:
    """Those of a row; none where one is not known."""
    inputs = _inputs(model)
    shapes = [tuple(t.shape[1:]) for t in keras.tree.flatten(inputs)] if inputs is not None else []
    return [] if any(None in s for s in shapes) else shapes


def _zeros(parallel: Parallel, rows: int) -> Any:
    model = parallel.model
    if not _input_shapes(model):
        how = "Train or evaluate one batch first."
        if calls_layers_itself(parallel):
            how = "Its layers are called by a step of its own: what they communicate is not told."
        raise ValueError(
            f"The shapes of the model's inputs are not known. {how} Received: model={model.name!r}"
        )
    return keras.tree.map_structure(
        lambda t: tf.zeros((rows, *t.shape[1:]), keras.backend.standardize_dtype(t.dtype)),
        _inputs(model),
    )
