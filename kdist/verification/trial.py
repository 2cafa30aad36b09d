"""One comparison: two fresh twins, one on one device and one over the mesh, and a batch."""

from __future__ import annotations

import dataclasses
from typing import Any

from kdist.config import ParallelConfig
from kdist.optimizer.state_config import StateFormatConfig
from kdist.optimizer.wrappers import unwrap
from kdist.parallel import Parallel, attached, parallelize
from kdist.verification.calm import calm, random_layers, statistic_layers
from kdist.verification.compiled import compile_alike, copy_optimizer
from kdist.verification.declared import config_for, copy_declarations
from kdist.verification.observe import as_array, on_one_device, over_mesh
from kdist.verification.observed import Comparison, Observed, compare_runs
from kdist.verification.study import Study, bounds_of, study
from kdist.verification.tolerance import Tolerance
from kdist.verification.twin import batch_in, make_twin, paired, precision

import keras


class OneDeviceFailed(Exception):
    """The twin on one device did not run; the mesh was not tried."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be verified.

    Attributes:
        model: A parallelized, compiled model; it is only read.
        batch: (x, y, sample_weight).
        policy: The dtype policy to compare in.
        tolerance: How far the runs may be apart.
    """

    model: keras.Model
    batch: tuple[Any, Any, Any]
    policy: str
    tolerance: Tolerance

    @property
    def config(self) -> ParallelConfig:
        """How the model is parallelized."""
        return attached(self.model).config


@dataclasses.dataclass(frozen=True)
class Trial:
    """What one comparison found.

    Attributes:
        comparison: The differences.
        study: What the layers give for each replica's rows; empty if nothing differs.
        random: Names of layers that rightly draw other random numbers than one device does.
        statistics: Names of layers that rightly normalise by the replicas' own statistics.
        notes: Why the mesh ran on gathered weights, if it did.
    """

    comparison: Comparison
    study: Study
    random: tuple[str, ...]
    statistics: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return self.comparison.ok

    @property
    def excused(self) -> tuple[str, ...]:
        """Names of all layers that may rightly differ."""
        return self.random + self.statistics


def lossy_settings(model: keras.Model) -> tuple[str, ...]:
    """Settings that round what is sent or kept, by name."""
    config = attached(model).config
    found = ["compression"] if config.compression is not None else []
    own = unwrap(model.optimizer).config if model.optimizer is not None else None
    formats = (config.optimizer.state_format, own.state_format if own is not None else None)
    if any(form is not None and form.encodes for form in formats):
        found.append("state_format")
    return tuple(found)


def run_trial(request: Request, *, quiet: bool = False, lossless: bool = False) -> Trial:
    """Compares one device with the mesh.

    Args:
        request: What to compare.
        quiet: Random layers draw nothing, `BatchNormalization` uses the given statistics.
        lossless: Gradients are not compressed, moments not kept in 16 bits.

    Raises:
        NoTwin: The model cannot be made again.
        OneDeviceFailed: It does not run on one device.
    """
    with precision(request.policy):
        batch = batch_in(keras.config.floatx(), request.batch)
        plain = make_twin(request.model, request.policy, batch[0])
        mesh, parallel = _mesh_twin(request, batch[0], lossless)
        random, statistics = _excused(plain, parallel)
        if quiet:
            calm(_named(plain, random + statistics))
            calm(_named(mesh, random + statistics))
        for twin in (plain, mesh):
            compile_alike(request.model, twin, request.policy, lossless)
            copy_optimizer(request.model, twin)
        start = [(v, as_array(v.value)) for v in plain.variables]
        device = request.config.topology.devices[0]
        one = _on_one_device(plain, batch, device)
        comparison = compare_runs(one, over_mesh(mesh, batch), request.tolerance)

        def restore() -> None:
            for variable, value in start:
                variable.assign(value)

        found = Study()
        if not comparison.ok:
            restore()
            rows = int(keras.tree.flatten(batch[0])[0].shape[0])
            bounds = bounds_of(rows, parallel.topology.data_size, _micro_batches(parallel.config))
            found = study(plain, batch[0], bounds, request.tolerance, restore)
        return Trial(comparison, found, random, statistics, tuple(parallel.fallbacks))


def _mesh_twin(request: Request, x: Any, lossless: bool) -> tuple[keras.Model, Parallel]:
    """A twin over the mesh, not compiled."""
    config = request.config
    if lossless:
        optimizer = dataclasses.replace(config.optimizer, state_format=StateFormatConfig())
        config = dataclasses.replace(config, compression=None, optimizer=optimizer)
    twin = make_twin(request.model, request.policy, x)
    pair = paired(request.model, twin)
    copy_declarations(request.model, pair)
    parallelize(twin, config_for(config, pair))
    return twin, attached(twin)


def _on_one_device(plain: keras.Model, batch: tuple[Any, Any, Any], device: str) -> Observed:
    try:
        return on_one_device(plain, batch, device)
    except Exception as error:  # whatever the user's model raises
        raise OneDeviceFailed(str(error).strip().splitlines()[0][:200]) from error


def _excused(plain: keras.Model, parallel: Parallel) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the layers that may rightly differ on this mesh: (random, statistics)."""
    parts = parallel.topology.data_size * _micro_batches(parallel.config)
    split = parts > 1 or parallel.topology.inner_size > 1
    random = [layer.name for layer in random_layers(plain)] if split else []
    statistics = [layer.name for layer in statistic_layers(plain)] if parts > 1 else []
    return tuple(random), tuple(statistics)


def _named(model: keras.Model, names: tuple[str, ...]) -> list[keras.layers.Layer]:
    return [one for one in random_layers(model) + statistic_layers(model) if one.name in names]


def _micro_batches(config: ParallelConfig) -> int:
    return 1 if config.pipeline is None else config.pipeline.micro_batches
