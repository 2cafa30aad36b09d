"""In the step that TensorFlow executes, a variable is written after all reads that came before.

Read from the optimized graphs of all devices: between a read and a write of one variable there must
be a path, one way or the other, or which of them comes first is a matter of luck.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import kdist
from kdist._compat import keras_trainer
from kdist._compat.run_metadata import function_graphs
from kdist.graphs.write_order import READS, writes_after_reads

import keras
import pytest
import tensorflow as tf
from tensorflow.core.framework import types_pb2

from ..equivalence.features import BY_NAME as FEATURES
from ..equivalence.harness import Run, compiled, precision
from ..equivalence.matrix import MESHES, product, spread
from ..equivalence.optimizer_zoo import OPTIMIZERS
from ..equivalence.zoo import BY_NAME

Name = tuple[int, str]


class Executed:
    """The partition graphs of the largest function that a call ran, as one graph."""

    def __init__(self, call: Callable[[], Any]) -> None:
        found = max(
            function_graphs(call), key=lambda g: sum(len(part.node) for part in g.partition_graphs)
        )
        self.nodes: dict[Name, Any] = {
            (k, node.name): node
            for k, part in enumerate(found.partition_graphs)
            for node in part.node
        }
        sends = {self._key(node): name for name, node in self._of_types("_Send", "_HostSend")}
        self.after: dict[Name, list[Name]] = defaultdict(list)
        for name, node in self.nodes.items():
            for source in (tensor.lstrip("^").split(":")[0] for tensor in node.input):
                self.after[name[0], source].append(name)
            if node.op in ("_Recv", "_HostRecv"):
                self.after[sends[self._key(node)]].append(name)

    def _of_types(self, *types: str) -> Iterable[tuple[Name, Any]]:
        return [(name, node) for name, node in self.nodes.items() if node.op in types]

    @staticmethod
    def _key(node: Any) -> tuple[bytes, ...]:
        return tuple(node.attr[a].s for a in ("tensor_name", "send_device", "recv_device"))

    def by_variable(self) -> dict[Name, tuple[list[Name], list[Name]]]:
        """Reads and writes of each variable, by the name of its handle."""
        found: dict[Name, tuple[list[Name], list[Name]]] = defaultdict(lambda: ([], []))
        for name, node in self.nodes.items():
            for handle in self._handles(name[0], node):
                found[name[0], handle][node.op not in READS].append(name)
        return found

    def _handles(self, part: int, node: Any) -> Iterable[str]:
        """Names of the variables that a node reads, writes, or calls a function with."""
        if node.op in READS or (node.op.startswith("Assign") and "Variable" in node.op):
            given = list(node.input[:1])
        elif node.op in ("PartitionedCall", "StatefulPartitionedCall"):
            types = node.attr["Tin"].list.type
            given = [i for i, one in zip(node.input, types) if one == types_pb2.DT_RESOURCE]
        else:
            given = []
        for handle in (one.split(":")[0] for one in given):
            while self.nodes[part, handle].op in ("Identity", "Switch"):
                handle = self.nodes[part, handle].input[0].split(":")[0]
            yield handle

    def comes_before(self, first: Name, then: Name) -> bool:
        """Whether there is a path."""
        seen, stack = {first}, [first]
        while stack:
            for name in self.after[stack.pop()]:
                if name == then:
                    return True
                if name not in seen:
                    seen.add(name)
                    stack.append(name)
        return False

    def undecided(self) -> list[tuple[Name, Name]]:
        """Reads and writes of one variable of which either may be first."""
        return [
            (read, write)
            for reads, writes in self.by_variable().values()
            for read in reads
            for write in writes
            if not exclusive(read, write)
            and not self.comes_before(read, write)
            and not self.comes_before(write, read)
        ]


def exclusive(one: Name, other: Name) -> bool:
    """Whether only one of two runs: they are in the two branches of one `tf.cond`."""
    parts = zip(one[1].split("/"), other[1].split("/"))
    first = next(((a, b) for a, b in parts if a != b), None)
    return first in (("then", "else"), ("else", "then"))


PIPES = {"pipe2_data2": {"pipe": 2, "data": 2}, "all": {"pipe": 2, "data": 2, "model": 2}}


def executed(
    optimizer: str,
    level: int,
    mesh: str,
    name: str = "mlp",
    call: Callable[[keras.Model, Any, Any], Any] = keras.Model.train_on_batch,
    features: Sequence[str] = (),
    dtype: str = "float64",
    **config: Any,
) -> Executed:
    if level:
        config["optimizer"] = kdist.OptimizerConfig(level=level, threshold_kb=0)
    if mesh in PIPES:
        config["pipeline"] = kdist.PipelineConfig(micro_batches=2)
    run = Run(
        case=BY_NAME[name],
        mesh_axes=({**MESHES, **PIPES})[mesh],
        optimizer=OPTIMIZERS[optimizer],
        features=[FEATURES[feature] for feature in features],
        dtype=dtype,
        config=config,
    )
    with precision(run.dtype):
        model = compiled(run, "kdist")
        x, y, _ = run.case.data(0, 8)
        return Executed(lambda: call(model, x, y))


@pytest.mark.parametrize("mesh", ["data4", "data2_model2"])
@pytest.mark.parametrize(
    ("optimizer", "level"), [("muon", 0), ("muon", 1), ("muon", 3), ("lamb", 2), ("adam", 3)]
)
def test_a_step_reads_before_it_writes(optimizer: str, level: int, mesh: str) -> None:
    found = executed(optimizer, level, mesh)
    assert sum(len(writes) for _, writes in found.by_variable().values()) > 20
    assert found.undecided() == []


def test_a_decay_that_comes_early_is_before_its_update() -> None:
    """Muon's updates seem to follow from all sums, its decay from none."""
    assert executed("muon", 2, "data4", "gpt_tied").undecided() == []


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["data4", "data2_model2", *PIPES])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("optimizer", ["muon", "lamb", "adam", "sgd_momentum"])
@pytest.mark.parametrize("name", ["gpt_tied", "dlrm"])
def test_every_step_reads_before_it_writes(
    name: str, optimizer: str, level: int, mesh: str
) -> None:
    assert executed(optimizer, level, mesh, name).undecided() == []


