"""What must be true of where the parts of a training step run, and of what travels.

Each check is a function, so that `test_placement_can_fail.py` can show that it fails on an engine
that is wrong in just that way while its losses stay right.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import kdist
from kdist.api.attached import attached
from kdist.graphs import executed
from kdist.graphs.executed import ASSIGNMENTS, PRODUCTS, ExecutedFunction
from kdist.sharding.mesh import Topology

import keras
import numpy as np

from .step_parts import Parts, first_step

ROWS, FEATURES, HIDDEN, OUTPUTS, BLOCKS = 16, 8, 32, 4, 2
# A step of Adam writes the weight and its two moments.
MOMENTS = 2
WRITES_PER_UPDATE = 1 + MOMENTS
METRIC_VARIABLES = 2  # mean absolute error: sum and count
LOSS_VARIABLES = 2
# Forward one product a Dense layer; backward two, and one less where the input needs no gradient:
# here every Dense layer's input comes out of layers with weights.
FORWARD, BACKWARD = 2 * BLOCKS + 1, 2 * (2 * BLOCKS + 1)
FIRST = "/device:CPU:0"
CUTS = {
    r".*up_\d/kernel": (None, "model"),
    r".*up_\d/bias": ("model",),
    r".*down_\d/kernel": ("model", None),
}
X = np.random.default_rng(0).normal(size=(ROWS, FEATURES)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(ROWS, OUTPUTS)).astype(np.float32)


class Trained(NamedTuple):
    """A model after its first step, and what that executed."""

    model: keras.Model
    parts: Parts
    functions: list[ExecutedFunction]

    @property
    def step(self) -> ExecutedFunction:
        """The step's one graph; over DTensor all of it that comes after the programs."""
        return executed.largest([f for f in self.functions if self.updates(f)])

    @staticmethod
    def updates(function: ExecutedFunction) -> bool:
        """Whether a function writes many variables."""
        return len(function.select(ASSIGNMENTS)) > 5

    @property
    def topology(self) -> Topology:
        return attached(self.model).topology


def blocks(stateful: bool = False) -> keras.Model:
    """Residual blocks that widen and narrow, as in a transformer's feed-forward layers."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    x = inputs = keras.Input((FEATURES,))
    for n in range(BLOCKS):
        hidden = layers.LayerNormalization(name=f"norm_{n}")(x)
        hidden = layers.Dense(HIDDEN, "gelu", name=f"up_{n}")(hidden)
        if stateful:
            hidden = layers.BatchNormalization(name=f"batch_norm_{n}")(hidden)
            hidden = layers.Dropout(0.5, name=f"dropout_{n}")(hidden)
        x = layers.Add(name=f"add_{n}")([x, layers.Dense(FEATURES, name=f"down_{n}")(hidden)])
    return keras.Model(inputs, layers.Dense(OUTPUTS, name="head")(x), name="blocks")


def compiled(axes: dict[str, int], stateful: bool = False, overlap: bool = True) -> keras.Model:
    cuts = CUTS if "model" in axes else None
    # Kernels travel alone; vectors, which have few bytes, together.
    fusion = kdist.FusionConfig(mode="size", size_mb=1 / 1024, overlap=overlap)
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=cuts, fusion=fusion)
    model = kdist.parallelize(blocks(stateful), config)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def trained(axes: dict[str, int], stateful: bool = False, overlap: bool = True) -> Trained:
    model = compiled(axes, stateful, overlap)
    return Trained(model, *first_step(model, X, Y))


def check_every_device_computes(run: Trained) -> None:
    """Each device runs all products of its slice's program, forward and backward, once."""
    products = [n for f in run.functions for n in f.select(PRODUCTS)]
    for backward, expected in ((False, FORWARD), (True, BACKWARD)):
        found = Counter(n.device for n in products if n.backward is backward)
        assert found == dict.fromkeys(run.topology.devices, expected)


def weight_bytes(run: Trained) -> dict[str, int]:
    """Bytes of weights that an optimizer wrote, per device."""
    written: Counter[str] = Counter()
    for node in run.step.select(ASSIGNMENTS):
        if nbytes := run.parts.updated_weight(node):
            written[node.device] += nbytes
    return dict(written)


def check_updates(run: Trained) -> None:
    """Optimizer math is where the plan says, balanced by bytes, and every copy is written."""
    plan = run.model.plan()
    devices = {d.device: d for d in plan.devices()}
    assert weight_bytes(run) == {d.device: d.updated_bytes for d in devices.values()}
    dealt = [sum(plan.unit_bytes(plan.units[n]) for n in b.units[0]) for b in plan.buckets]
    biggest = max(*dealt, *(plan.unit_bytes(u) for u in plan.units))
    loads = [d.updated_bytes for d in devices.values()]
    assert max(loads) - min(loads) <= biggest
    copies = Counter[str]()
    for unit in plan.units:
        placement = plan.weights[plan.trainable[unit.variable]]
        for s, k in placement.shards[unit.shard].holders:
            if (s, k) != unit.owner:
                copies[run.topology.slices[s].devices[k]] += 1
    expected = {
        d.device: WRITES_PER_UPDATE * d.updates + bool(d.updates) + copies[d.device]
        for d in devices.values()
    }
    for bucket in plan.buckets:
        # Its moments are one vector each.
        for (s, k), units in zip(bucket.owners, bucket.units):
            expected[run.topology.slices[s].devices[k]] -= MOMENTS * (len(units) - 1)
    expected[FIRST] += METRIC_VARIABLES + LOSS_VARIABLES
    assert run.step.count(ASSIGNMENTS) == expected


