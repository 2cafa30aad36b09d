"""`verify`: one batch on one device and over the mesh, everything compared."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from kdist._compat import keras_models
from kdist.api.attached import attached
from kdist.api.parallelize import Parallel
from kdist.api.preprocessed import preprocessed
from kdist.display.notices import without_retracing
from kdist.display.progress import shown
from kdist.graphs.chance import chance_kept
from kdist.program.batch import leading
from kdist.runtime.keras_contract import is_built
from kdist.runtime.metrics import overrides
from kdist.verification.calm import always_random
from kdist.verification.cause import likely_cause
from kdist.verification.itself import run_itself
from kdist.verification.no_twin import NoTwin
from kdist.verification.observe import predicted
from kdist.verification.observed import compare_runs
from kdist.verification.one_device import refuse_too_large
from kdist.verification.report import Verification
from kdist.verification.tolerance import TOLERANCES, unquantized
from kdist.verification.trial import (
    OneDeviceFailed,
    Request,
    Trial,
    lossy_settings,
    own_tolerance,
    run_trial,
)
from kdist.verification.twin import batch_in

import keras


@shown("verifying a step")
def verify(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    dtype: str = "float64",
    memory_limit: int | None = None,
) -> Verification:
    """Compares one batch on one device with the same batch over the mesh.

    Two twins of the model are made from its configuration, or attributes, with its weights, state
    and optimizer: a plain one on the mesh's first device, and one that is parallelized as the model
    is. Both predict the batch and train one step on it. Outputs in inference and in training, the
    loss and each of its parts, metrics, gradients, state of layers, and weights and optimizer slots
    after the update are compared. The model itself, and the random numbers that Python and NumPy
    draw later, stay as they are, bit by bit.

    If something differs, the comparison is made once more with random layers switched off and
    `BatchNormalization` given its moving statistics on both sides, and then without compressed
    gradients and 16-bit moments. Only if nothing differs then are these named as the cause.

    A model that cannot be made again is compared itself, in its own dtype and without an update;
    what that moves on is put back, and `Verification.way` says so. Of a model with its own
    `train_step`, what that returns is compared, and the state, weights and slots after it.

    Args:
        model: A parallelized, compiled model, before or after training.
        x: Inputs of one batch: arrays or tensors; what `fit` takes of a model with
            `preprocess_samples` (KerasHub's tasks).
        y: Targets.
        sample_weight: Weights of examples.
        dtype: "float64", where rounding cannot hide a mistake; the model's own dtype policy where
            it does not run in float64. "own": its dtype policy, with wider tolerances.
        memory_limit: Bytes of the one device; None for what is known of it (the host's memory, or
            the limit that a GPU was given).

    Returns:
        A `Verification`; print it.

    Raises:
        ValueError: The model is not parallelized, or not compiled; the dtype is another; the model
            does not fit one device; it has its own `train_step`, and cannot be made again.

    Example:
        >>> report = kdist.verify(model, x[:32], y[:32])
        >>> assert report.ok, report
    """
    attached(model)  # which refuses a model that is not parallelized
    batch = preprocessed(model, x, y, sample_weight)
    return verify_prepared(model, batch, dtype=dtype, memory_limit=memory_limit)


def verify_prepared(
    model: keras.Model,
    batch: tuple[Any, Any, Any],
    *,
    dtype: str = "float64",
    memory_limit: int | None = None,
) -> Verification:
    """`verify`, of a batch in the form that the model's steps get.

    Args:
        model: See `verify`.
        batch: (x, y, sample_weight).
        dtype: See `verify`.
        memory_limit: See `verify`.
    """
    started = time.perf_counter()
    parallel = attached(model)
    _check(model, dtype)
    if not is_built(model):
        _build(parallel, batch)
    rows = int(leading(batch_in("float32", batch[0])).shape[0])
    itemsize = 8 if dtype == "float64" else 4
    refuse_too_large(model, rows, itemsize, parallel.config.topology.devices[0], memory_limit)
    with chance_kept(), without_retracing(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        request, trials, way = _compared(model, batch, dtype)
        return _report(request, trials, way, time.perf_counter() - started, _texts(caught))


def _check(model: keras.Model, dtype: str) -> None:
    """Refuses a model without a loss or an update, and another dtype."""
    own = overrides(model, "train_step")  # which may have optimizers of its own
    if not model.compiled or (model.optimizer is None and not own):
        raise ValueError(
            "kdist.verify compares the loss and the update too. Call model.compile(optimizer=..., "
            f"loss=...) first. Received: model={model.name!r}"
        )
    if dtype not in ("float64", "own"):
        raise ValueError(
            "dtype is 'float64', or 'own' for the model's own dtype policy. "
            f"Received: dtype={dtype!r}"
        )


def _build(parallel: Parallel, batch: tuple[Any, Any, Any]) -> None:
    """Builds a model by its step."""
    if overrides(parallel.model, "train_step"):
        given = keras.utils.pack_x_y_sample_weight(*batch)
        parallel.prepare_own(parallel.model.train_step, given)
    else:
        parallel.step_for(batch)


def _compared(model: keras.Model, batch: Any, dtype: str) -> tuple[Request, list[_Tried], str]:
    """Compares twins, in float64 where that runs; the model itself where there are no twins.

    Returns:
        The request, the comparisons, and how they were made.
    """
    own = unquantized(model.dtype_policy.name)
    way = "a twin of the model on one device, and one over the mesh"
    request = _request(model, batch, own if dtype == "own" else "float64")
    try:
        try:
            return request, _trials(request, run_trial), way
        except OneDeviceFailed as reason:
            if request.policy == own:
                raise
            way += f", in {own}: on one device it does not run in float64 ({reason})"
            request = dataclasses.replace(request, policy=own, tolerance=own_tolerance(model))
            return request, _trials(request, run_trial), way
    except NoTwin as reason:
        why = str(reason)
    except OneDeviceFailed as reason:
        why = f"its twin does not run on one device: {reason}"
    if overrides(model, "train_step"):
        raise ValueError(
            "kdist.verify compares twins of a model with its own `train_step`, made from its "
            "configuration or attributes. Train a plain copy beside it and compare weights, or "
            f"leave verify out. Received: {type(model).__name__}; {why}"
        )
    request = dataclasses.replace(request, policy=own, tolerance=own_tolerance(model))
    way = f"the model itself, in {own}, without an update, weights, slots and metrics: {why}"
    return request, _trials(request, _itself), way


def _request(model: keras.Model, batch: Any, policy: str) -> Request:
    known = keras_models.has_call(model) and not always_random(model)
    outputs = predicted(model, batch_in("float32", batch[0])) if known else {}
    exact = TOLERANCES[policy] if policy == "float64" else own_tolerance(model)
    return Request(model, batch, policy, exact, outputs)


def _itself(request: Request, *, quiet: bool = False, lossless: bool = False) -> Trial:
    """`run_itself`; settings that round what is kept do not matter without an update."""
    return run_itself(request, quiet=quiet)


@dataclasses.dataclass(frozen=True)
class _Tried:
    """A comparison, and what it leaves out: kind -> names of layers or settings."""

    trial: Trial
    without: Mapping[str, tuple[str, ...]]


def _trials(request: Request, run: Callable[..., Trial]) -> list[_Tried]:
    """The comparison, and those without what differs by design while it fails."""
    first = run(request)
    tried = [_Tried(first, {})]
    quiet = {"random": first.random, "statistics": first.statistics}
    if not first.ok and any(quiet.values()):
        tried.append(_Tried(run(request, quiet=True), quiet))
    lossy = lossy_settings(request.model)
    if not tried[-1].trial.ok and lossy:
        without = {**(quiet if any(quiet.values()) else {}), "lossy": lossy}
        last = run(request, quiet=any(quiet.values()), lossless=True)
        tried.append(_Tried(last, without))
    return tried


def _report(
    request: Request, tried: list[_Tried], way: str, seconds: float, warned: list[str]
) -> Verification:
    notes = list(tried[0].trial.notes)
    if overrides(request.model, "compute_loss"):
        name = type(request.model).__name__
        notes.append(f"{name}.compute_loss is the model's own: the loss is compared as one term")
    own_step = ""
    if overrides(request.model, "train_step"):
        own_step = f"{type(request.model).__name__}.train_step"
        notes.append(
            f"{own_step} is the model's own: what it returns and what it leaves is compared"
        )
    if not tried[-1].trial.ok and tried[-1].trial.rounds is not None:
        request, tried = _in_fewer_bits(request, tried)
        notes.append(
            "in float64 too the model rounds to fewer bits inside, at "
            f"{tried[-1].trial.rounds!r}: float32's tolerance is used"
        )
    first, last = tried[0].trial, tried[-1].trial
    without = tried[-1].without if last.ok and not first.ok else {}
    cause = likely_cause(last.comparison.differences, last.study, own_step)
    return Verification(
        ok=last.ok,
        differences=first.comparison.differences,
        cause=_by_design(without) if without else cause,
        first_layer=first.study.layer,
        explained_by=sum(without.values(), ()),
        unexplained=last.comparison.differences,
        dtype=request.policy,
        way=way,
        compared=first.comparison.compared,
        tolerance=request.tolerance,
        seconds=seconds,
        notes=tuple(dict.fromkeys([*notes, *warned])),
    )


def _in_fewer_bits(request: Request, tried: list[_Tried]) -> tuple[Request, list[_Tried]]:
    """The same runs with float32's tolerance, for a model that rounds to float32 inside."""
    tolerance = TOLERANCES["float32"]

    def again(one: _Tried) -> _Tried:
        comparison = compare_runs(*one.trial.runs, tolerance)
        return _Tried(dataclasses.replace(one.trial, comparison=comparison), one.without)

    request = dataclasses.replace(request, tolerance=tolerance)
    return request, [again(one) for one in tried]


def _by_design(without: Mapping[str, tuple[str, ...]]) -> str:
    """What the differences are put down to."""
    texts = {
        "random": "random layers draw other numbers on replicas than on one device",
        "statistics": "BatchNormalization normalises each replica's rows by themselves",
        "lossy": "settings that round on purpose",
    }
    parts = [f"{texts[kind]}: {', '.join(names)}" for kind, names in without.items() if names]
    return "; ".join(parts) + "."


def _texts(caught: list[warnings.WarningMessage]) -> list[str]:
    """Warnings that were raised meanwhile, each once."""
    own = [w for w in caught if not issubclass(w.category, DeprecationWarning)]
    return [str(w.message) for w in own]
