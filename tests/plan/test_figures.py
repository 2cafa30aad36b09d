"""Every number that the plan, `inspect` and `CommFusion` print, against what was executed.

One test over (level x mesh x fusion x embedding or not): counts and bytes of the messages of each
kind, rows of tables, stored and updated bytes, and what the callback logs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import kdist
from kdist import FusionConfig, OptimizerConfig
from kdist.api.attached import attached
from kdist.callbacks import CommFusion
from kdist.graphs import executed
from kdist.sharding.device import Device

import keras
import numpy as np
import pytest
import tensorflow as tf

from ..equivalence.matrix import product, spread
from ..runtime.step_parts import Parts, first_step

ROWS, LOOK_UPS, COLUMNS = 16, 6, 8
"""Rows of the table, look-ups of an example, columns of the table."""
BATCH = 8
MESHES = {
    "data4": {"data": 4},
    "data2_model2": {"data": 2, "model": 2},
    "global_data4": {"data": 4},
    "global_data2_model2": {"data": 2, "model": 2},
    "global_pipe2_data2": {"pipe": 2, "data": 2},
    "global_pipe2_data2_model2": {"pipe": 2, "data": 2, "model": 2},
    "pipe2_data2": {"pipe": 2, "data": 2},
    "pipe2_data2_model2": {"pipe": 2, "data": 2, "model": 2},
}
FUSIONS = {
    "auto": FusionConfig(),
    "none": FusionConfig(mode="none"),
    "size": FusionConfig(mode="size", size_mb=300 / 2**20),
    "index": FusionConfig(mode="index", index=(2,)),
}
CUTS = {
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", None),
    "table/embeddings": (None, "model"),
}
# What a collective is computed by, where one graph spans the slice.
COLLECTIVE = re.compile(r"(DTensor\w+Op[^/]*/group\d+)/(sum|gather|sum\d+)$")
KINDS = {"sum": "all-reduce", "gather": "all-gather"}
DEFAULT = [
    (0, "data4", "auto", True),
    (1, "data4", "size", True),
    (2, "data4", "index", False),
    (3, "data4", "none", True),
    (0, "data2_model2", "none", False),
    (1, "data2_model2", "index", True),
    (3, "data2_model2", "size", False),
    (1, "global_data4", "size", True),
    (3, "global_data2_model2", "none", True),
    (1, "pipe2_data2", "none", True),
    (3, "pipe2_data2", "auto", True),
    (2, "pipe2_data2_model2", "size", False),
]


def network(embedding: bool) -> keras.Model:
    keras.utils.set_random_seed(0)
    if embedding:
        inputs = keras.Input((LOOK_UPS,), dtype="int32")
        x = keras.layers.Embedding(ROWS, COLUMNS, name="table")(inputs)
        x = keras.layers.Flatten(name="flat")(x)
    else:
        x = inputs = keras.Input((LOOK_UPS * COLUMNS,))
    x = keras.layers.Dense(8, "tanh", name="up")(x)
    return keras.Model(inputs, keras.layers.Dense(4, name="down")(x))


def trained(level: int, mesh: str, fusion: str, embedding: bool) -> tuple[Any, ...]:
    """The model, its plan before the first step, the step's parts, and what was executed."""
    axes, cuts = MESHES[mesh], CUTS if embedding else {k: v for k, v in CUTS.items() if k[0] != "t"}
    model = network(embedding)
    micro = 1 if mesh.startswith("global") else 2
    stages = {"table|flat|up": 0, "down": 1}
    pipeline = kdist.PipelineConfig(micro_batches=micro, stages=stages)
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(**axes),
        layout_map=cuts if "model" in axes else None,
        optimizer=OptimizerConfig(level=level, threshold_kb=0),
        fusion=FUSIONS[fusion],
        batch_semantics="global" if mesh.startswith("global") else "replica",
        pipeline=pipeline if "pipe" in axes else None,
    )
    kdist.parallelize(model, config)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    before = model.plan()
    x = np.arange(BATCH * LOOK_UPS).reshape(BATCH, LOOK_UPS) % ROWS
    if not embedding:
        x = np.ones((BATCH, LOOK_UPS * COLUMNS), np.float32)
    parts, functions = first_step(model, x, np.ones((BATCH, 4), np.float32))
    return model, before, parts, functions


@pytest.mark.parametrize(
    ("level", "mesh", "fusion", "embedding"),
    spread(product((0, 1, 2, 3), MESHES, FUSIONS, (False, True)), DEFAULT),
)
def test_figures_are_those_of_the_executed_step(
    level: int, mesh: str, fusion: str, embedding: bool
) -> None:
    model, before, parts, functions = trained(level, mesh, fusion, embedding)
    plan = model.plan()
    assert plan == before
    check_messages(plan, parts, functions)
    check_tables(plan, parts, functions, embedding)
    check_bytes_at_rest(model, plan)
    check_callback(model, plan)
    inspection = kdist.inspect(model, BATCH)
    check_inside(plan, check_collectives(inspection, functions))
    check_peaks(level, inspection, parts, functions)


