"""Random graphs with masks, cut into the stages of a pipeline, equal one device."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import keras
import pytest

from . import random_graphs
from .case import Case, Data
from .harness import compare
from .optimizer_zoo import OPTIMIZERS
from .random_graphs import Net, Step, nets
from .repeatable import repeatable


def _stages(net: Net, first: int) -> dict[str, int]:
    """Puts the steps from number `first` on into the second stage, those that lead to an output."""
    there = {layer.name for layer in net.build().layers}
    later = {net.name(i) for i in range(first, len(net.steps))}
    found = {"table": 0, **dict.fromkeys(sorted(later), 1)}
    # The nodes of a nested model stand in its place, where it is not given a mask.
    return {
        "nested(/.*)?" if name == "nested" else name: stage
        for name, stage in found.items()
        if name in there
    }


def _check(net: Net, stages: dict[str, int], engine: str) -> None:
    import kdist

    count = len(net.build().outputs)

    def data(seed: int, samples: int) -> Data:
        x, y = random_graphs.data(seed, samples)
        return x, [y] * count if count > 1 else y, None

    def losses(reduction: str) -> Any:
        return [keras.losses.MeanSquaredError(reduction=reduction) for _ in range(count)]

    case = Case(
        name="random",
        build=net.build,
        data=data,
        loss=losses,
        metrics=lambda: None,
        layout_map={},
        zero_gradient_paths=(".*key/bias",),
    )
    compare(
        case,
        {"pipe": 2},
        optimizer=OPTIMIZERS["sgd_momentum"],
        engine=engine,
        epochs=1,
        config={"pipeline": kdist.PipelineConfig(micro_batches=2, stages=stages)},
    )


def test_a_mask_is_taken_off_a_tensor_that_was_sent_twice(engine: str) -> None:
    # Dropout without effect returns its input itself; both go to the next stage.
    steps = (
        Step("nothing", 0, 0, False),
        Step("attention", 0, 0, False),
        Step("add", 0, 2, False),
    )
    net = Net(steps, ())
    _check(net, _stages(net, 1), engine)


@pytest.mark.long
@repeatable(40)
@hypothesis.given(net=nets(), first=st.integers(0, 7))
def test_random_graphs_in_stages_equal_one_device(net: Net, first: int, engine: str) -> None:
    stages = _stages(net, first)
    hypothesis.assume({0, 1} <= set(stages.values()))
    try:
        _check(net, stages, engine)
    except ValueError as refused:
        # Keras may call layers in another order than that of the steps.
        hypothesis.assume("takes the Keras mask off" not in str(refused))
        raise
