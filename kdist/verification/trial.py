"""One comparison: two fresh twins, one on one device and one over the mesh, and a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kdist._compat import keras_models
from kdist.api.attached import attached
from kdist.api.parallelize import Parallel, parallelize
from kdist.config.parallel import ParallelConfig
from kdist.config.state_format import StateFormatConfig
from kdist.optimizer.wrappers import unwrap
from kdist.program.batch import leading
from kdist.verification.calm import always_random, calm, random_layers, statistic_layers
from kdist.verification.compiled import compile_alike, copy_optimizers
from kdist.verification.declared import config_for, copy_declarations
from kdist.verification.no_twin import NoTwin
from kdist.verification.observe import as_array, on_one_device, over_mesh
from kdist.verification.observed import Comparison, Observed, compare_runs
from kdist.verification.rounding import rounds_inside
from kdist.verification.study import Study, parts_of, rows_meet_in, study
from kdist.verification.tolerance import Tolerance, compare, magnitude, widest
from kdist.verification.twin import batch_in, make_twin, paired, precision

import keras
import numpy as np
import tensorflow as tf

UNLIKE = 100
"""How much more than rounding the outputs of a model and its twin may be apart."""


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
        outputs: What the model itself predicts, by name; empty if that cannot be compared.
    """

    model: keras.Model
    batch: tuple[Any, Any, Any]
    policy: str
    tolerance: Tolerance
    outputs: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def config(self) -> ParallelConfig:
        """How the model is parallelized."""
        return attached(self.model).config


@dataclasses.dataclass(frozen=True)
class Trial:
    """What one comparison found.

    Attributes:
        comparison: The differences.
        runs: What was compared: one device, the mesh.
        study: What the layers give for each replica's rows; empty if nothing differs.
        random: Names of layers that rightly draw other random numbers than one device does.
        statistics: Names of layers that rightly normalise by the replicas' own statistics.
        notes: Why the mesh ran on gathered weights, if it did.
        rounds: An operation that makes float64 values smaller; None if there is none, or nothing
            differs.
    """

    comparison: Comparison
    runs: tuple[Observed, Observed]
    study: Study
    random: tuple[str, ...]
    statistics: tuple[str, ...]
    notes: tuple[str, ...] = ()
    rounds: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return self.comparison.ok

    @property
    def excused(self) -> tuple[str, ...]:
        """Names of all layers that may rightly differ."""
        return self.random + self.statistics


def study_of(model: keras.Model, x: Any, parallel: Parallel, tolerance: Tolerance) -> Study:
    """What a model's layers give for the rows that each replica, or micro-batch, has of a batch."""
    rows = int(leading(x).shape[0])
    parts = parts_of(rows, parallel.compute.data_size, _micro_batches(parallel.config))
    with tf.device(parallel.config.topology.devices[0]):
        return study(model, x, parts, tolerance)


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
        random, statistics = excused(plain, parallel, batch[0])
        if quiet:
            calm(named(plain, random + statistics))
            calm(named(mesh, random + statistics))
        for twin in (plain, mesh):
            compile_alike(request.model, twin, request.policy, lossless)
            copy_optimizers(request.model, twin)
        start = [(v, as_array(v.value)) for v in plain.variables]
        device = request.config.topology.devices[0]
        one = _on_one_device(plain, batch, device)
        _refuse_unlike(request, one)
        runs = one, over_mesh(mesh, batch)
        comparison = compare_runs(*runs, request.tolerance)

        found, rounds = Study(), None
        if not comparison.ok and keras_models.has_call(plain):
            for variable, value in start:
                variable.assign(value)
            if request.policy == "float64":
                rounds = rounds_inside(plain, batch[0])
            found = study_of(plain, batch[0], parallel, request.tolerance)
        notes = tuple(parallel.fallbacks)
        return Trial(comparison, runs, found, random, statistics, notes, rounds)


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
    attached(twin).observed = True
    return twin, attached(twin)


def _on_one_device(plain: keras.Model, batch: tuple[Any, Any, Any], device: str) -> Observed:
    try:
        return on_one_device(plain, batch, device)
    except Exception as error:  # whatever the user's model raises
        raise OneDeviceFailed(str(error).strip().splitlines()[0][:200]) from error


def own_tolerance(model: keras.Model) -> Tolerance:
    """How far runs of a model in its own dtypes may be apart."""
    return widest(layer.dtype_policy.name for layer in keras_models.flat_layers(model))


def _refuse_unlike(request: Request, one: Observed) -> None:
    """Refuses a twin that predicts something else than the model.

    Raises:
        NoTwin: The outputs differ by more than the model's own dtype explains.
    """
    loose = UNLIKE * own_tolerance(request.model).relative["output"]
    floor = max((magnitude(a) for a in request.outputs.values()), default=0.0)
    for name, mine in request.outputs.items():
        allowed, again = loose * max(magnitude(mine), floor), one.output.get(name)
        mine = mine if again is None else mine.astype(again.dtype)
        if again is None or compare("output", name, mine, again, allowed) is not None:
            raise NoTwin(f"made again from its configuration it predicts another output {name!r}")


def excused(
    plain: keras.Model, parallel: Parallel, x: Any
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the layers that may rightly differ on this mesh: (random, statistics).

    Of layers that draw in inference too, those in which rows of the batch meet are not among them:
    equal draws would hide that (a random order becomes the order in which the rows are).
    """
    parts = parallel.compute.data_size * _micro_batches(parallel.config)
    split = parts > 1 or parallel.compute.inner_size > 1
    always = [one for one in always_random(plain) if split and not rows_meet_in(plain, x, one)]
    random = [layer.name for layer in [*random_layers(plain), *always]] if split else []
    statistics = [layer.name for layer in statistic_layers(plain)] if parts > 1 else []
    return tuple(random), tuple(statistics)


def named(model: keras.Model, names: tuple[str, ...]) -> list[keras.layers.Layer]:
    """The random layers and those with statistics that have one of some names."""
    found = random_layers(model) + always_random(model) + statistic_layers(model)
    return [one for one in found if one.name in names]


def _micro_batches(config: ParallelConfig) -> int:
    return 1 if config.pipeline is None else config.pipeline.micro_batches
