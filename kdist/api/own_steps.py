"""Models that say themselves what a step is: what Keras calls in the place of kdist's steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kdist._compat import keras_models
from kdist.calls.layer_calls import LayerCalls
from kdist.calls.own_steps import OwnSteps
from kdist.runtime.inner_axes import InnerAxes
from kdist.runtime.keras_contract import step_function
from kdist.runtime.mesh_step import BatchFunction
from kdist.runtime.metrics import overrides
from kdist.runtime.one_device import OneDevice

import keras

if TYPE_CHECKING:
    from kdist.api.parallelize import Parallel


def has_own_step(model: keras.Model, kind: str) -> bool:
    """Whether the model's class has a `train_step`, `test_step` or `predict_step` of its own.

    Args:
        model: The model.
        kind: "train", "test" or "predict".
    """
    return overrides(model, f"{kind}_step")


def refuse_settings(parallel: Parallel, whose: str, trains: bool) -> None:
    """Refuses what steps of a user's own cannot honour.

    Args:
        parallel: What kdist attached to the model.
        whose: The step, for the user.
        trains: Whether it may train.

    Raises:
        ValueError: It is asked for.
    """
    config, model = parallel.config, parallel.model
    settings: dict[str, tuple[Any, str]] = {
        "pipeline": (config.pipeline, "stages are cut out of steps of kdist's own"),
    }
    if trains:
        budget = parallel.blocks.budget
        settings |= {
            "compression": (config.compression, "gradients come whole, call by call"),
            "recompute by a budget": (
                None if budget is None else config.recompute,
                "how many calls keep something at a time is the step's to say; "
                'policy="full" and "selective" hold',
            ),
        }
    for name, (value, why) in settings.items():
        if value:
            raise ValueError(
                f"A model in {whose} goes without {name}: {why}. Leave it out, or "
                "say what the step does by add_loss or compute_loss: docs/custom_loops.md has "
                f"recipes. Received: {type(model).__name__} with {name} {value!r}"
            )


def refuse_stages(parallel: Parallel) -> None:
    """Refuses stages of a model that has a step of its own in the place of a graph of layers.

    One with a graph may train by `kdist.gradients`, in stages, whatever its class overrides.

    Args:
        parallel: What kdist is about to attach to the model.

    Raises:
        ValueError: It is one, and they are asked for.
    """
    model = parallel.model
    if has_own_step(model, "train") and keras_models.functional_of(model) is None:
        refuse_settings(parallel, own_name("train"), trains=False)


def own_name(kind: str) -> str:
    """What a step of the model's own is called, for the user."""
    return f"its own `{kind}_step`"


def own_function(parallel: Parallel, kind: str, example: Any) -> Callable:
    """What Keras calls: steps of the model's own, whose layers run over the mesh.

    Args:
        parallel: What kdist attached to the model.
        kind: "train", "test" or "predict".
        example: A batch, or the specs of one.
    """
    parallel.prepare_own(getattr(parallel.model, f"{kind}_step"), example)
    refuse_prefetch(parallel, own_name(kind))
    model, updates = parallel.model, parallel.own_updates
    plain: list[OwnSteps] = []

    def on_plain() -> Callable:
        if not plain:
            plain.append(OwnSteps(parallel, calls_of(parallel, over=False), updates.applying))
        return getattr(plain[0], kind)

    if parallel.compute.inner_size == 1 or model.run_eagerly:
        return step_function(kind, on_plain(), model, _nothing)
    steps = OwnSteps(parallel, calls_of(parallel, over=True), updates.applying)
    function = BatchFunction(steps, kind, on_plain, model, parallel.fall_back, _nothing)
    return function.predict if kind == "predict" else function


def refuse_prefetch(parallel: Parallel, whose: str) -> None:
    """Refuses rows that are looked up a step ahead, by a step of the user's own.

    Args:
        parallel: What kdist attached to the model.
        whose: The step, for the user.

    Raises:
        ValueError: It is asked for.
    """
    assert parallel.layouts is not None
    names = [layer.path or layer.name for layer in parallel.layouts.prefetched]
    if names:
        raise ValueError(
            "What a step of one's own looks up is known when it calls the layer, so nothing can be "
            "fetched a step ahead. Leave prefetch=True out. Received: "
            f"{type(parallel.model).__name__} in {whose} with prefetch=True for {names}"
        )


def _nothing() -> None:
    """What such a step has done when the data has run out."""


def calls_of(parallel: Parallel, over: bool) -> LayerCalls:
    """Runs the model's layers over the mesh.

    Args:
        parallel: See `own_function`.
        over: Whether over inner axes, or on one device per slice.
    """
    program, xla = parallel.program, parallel.jit_compile is True and not parallel.xla_of_keras
    assert program is not None and parallel.layouts is not None
    backend: OneDevice | InnerAxes
    if over:
        backend = InnerAxes(
            program.state,
            parallel.stored_params(),
            parallel.layouts,
            parallel.config.enable_alltoall,
            parallel.model,
            jit_compile=xla,
            outlined=not program.blocks,
        )
    else:
        backend = OneDevice(
            program.state,
            parallel.stored_params(),
            parallel.compute,
            parallel.topology,
            jit_compile=xla,
        )
    loss_from_layers = parallel.config.loss_from_layers
    return LayerCalls(program, backend, loss_from_layers, parallel.warn_once, jit_compile=xla)