def expected_transfers(
    run: Trained, leaves: int, statistics: int = 0, seeds: int = 0
) -> dict[str, int]:
    """The transfers of a step, by what they are for.

    Args:
        run: The step; its first slice begins on the first device, where tensors without a device
            of their own are.
        leaves: Tensors of a batch that the step cuts over the slices.
        statistics: Non-trainable weights that the forward pass updates.
        seeds: Seed generators.
    """
    topology, plan = run.topology, run.model.plan()
    others, devices = topology.data_size - 1, len(topology.devices)
    traffic = {t.what: t.messages for t in plan.traffic()}
    updating = {topology.slices[u.owner[0]].devices[u.owner[1]] for u in plan.units}
    expected = {
        # What the plan counts: each unit's gradient to its owner, each new value back.
        "gradient": traffic["reduce"],
        "value": traffic["broadcast"],
        # Each device but the first gets its slice's part of the batch; a slice returns its part
        # of the loss.
        "data": leaves * (devices - 1),
        "loss": others,
        # The state of the metrics goes from slice to slice and back to the first.
        "metric": METRIC_VARIABLES * topology.data_size,
        # Once per device that updates something.
        "learning rate": len(updating - {FIRST}),
        "seed": seeds * others,
        # Statistics go to the first slice, and their mean to all.
        "state": 2 * statistics * others,
        # Every device tells the first when it is done.
        "control": devices - 1,
    }
    return {what: count for what, count in expected.items() if count}


def check_transfers(run: Trained, leaves: int = 2, **state: int) -> None:
    """The step's transfers are the planned ones, the few others by formula, and no more.

    Those inside a slice are left to `check_inner_transfers`.
    """
    found = run.parts.table(run.step)
    found.pop("inner", None)
    assert found == expected_transfers(run, leaves, **state)
    planned = {t.what: t.nbytes for t in run.model.plan().traffic()}
    assert run.parts.nbytes(run.step, "gradient") == planned["reduce"]
    assert run.parts.nbytes(run.step, "value") == planned["broadcast"]


def check_batch_is_cut(run: Trained, whole: int) -> None:
    """Of the batch, each device but the first is sent its slice's rows, not all of them.

    Args:
        run: The step.
        whole: Bytes of what the step cuts.
    """
    size, devices = run.topology.data_size, len(run.topology.devices)
    assert run.parts.nbytes(run.step, "data") == whole * (devices - 1) // size


def check_every_part(run: Trained) -> None:
    """Each device of a slice runs its part of every product, once."""
    products = run.step.select(PRODUCTS)
    assert {f for f in run.functions if f.select(PRODUCTS)} == {run.step}
    part = HIDDEN // run.topology.inner_size
    rows = ROWS // run.topology.data_size
    for s, one in enumerate(run.topology.slices):
        for k, device in enumerate(one.devices):
            found = Counter(n.backward for n in products if n.device == device)
            # The head is whole on each device, and its gradient is needed from one.
            assert found == {False: FORWARD, True: BACKWARD - (k > 0)}, (s, device)
            shapes = Counter(
                (re.search(r"(up|down|head)", n.name).group(), n.shape)
                for n in products
                if n.device == device and n.name.endswith("MatMul/MatMul_1") | n.backward
            )
            # The gradients of the two kernels are parts of them, of whole rows of this slice.
            assert shapes["up", (FEATURES, part)] >= BLOCKS
            assert shapes["down", (part, FEATURES)] >= BLOCKS
            assert shapes["down", (rows, part)] >= BLOCKS


def check_inner_transfers(run: Trained) -> None:
    """Between devices of a slice goes what the collectives of its program need, and no more."""
    pairs = (run.topology.inner_size - 1) * run.topology.data_size
    found = [t for t in run.step.transfers if run.parts.explain(t) == "inner"]
    collectives = kdist.inspect(run.model).collectives
    assert {c.kind for c in collectives} == {"all-reduce"}
    assert {t.shape for t in found} == {c.shape for c in collectives}
    # The other members' parts go to one of them, and the sum goes to those that need it: of the
    # first block's gradient, who updates the weights before it, maybe where it was made.
    sums = [t for t in found if "/group" in t.tensor]
    assert len(found) - len(sums) == len(collectives) * pairs
    assert (len(collectives) - 1) * pairs <= len(sums) <= len(collectives) * pairs


def check_collectives(run: Trained) -> None:
    """One all-reduce forward and one backward per block (Shoeybi et al. 2019), and no other."""
    inspection = kdist.inspect(run.model)
    for n in range(BLOCKS):
        assert inspection.count("all-reduce", f"down_{n}", "forward") == 1
        assert inspection.count("all-reduce", f"up_{n}", "backward") == 1
    assert len(inspection.collectives) == 2 * BLOCKS
    rows = ROWS // run.topology.data_size
    assert {c.shape for c in inspection.collectives} == {(rows, FEATURES)}
    assert {c.axis for c in inspection.collectives} == {("model",)}