def the_step(functions: list[executed.ExecutedFunction]) -> executed.ExecutedFunction:
    return executed.largest([f for f in functions if len(f.select(executed.ASSIGNMENTS)) > 5])


def check_messages(plan: Any, parts: Parts, functions: Any) -> None:
    step = the_step(functions)
    table = parts.table(step)
    if plan.topology.num_stages == 1:  # else boundary tensors travel too, which no plan counts
        assert not [what for what in table if what.startswith("unexplained")], table
    names = {"reduce": "gradient", "join": "join", "broadcast": "value", "gather": "gather"}
    sent = {w: (table[n], parts.nbytes(step, n)) for w, n in names.items() if n in table}
    planned = {t.what: (t.messages, t.nbytes) for t in plan.traffic()}
    assert sent == planned


def check_tables(plan: Any, parts: Parts, functions: Any, embedding: bool) -> None:
    assert [t.path for t in plan.tables()] == ["table/embeddings"] * embedding
    step = the_step(functions)
    shapes = [
        parts._shape(parts.inlined(t))
        for t in step.transfers
        if t.dtype == "float32" and (parts.explain(t) == "rows" or of_micro_batch(t))
    ]
    for one in plan.tables():
        assert len(shapes) == one.messages
        known = [tuple(shape) for shape in shapes if shape.is_fully_defined()]
        # Each transfer of values has one of indices; which rows fall on a part is not known before.
        sent = sum(rows * (4 * columns + 4) for rows, columns in known)
        looked_up = BATCH // plan.topology.data_size * LOOK_UPS
        assert one.at_most == (len(known) < len(shapes))
        assert sent <= one.nbytes(looked_up)
        assert one.at_most or sent == one.nbytes(looked_up)
        assert str(one).endswith(f"{one.row_bytes} B x looked-up rows of a replica")


def of_micro_batch(sent: Any) -> bool:
    """Whether a stage's backward call made it, with the rows of a micro-batch of a pipeline."""
    rows = BATCH // 4 * LOOK_UPS
    return bool(re.search(r"\dB\d/PartitionedCall", sent.tensor)) and sent.shape == (rows, COLUMNS)


def check_bytes_at_rest(model: keras.Model, plan: Any) -> None:
    parallel = attached(model)
    weights, slots = Counter[str](), Counter[str]()
    for entry in parallel.entries.values():
        for local in entry.locals.values():
            weights[Device.parse(local.value.device).name] += local.numpy().nbytes
    scalars = Counter[str]()
    for one in (o for group in parallel.update.jobs.local for o in group):
        for variable in one.optimizer.variables:
            device = Device.parse(variable.value.device).name
            kind = slots if variable.shape != () else scalars
            kind[device] += variable.numpy().nbytes
    devices = plan.devices()
    assert {d.device: d.parameter_bytes for d in devices} == {
        d.device: weights[d.device] for d in devices
    }
    # Adam keeps two moments of what it updates.
    assert {d.device: 2 * d.updated_bytes for d in devices} == {
        d.device: slots[d.device] for d in devices
    }
    assert {d.device: d.state_bytes for d in devices} == {
        d.device: slots[d.device] + scalars[d.device] for d in devices
    }
    for memory in kdist.report.memory.measure(parallel, None):
        assert memory.parameters == weights[memory.device]
        assert memory.slots == slots[memory.device] + scalars[memory.device]


def check_collectives(inspection: kdist.Inspection, functions: Any) -> Counter[Any]:
    """What `inspect` says of one slice is what each slice executed; returns all that was."""
    topology = inspection.plan.topology
    executed_on: dict[int, Counter[Any]] = {}
    scattered: dict[tuple[int, str], list[int]] = {}
    for node in the_step(functions).nodes:
        if match := COLLECTIVE.search(node.name):
            s = next(i for i, one in enumerate(topology.slices) if node.device in one.devices)
            if (kind := KINDS.get(match[2])) is not None:
                executed_on.setdefault(s, Counter())[kind, node.shape] += 1
            else:  # each member adds up its part
                group = node.name.rpartition("/")[0]
                scattered.setdefault((s, group), []).append(math.prod(node.shape))
    for (s, _), sizes in scattered.items():
        executed_on.setdefault(s, Counter())["reduce-scatter", sum(sizes)] += 1
    found = inspection.collectives
    said = Counter(map(key_of, found))
    total = sum(executed_on.values(), Counter[Any]())
    if one_program(inspection.plan):
        # Its collectives are of the forward pass; the update sums gradients over data.
        sizes = {one.axis: math.prod(map(topology.axis_size, one.axis)) for one in found}
        expected = Counter[Any]()
        for one in found:
            # Nobody asks for the loss but where it is logged.
            devices = len(topology.devices) // topology.num_stages
            groups = devices // sizes[one.axis] if one.shape else 1
            expected[key_of(one)] += groups
        assert total == expected
        assert "data" not in {a for one in found if one.phase == "backward" for a in one.axis}
        # Rows are cut: the loss is a sum over their parts.
        assert "data" in {a for one in found if one.phase == "forward" for a in one.axis}
    elif topology.inner_size == 1:
        assert not said and not executed_on
    elif topology.num_stages == 1:
        assert said and executed_on == dict.fromkeys(range(topology.data_size), said)
    else:  # each stage has collectives of its own, in each of two micro-batches
        assert said
        assert total == Counter({k: 2 * topology.data_size * n for k, n in said.items()})
    for one in inspection.collectives:
        assert one.bytes == math.prod(one.shape) * 4
    return total