def own_loop(model: keras.Model, x: Any, y: Any) -> None:
    @tf.function
    def step(x: Any, y: Any) -> Any:
        loss, gradients = kdist.gradients(model, x, y)
        kdist.apply_gradients(model, gradients)
        return loss

    step(tf.constant(x), tf.constant(y))


WAYS: dict[str, dict[str, Any]] = {
    "accumulation": {"features": ["gradient_accumulation"]},
    "loss scale": {"dtype": "mixed_float16"},
    "constraint and average": {"features": ["constraint", "ema"]},
    "compression": {"compression": kdist.CompressionConfig()},
    "global": {"batch_semantics": "global"},
    "whole loss": {"features": ["own_compute_loss"]},
    "own loop": {"call": own_loop},
}


OFTEN = [("accumulation", 1, "data4"), ("loss scale", 1, "data2_model2"), ("own loop", 1, "data4")]


@pytest.mark.parametrize(
    ("way", "level", "mesh"),
    spread(product(WAYS, (0, 1), ("data4", "data2_model2")), OFTEN),
)
def test_other_steps_read_before_they_write(way: str, level: int, mesh: str) -> None:
    found = executed("adam", level, mesh, **WAYS[way])
    assert sum(len(writes) for _, writes in found.by_variable().values()) > 4
    assert found.undecided() == []


def test_what_is_a_matter_of_luck_is_found() -> None:
    variable = tf.Variable(tf.ones([4]))

    @tf.function
    def stepped(x: Any, ordered: bool) -> Any:
        read = variable.read_value()
        if not ordered:
            keras_trainer.run_independently(read.op.inputs[0].op)
        variable.assign(x)
        return read + 1.0

    assert Executed(lambda: stepped(tf.zeros([4]), True)).undecided() == []
    assert Executed(lambda: stepped(tf.zeros([4]), False)).undecided()


@pytest.mark.parametrize("apart", [False, True])
def test_a_second_block_waits_for_the_reads_before_the_first(apart: bool) -> None:
    """As of a loop that computes gradients, and then applies them."""
    with tf.device("CPU:0"):
        a, b = tf.Variable(1.0), tf.Variable(2.0)

    def barriers(op: tf.Operation) -> list[tf.Operation]:
        return [one for one in op.control_inputs if one.type == "VarIsInitializedOp"]

    @tf.function(autograph=False)
    def stepped(x: Any) -> Any:
        read = a.read_value()
        with writes_after_reads(apart):
            a.assign(x)
        with writes_after_reads(apart):
            a.assign(x + 1.0)
        again = a.read_value() + b.read_value()
        with writes_after_reads(apart):
            a.assign(x + 2.0)
        with writes_after_reads(not apart):
            a.assign(x + 3.0)
        return read + again

    operations = stepped.get_concrete_function(tf.constant(0.0)).graph.get_operations()
    first, second, third, other = (
        barriers(op) for op in operations if op.type == "AssignVariableOp"
    )
    assert len(first) == 1 and second == first
    assert len(third) == 1 and barriers(third[0]) == first
    reads = {op for one in other for op in one.control_inputs if op.type in READS}
    assert len(other) == 1 and len(reads) == (3 if apart else 2)
    assert not barriers(other[0])


def test_evaluation_and_prediction() -> None:
    run = Run(case=BY_NAME["mlp"], mesh_axes=MESHES["data2_model2"], optimizer=OPTIMIZERS["muon"])
    model: keras.Model = compiled(run, "kdist")
    x, y, _ = run.case.data(0, 8)
    for call in (lambda: model.test_on_batch(x, y), lambda: model.predict_on_batch(x)):
        assert Executed(call).undecided() == []
