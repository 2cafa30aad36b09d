"""What the plan says that stages send to each other is what the executed step sends."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import kdist
from kdist.graphs.executed import ExecutedTransfer, largest, watch
from kdist.plan.boundaries import BoundaryTensor, boundary_traffic

import keras
import numpy as np
import pytest

ROWS, MICRO_BATCHES = 16, 4


def model_with_skip(activation: str) -> keras.Model:
    """A skip connection passes through the second stage; ids have no gradient."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((6,))
    x = skip = keras.layers.Dense(4, activation, name="one")(x)
    x = keras.layers.Dense(6, activation, name="two")(x)
    x = keras.layers.Concatenate(name="three")([x, skip])
    x = keras.layers.Dense(3, name="four")(x)
    return keras.Model(inputs, x)


def first_step(
    micro_batches: int, chunks: int = 1, activation: str = "tanh", **axes: int
) -> tuple[Any, list[ExecutedTransfer]]:
    """The plan, and what crosses from one stage to another in a step's programs."""
    names = ["one", "two", "three", "four"]
    stages = {name: min(i, axes["pipe"] * chunks - 1) for i, name in enumerate(names)}
    cut = {"two/kernel": (None, "model")} if "model" in axes else None
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map=cut,
        pipeline=kdist.PipelineConfig(
            micro_batches=micro_batches,
            stages=stages,
            schedule="1f1b" if chunks == 1 else "interleaved",
            chunks=chunks,
        ),
    )
    model = kdist.parallelize(model_with_skip(activation), config)
    model.compile("sgd", "mse")
    x, y = np.ones((ROWS, 6), "f4"), np.ones((ROWS, 3), "f4")
    step = largest(watch(lambda: model.train_on_batch(x, y)))
    plan = model.plan()
    stage = {d: one.stage for one in plan.topology.slices for d in one.devices}
    sent = [t for t in step.transfers if re.search(r"replica\d+/\d+[FBIW]\d+", t.tensor)]
    return plan, [t for t in sent if not t.control and stage[t.source] != stage[t.target]]


@pytest.mark.parametrize(
    ("axes", "chunks", "activation"),
    [
        ({"pipe": 2, "data": 2}, 1, "tanh"),
        ({"pipe": 4}, 1, "tanh"),
        ({"pipe": 2}, 2, "tanh"),
        ({"pipe": 4}, 1, "sigmoid"),
    ],
    ids=str,
)
def test_bytes_and_messages_are_those_of_the_executed_step(
    axes: dict[str, int], chunks: int, activation: str
) -> None:
    """Of a sigmoid no logits are sent that no layer asks for."""
    plan, sent = first_step(MICRO_BATCHES, chunks, activation, **axes)
    planned = plan.between_stages()
    # The last stage's loss and outputs go to the first device, for metrics.
    last = re.compile(rf"replica\d+/{axes['pipe'] * chunks - 1}F")
    sent = [t for t in sent if not last.match(t.tensor)]
    assert sum(t.messages for t in planned) == len(sent)
    # Of some TensorFlow tells no shape.
    rows = ROWS // axes.get("data", 1) // MICRO_BATCHES
    sizes = [rows * x.row_bytes for t in planned for x in t.tensors for _ in range(1 + x.floating)]
    known = Counter(t.nbytes for t in sent if t.nbytes is not None)
    times = len(sent) // len(sizes)
    assert known <= Counter(sizes * times)
    assert sum(t.nbytes(ROWS) for t in planned) == sum(sizes) * times