def check_inside(plan: Any, total: Counter[Any]) -> None:
    """What the plan says of collectives inside layers is what was executed."""
    said, executed_bytes, said_bytes = Counter[str](), Counter[str](), Counter[str]()
    for one in plan.inside:
        said[one.kind] += one.collectives
        said_bytes[one.kind] += one.nbytes(BATCH)
    counts = Counter[str]()
    for (kind, size), count in total.items():
        counts[kind] += count
        executed_bytes[kind] += 4 * count * (size if isinstance(size, int) else math.prod(size))
    if one_program(plan):
        # Of the loss, a scalar, one group's sum is asked for.
        assert all(0 <= said[kind] - counts[kind] < said[kind] for kind in counts), (said, counts)
        assert sum((said_bytes - executed_bytes).values()) <= 4 * plan.topology.inner_size
    else:
        assert said == counts
        assert said_bytes == executed_bytes


def key_of(one: Any) -> tuple[str, Any]:
    """What is counted: of a reduce-scatter the elements, since nodes have parts of its shape."""
    return one.kind, math.prod(one.shape) if one.kind == "reduce-scatter" else one.shape


def check_peaks(level: int, inspection: kdist.Inspection, parts: Parts, functions: Any) -> None:
    """Gradients and gathered parameters, against what the executed step was sent and made.

    The exact formulas, on a model of many layers, are in `test_memory.py`.
    """
    plan = inspection.plan
    assert not inspection.not_analysed
    step, arrived = the_step(functions), Counter[str]()
    for sent in step.transfers:
        if parts.explain(sent) in ("gather", "value", "join"):
            size = tf.as_dtype(sent.dtype).size
            arrived[sent.target] += parts._shape(parts.inlined(sent)).num_elements() * size
    shards = plan.topology.data_size if level == 3 else 1
    firsts = {one.devices[0] for one in plan.topology.slices}
    used = {d.device: d.parameter_bytes * shards for d in plan.devices()}
    for m in inspection.memory:
        assert None not in (m.gradients, m.gathered, m.both, m.live)
        assert max(m.gradients, m.gathered) <= m.both <= m.gradients + m.gathered
        assert m.both <= m.live
        # A bucket that a device joins is there as one and in parts.
        assert m.gathered <= (2 * used[m.device] if arrived[m.device] else 0)
        if plan.topology.num_stages == 1 and not plan.tables() and level < 2:
            # The gradient of what is whole on a slice is needed from its first device.
            elsewhere = 0 if m.device in firsts else sum(p.nbytes for p in plan.weights if whole(p))
            assert m.gradients == used[m.device] - elsewhere
        if level == 3:
            assert m.gathered > 0


def one_program(plan: Any) -> bool:
    """Whether all replicas compute in one, over the whole batch."""
    return any("computes over the whole batch" in note for note in plan.notes)


def whole(placement: Any) -> bool:
    """Whether every device of a slice has the same part of a weight."""
    return len({str(placement.inner_index(k)) for k in range(len(placement.table[0]))}) == 1


def check_callback(model: keras.Model, plan: Any) -> None:
    callback, logs = CommFusion(), {}
    callback.set_model(model)
    callback.on_epoch_end(0, logs)
    traffic = plan.traffic()
    assert logs["comm_collectives"] == sum(t.collectives for t in traffic)
    assert logs["comm_bytes"] == sum(t.nbytes for t in traffic)
    assert logs["comm_direct"] + logs["comm_joined"] == logs["comm_collectives"]
    assert logs["comm_seconds"] > 0
    tables = {f"comm_row_bytes/{t.path}": t.row_bytes for t in plan.tables()}
    assert {k: v for k, v in logs.items() if k.startswith("comm_row_bytes")} == tables
