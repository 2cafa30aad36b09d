"""Trains the same model twice, plain and parallel, and compares everything that can be observed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .case import Case
from .outcome import HALF_BITS, TOLERANCES, Outcome, Tolerance, check, eps_of
from .reference import reference_parts
from .run import Run
from .undecided import with_undecided

SEED = 1234


Engine = Callable[[keras.Model, Run], keras.Model]


def _plain(model: keras.Model, run: Run) -> keras.Model:
    return model


def _parts(model: keras.Model, run: Run) -> keras.Model:
    return reference_parts(model, run.replicas, micro_batches=run.micro_batches)


def _equal_parts(model: keras.Model, run: Run) -> keras.Model:
    return reference_parts(model, run.replicas, weighting="equal")


def _reference(model: keras.Model, run: Run) -> keras.Model:
    return ENGINES[reference_engine(run)](model, run)


def _kdist(model: keras.Model, run: Run) -> keras.Model:
    import kdist

    mesh = kdist.mesh(**run.mesh_axes)
    options = dict(run.config)
    layouts = run.layouts
    if callable(layouts):
        options["layout_map"] = layouts(mesh)
    elif layouts:
        options["layout_map"] = dict(layouts)
    if run.declare is not None:
        run.declare(model)
    config = kdist.ParallelConfig(mesh=mesh, **options)
    parallel = kdist.parallelize(model, config)
    assert parallel is model, "parallelize must return the model object that it was given"
    return parallel


ENGINES: Mapping[str, Engine] = {
    "plain": _plain,
    "parts": _parts,
    "equal_parts": _equal_parts,
    "reference": _reference,
    "kdist": _kdist,
}


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Sets Keras's float type and dtype policy, and puts the old ones back."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype if dtype in ("float64", "float32") else "float32")
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


def build(case: Case) -> keras.Model:
    """A fresh model with the same names and weights on every call.

    Constant tensors (zero biases, unit scales) get noise: a bias that is lost, doubled or put on
    the wrong slice shows only when it is not zero.
    """
    policy = keras.config.dtype_policy()
    # Without its garbage collection, which would take longer than the small models themselves.
    keras.utils.clear_session(free_memory=False)
    # `clear_session` also forgets the policy: a mixed one would silently become float32.
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(SEED)
    model = case.build()
    rng = np.random.default_rng(SEED)
    weights = model.get_weights()
    trainable = {id(variable) for variable in model.trainable_variables}
    for i, variable in enumerate(model.weights):
        if id(variable) in trainable and np.ptp(weights[i]) == 0:
            weights[i] = weights[i] + 0.1 * rng.normal(size=weights[i].shape)
    model.set_weights(weights)
    return model


class _BatchLosses(keras.callbacks.Callback):
    """Records the running loss after each batch: an error early in an epoch stays visible."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self.losses.append(float((logs or {})["loss"]))


def make_optimizer(run: Run, model: keras.Model) -> keras.optimizers.Optimizer:
    """The run's optimizer, with the options and edits of its features."""
    options: dict[str, Any] = {}
    for feature in run.features:
        options.update(feature.optimizer)
    optimizer = run.optimizer(**options)
    for feature in run.features:
        feature.edit_optimizer(optimizer, model)
    return optimizer


def _reduction(run: Run) -> str:
    chosen = {feature.reduction for feature in run.features} - {"sum_over_batch_size"}
    if len(chosen) > 1:
        raise ValueError(f"features ask for several reductions. Received: {sorted(chosen)}")
    return chosen.pop() if chosen else "sum_over_batch_size"


