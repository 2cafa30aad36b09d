"""`verify`: one batch on one device and over the mesh, everything compared."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

from kdist.contract import is_built
from kdist.parallel import attached
from kdist.verification.cause import likely_cause
from kdist.verification.report import Verification
from kdist.verification.tolerance import TOLERANCES
from kdist.verification.trial import OneDeviceFailed, Request, Trial, lossy_settings, run_trial
from kdist.verification.twin import NoTwin, chance_kept

import keras


def verify(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    dtype: str = "float64",
) -> Verification:
    """Compares one batch on one device with the same batch over the mesh.

    Two twins of the model are made from its configuration, with its weights, state and optimizer:
    a plain one on the mesh's first device, and one that is parallelized as the model is. Both
    predict the batch and train one step on it. Outputs, each loss term, metrics, gradients, state
    of layers, and weights and optimizer slots after the update are compared. The model itself, and
    the random numbers that Python and NumPy draw later, stay as they are, bit by bit.

    If something differs, the comparison is made once more with random layers switched off and
    `BatchNormalization` given its moving statistics on both sides, and then without compressed
    gradients and 16-bit moments. Only if nothing differs then is the first difference put down to
    these, by name.

    Args:
        model: A parallelized, compiled model, before or after training.
        x: Inputs of one batch: arrays or tensors.
        y: Targets.
        sample_weight: Weights of examples.
        dtype: "float64", where rounding cannot hide a mistake; the model's own dtype policy where
            it does not run in float64. "own": its dtype policy, with wider tolerances.

    Returns:
        A `Verification`; print it.

    Raises:
        ValueError: The model is not parallelized, or not compiled; the dtype is another; or the
            model cannot be made again from its configuration.

    Example:
        >>> report = kdist.verify(model, x[:32], y[:32])
        >>> assert report.ok, report
    """
    started = time.perf_counter()
    parallel = attached(model)
    if not model.compiled:
        raise ValueError(
            "kdist.verify compares the loss and the update too. Call model.compile(optimizer=..., "
            f"loss=...) first. Received: model={model.name!r}"
        )
    if dtype not in ("float64", "own"):
        raise ValueError(
            "dtype is 'float64', or 'own' for the model's own dtype policy. "
            f"Received: dtype={dtype!r}"
        )
    batch = (x, y, sample_weight)
    if not is_built(model):
        parallel.step_for(batch)
    with chance_kept(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return _verified(model, batch, dtype, started, lambda: _texts(caught))
        except NoTwin as reason:
            raise ValueError(
                "kdist.verify compares twins of the model, which has to be made again from its "
                f"configuration. Received: model {model.name!r}; {reason}"
            ) from reason


def _verified(
    model: keras.Model, batch: Any, dtype: str, started: float, warned: Callable[[], list[str]]
) -> Verification:
    own = model.dtype_policy.name
    policy = own if dtype == "own" else "float64"
    way = "a twin of the model on one device, and one over the mesh"
    try:
        request, trials, explained = _trials(model, batch, policy)
    except OneDeviceFailed as reason:
        if policy == own:
            raise ValueError(f"The model does not run on one device: {reason}") from reason
        way += f", in {own}: on one device it does not run in float64 ({reason})"
        request, trials, explained = _trials(model, batch, own)
    first, last = trials[0], trials[-1]
    cause = _by_design(explained) if last.ok and not first.ok else ""
    if not last.ok:
        cause = likely_cause(last.comparison.differences, last.study)
    return Verification(
        ok=last.ok,
        differences=first.comparison.differences,
        cause=cause,
        first_layer=first.study.layer,
        explained_by=sum(explained.values(), ()) if last.ok else (),
        unexplained=last.comparison.differences,
        dtype=request.policy,
        way=way,
        compared=first.comparison.compared,
        tolerance=request.tolerance,
        seconds=time.perf_counter() - started,
        notes=tuple(dict.fromkeys([*first.notes, *warned()])),
    )


def _trials(
    model: keras.Model, batch: Any, policy: str
) -> tuple[Request, list[Trial], dict[str, tuple[str, ...]]]:
    """The comparison, and those without what differs by design while it fails.

    Returns:
        The request, the comparisons, and what the last one leaves out: kind -> names.
    """
    request = Request(model, batch, policy, TOLERANCES[policy])
    trials = [run_trial(request)]
    explained: dict[str, tuple[str, ...]] = {}
    first = trials[0]
    if not first.ok and first.excused:
        explained = {"random": first.random, "statistics": first.statistics}
        trials.append(run_trial(request, quiet=True))
    lossy = lossy_settings(model)
    if not trials[-1].ok and lossy:
        explained["lossy"] = lossy
        trials.append(run_trial(request, quiet=bool(first.excused), lossless=True))
    return request, trials, explained


def _by_design(explained: dict[str, tuple[str, ...]]) -> str:
    """What the differences are put down to."""
    texts = {
        "random": "random layers draw other numbers on replicas than on one device",
        "statistics": "BatchNormalization normalises each replica's rows by themselves",
        "lossy": "settings that round on purpose",
    }
    parts = [f"{texts[kind]}: {', '.join(names)}" for kind, names in explained.items() if names]
    return "; ".join(parts) + "."


def _texts(caught: list[warnings.WarningMessage]) -> list[str]:
    """Warnings that were raised meanwhile, each once."""
    own = [w for w in caught if not issubclass(w.category, DeprecationWarning)]
    return [str(w.message) for w in own]