@pytest.mark.parametrize("dropout", [False, True])
def test_logits_of_an_early_output_are_planned(dropout: bool) -> None:
    """A softmax of the first stage that the loss sees is sent with its logits, as the plan says."""
    x = inputs = keras.Input((6,))
    x = keras.layers.Dense(4, "sigmoid", name="one")(x)
    early = keras.layers.Dense(5, "softmax", name="early")(x)
    early = keras.layers.Dropout(0.5, seed=1, name="drop")(early) if dropout else early
    late = keras.layers.Dense(3, name="late")(x)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(pipe=2),
        pipeline=kdist.PipelineConfig(
            micro_batches=MICRO_BATCHES, stages={"one": 0, "early": 0, "drop|late": 1}
        ),
    )
    model = kdist.parallelize(keras.Model(inputs, [early, late]), config)
    model.compile("sgd", ["categorical_crossentropy", "mse"])
    targets = [np.full((ROWS, 5), 0.2, "f4"), np.ones((ROWS, 3), "f4")]
    step = largest(watch(lambda: model.train_on_batch(np.ones((ROWS, 6), "f4"), targets)))
    (planned,) = model.plan().between_stages()
    names = [one.name for one in planned.tensors]
    assert names == ["one", "early", "early's logits"]
    passes = [t for t in step.transfers if re.search(r"replica\d+/(0[F]|1[BIW])\d+", t.tensor)]
    sent = [t for t in passes if not t.control and t.source != t.target]
    assert len(sent) == planned.messages


def test_halves_travel_with_mixed_precision() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        plan, sent = first_step(MICRO_BATCHES, pipe=4)
    finally:
        keras.config.set_dtype_policy("float32")
    sizes = {one.name: one.row_bytes for t in plan.between_stages() for one in t.tensors}
    assert sizes == {"one": 2 * 4, "two": 2 * 6, "three": 2 * 10}
    rows = ROWS // MICRO_BATCHES
    assert {t.nbytes for t in sent if t.nbytes} <= {rows * size for size in sizes.values()}


def test_a_nested_model_and_two_inputs_are_planned_before_the_first_batch() -> None:
    inner_in = keras.Input((4,))
    inner = keras.Model(inner_in, keras.layers.Dense(4, name="within")(inner_in), name="inner")
    one, other = keras.Input((4,), name="one"), keras.Input((3, None), name="other")
    pooled = keras.layers.GlobalAveragePooling1D(data_format="channels_first", name="pool")(other)
    x = keras.layers.Concatenate(name="join")([inner(one), pooled])
    model = keras.Model([one, other], keras.layers.Dense(2, name="head")(x))
    stages = {"inner.*": 0, "pool": 0, "join": 1, "head": 1}
    pipeline = kdist.PipelineConfig(micro_batches=2, stages=stages)
    config = kdist.ParallelConfig(mesh=kdist.mesh(pipe=2), pipeline=pipeline)
    (planned,) = kdist.parallelize(model, config).plan().between_stages()
    assert {x.row_bytes for x in planned.tensors} == {4 * 4, 4 * 3}
    assert planned.messages == 2 * 2 * 2


def test_over_inner_axes_no_more_is_sent() -> None:
    """A gradient that leads to whole weights alone is needed on one device."""
    plan, sent = first_step(MICRO_BATCHES, pipe=2, model=2)
    (planned,) = plan.between_stages()
    rows = ROWS // MICRO_BATCHES
    crossing = [t for t in sent if t.shape == (rows, *planned.tensors[0].shape)]
    stage = {d: one.stage for one in plan.topology.slices for d in one.devices}
    forward = [t for t in crossing if stage[t.target] == planned.target]
    assert len(forward) == planned.messages // 2
    assert 0 < len(crossing) - len(forward) <= len(forward)
    assert sum(t.nbytes for t in crossing) <= planned.nbytes(ROWS)


def test_a_tensor_without_a_gradient_goes_one_way() -> None:
    ids, hidden = BoundaryTensor("ids", (7,), 4, False), BoundaryTensor("x", (7, 2), 4, True)
    one, two = boundary_traffic([[ids, hidden], [hidden]], 3, 2, 4, 1)
    assert (one.messages, two.messages) == (2 * 4 * 3, 2 * 4 * 2)
    assert one.nbytes(8) == 8 * (28 + 2 * 56)
    assert str(one) == "140 a row of the batch"


def test_unknown_dims_are_said() -> None:
    (one,) = boundary_traffic([[BoundaryTensor("x", (None, 2), 4, True)]], 2, 1, 1, 2)
    assert one.row_bytes is None and one.nbytes(8) is None
    assert str(one) == "by dims of unknown size: (None, 2)"


def test_inner_axes_send_whole_tensors_at_most() -> None:
    (one,) = boundary_traffic([[BoundaryTensor("x", (2,), 4, True)]], 2, 1, 3, 2)
    assert one.messages == 12
    assert str(one) == "at most 32 a row of the batch"