def compiled(run: Run, engine: str) -> keras.Model:
    """Builds, edits, places and compiles the run's model."""
    model = build(run.case)
    for feature in run.features:
        feature.edit(model)
    optimizer = make_optimizer(run, model)
    model = ENGINES[engine](model, run)
    options: dict[str, Any] = {
        "loss": run.case.loss(_reduction(run)),
        "metrics": _metrics(run),
        "loss_weights": run.case.loss_weights,
    }
    for feature in run.features:
        options.update(feature.compile(run.case))
    if hasattr(model, "_parts"):
        options["run_eagerly"] = True
    # With a GPU, Keras would have XLA compile it, and so fail on what XLA has no kernels for.
    options.update(run.compile if engine == "kdist" else {"jit_compile": False})
    model.compile(optimizer=optimizer, **options)
    if engine != "kdist" and isinstance(optimizer, keras.optimizers.ScheduleFreeAdamW):
        # Built inside the train function, as `fit` does by itself, its momentum does not start at
        # the weights as documented but at 0, and the first step throws the weights away.
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(model.trainable_variables)
    return model


def _metrics(run: Run) -> Any:
    metrics = run.case.metrics()
    return with_undecided(metrics, eps_of(run.dtype)) if run.dtype in HALF_BITS else metrics


def _rate(optimizer: keras.optimizers.Optimizer) -> float:
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    inner = getattr(optimizer, "optimizers", None)
    if inner is not None:
        return max(_rate(item) for item in inner)
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def slot_names(paths: Sequence[str]) -> list[str]:
    """Unique names of an optimizer's variables that tell parameter and kind.

    Adafactor names its sums of rows and of columns by the last part of the parameter's name alone;
    they come right before the parameter's velocity, which has the whole name.
    """
    names = list(paths)
    for i, path in enumerate(paths):
        for kind, distance in (("column", 1), ("row", 2)):
            velocity = paths[i + distance] if i + distance < len(paths) else ""
            if velocity.endswith(f"_{path.rsplit('/', 1)[-1]}_velocity"):
                names[i] = velocity.removesuffix("velocity") + kind
    return [f"{i}/{name}" for i, name in enumerate(names)]


def _values(names: Sequence[str], variables: Sequence[Any]) -> dict[str, np.ndarray]:
    # Values go through the Keras variable, as a user reads them.
    arrays = (np.array(keras.ops.convert_to_numpy(v)) for v in variables)
    return dict(zip(names, arrays, strict=True))


def _numbers(logs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value, "float64") for name, value in logs.items()}


def _inputs(run: Run, with_weights: bool) -> tuple[Any, Any, Any]:
    x, y, weight = run.case.data(SEED, run.samples)
    return x, y, weight if with_weights else None


def train(run: Run, engine: str) -> Outcome:
    """Trains, evaluates and predicts once.

    Args:
        run: What to train.
        engine: One of `ENGINES`.

    Returns:
        Everything observable afterwards.
    """
    with precision(run.dtype):
        model = compiled(run, engine)
        rate = _rate(model.optimizer)
        weighted = any(feature.sample_weight for feature in run.features)
        x, y, weight = _inputs(run, weighted)
        fit_options: dict[str, Any] = {}
        for feature in run.features:
            fit_options.update(feature.fit)
        trace = _BatchLosses()
        common: dict[str, Any] = {"verbose": 0}
        if run.source == "dataset":
            parts = (x, y) if weight is None else (x, y, weight)
            data = (tf.data.Dataset.from_tensor_slices(parts).batch(run.batch_size),)
        else:
            data = (x, y)
            common |= {"batch_size": run.batch_size, "sample_weight": weight}
        fit_options |= {"epochs": run.epochs, "callbacks": [trace], "shuffle": False}
        log = model.fit(*data, **common, **fit_options)
        evaluation = model.evaluate(*data, return_dict=True, **common)
        outputs = model.predict(x, batch_size=run.batch_size, verbose=0)
        history = {**log.history, "batch/loss": trace.losses}
        steps = run.epochs * -(-run.samples // run.batch_size)
        return _outcome(model, history, evaluation, outputs, drift=rate * steps)


def _outcome(
    model: keras.Model, history: Any, evaluation: Any, outputs: Any, *, drift: float
) -> Outcome:
    if not isinstance(outputs, dict):
        outputs = {f"output {i}": v for i, v in enumerate(keras.tree.flatten(outputs))}
    slots = model.optimizer.variables
    return Outcome(
        history=_numbers(history),
        evaluation=_numbers(evaluation),
        predictions=outputs,
        weights=_values([v.path for v in model.weights], model.weights),
        slots=_values(slot_names([v.path for v in slots]), slots),
        drift=drift,
    )


def train_batches(run: Run, engine: str, sizes: Sequence[int]) -> Outcome:
    """Trains, evaluates and predicts batch by batch, with `train_on_batch` and its relatives.

    Args:
        run: What to train; `batch_size`, `samples` and `epochs` have no meaning here.
        engine: One of `ENGINES`.
        sizes: Examples of each batch.

    Returns:
        Everything observable afterwards; `history` holds the logs of every batch.
    """
    with precision(run.dtype):
        model = compiled(run, engine)
        rate = _rate(model.optimizer)
        weighted = any(feature.sample_weight for feature in run.features)
        history: dict[str, list[float]] = {}
        for number, size in enumerate(sizes):
            x, y, weight = run.case.data(SEED + number, size)
            weight = weight if weighted else None
            logs = model.train_on_batch(x, y, sample_weight=weight, return_dict=True)
            for name, value in logs.items():
                history.setdefault(name, []).append(value)
        model.reset_metrics()
        evaluation = {}
        for size in sorted(set(sizes)):
            x, y, weight = run.case.data(SEED, size)
            weight = weight if weighted else None
            logs = model.test_on_batch(x, y, sample_weight=weight, return_dict=True)
            evaluation.update({f"{name} of {size}": value for name, value in logs.items()})
        x, _, _ = run.case.data(SEED, max(sizes))
        outputs = model.predict_on_batch(x)
        return _outcome(model, history, evaluation, outputs, drift=rate * len(sizes))


_references: dict[Hashable, Outcome] = {}
"""What references gave in this process: rows differ in the mesh and in how kdist works, mostly."""


def reference_of(run: Run, engine: str) -> Outcome:
    """What a reference gives for a run: trained once per process.

    Args:
        run: What to train.
        engine: "plain", or "parts", whose outcome depends on how batches are split as well.
    """
    case = run.case
    made = (case.build, case.data, case.loss, case.metrics, repr(case.loss_weights))
    settings = (run.batch_size, run.samples, run.epochs, run.dtype, run.source)
    parts = () if engine == "plain" else (run.replicas, run.micro_batches)
    key = (engine, parts, made, settings, run.optimizer, tuple(run.features))
    if key not in _references:
        _references[key] = train(run, engine)
    return _references[key]


def reference_engine(run: Run) -> str:
    """Engine of the reference: "parts" where the split is part of the mathematics, or "plain"."""
    synchronized = any(feature.synchronized for feature in run.features)
    synchronized |= run.config.get("batch_semantics") == "global"
    several = run.replicas * run.micro_batches > 1
    splits = run.case.has_batchnorm and several and not synchronized
    return "parts" if splits else "plain"


def compare(
    case: Case,
    mesh_axes: Mapping[str, int],
    *,
    optimizer: Callable[..., keras.optimizers.Optimizer],
    engine: str = "kdist",
    reference: str | None = None,
    tolerance: Tolerance | None = None,
    **options: Any,
) -> tuple[Outcome, Outcome]:
    """Trains on one plain device and under `engine` from the same weights, and compares.

    Args:
        case: The model and its data.
        mesh_axes: Mesh axis -> size, e.g. `{"data": 2, "model": 2}`.
        optimizer: Makes an optimizer; takes the options of the features by keyword.
        engine: The engine under test, one of `ENGINES`.
        reference: Engine of the reference; None chooses by `reference_engine`.
        tolerance: How far the runs may be apart; None takes that of the dtype.
        **options: Further fields of `Run`.

    Returns:
        The outcomes of the reference and of the engine.

    Raises:
        EquivalenceError: When they differ, naming the worst tensor.
    """
    run = Run(case=case, mesh_axes=mesh_axes, optimizer=optimizer, **options)
    expected = reference_of(run, reference or reference_engine(run))
    actual = train(run, engine)
    check(
        expected,
        actual,
        tolerance or TOLERANCES[run.dtype],
        case.zero_gradient_paths,
        title=f"{run.title} [{engine}]",
    )
    return expected, actual
