"""What the stages of a pipeline share: the model's state, its loss, what counts in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist._compat import keras_models
from kdist.dtensor.signatures import signature
from kdist.program.forward_scope import ForwardScope
from kdist.program.program import Program
from kdist.program.pruning import pruned
from kdist.stages.leaves import leaves, rebuild, specs
from kdist.stages.stages import StagedModel
from kdist.stages.walk import walk
from kdist.storage.fetched_table import is_fetched

import keras
import tensorflow as tf


class PipelineProgram(Program):
    """The pure functions of a model that is cut into stages.

    Args:
        model: A built Keras model.
        add_loss_mean: See `Program`.
        staged: The cut.
    """

    def __init__(self, model: keras.Model, add_loss_mean: bool, staged: StagedModel) -> None:
        super().__init__(model, add_loss_mean)
        self.staged = staged
        self._counting: dict[Any, CountFunction] = {}

    @property
    def penalized(self) -> list[int]:
        """Trainable variables with a weight penalty that a stage computes."""
        trainable = enumerate(self.state.trainable)
        return [i for i, v in trainable if v.regularizer is not None and not is_fetched(v)]

    def _look_up_stages(self, layer: keras.layers.Embedding) -> Sequence[tuple]:
        """See `Program`: where several do it."""
        users = self.staged.users().get(id(layer.embeddings), ())
        if len(users) < 2:
            return [()]
        stages = dict.fromkeys(map(self.staged.stage_of, users))
        return [(s, tuple(v for v in users if self.staged.stage_of(v) == s)) for s in stages]

    def _for_tables(self, x: Any, training: bool, tables: Any, values: Mapping[int, Any]) -> None:
        """See `FetchedTables`; stage by stage where each looks up for itself."""
        if not any(one.virtuals for one in self.tables.tables):
            super()._for_tables(x, training, tables, values)
            return
        mapping = [(v, values[id(v)]) for v in self.state.written if id(v) in values]
        found = self.inputs_by_name(x)
        with ForwardScope(mapping, self.state.trainable, tables, self.tables.layers):
            for virtual in range(self.staged.schedule.virtual_stages):
                tables.virtual = virtual
                walk(self, self.staged, virtual, found, training)

    def stage_with(self, variable: keras.Variable) -> int:
        """The first stage that uses a variable."""
        return self.staged.stage_of(self.staged.users().get(id(variable), (0,))[0])

    def inputs_by_name(self, x: Any) -> dict[str, Any]:
        """The model's inputs as its graph names them."""
        flat = keras_models.flat_inputs(self.staged.functional, x)
        return dict(zip(self.staged.described.inputs, flat))

    def count_function(self, part: Any, training: bool) -> CountFunction:
        """What computes how much a micro-batch counts; see `Program.counts`."""
        key = (training, *batch_key(part))
        if key not in self._counting:
            self._counting[key] = CountFunction(self, part, training)
        return self._counting[key]


class CountFunction:
    """Counts what Keras divides each compiled loss by, from as few tensors as that takes.

    Masks mostly follow from the model's inputs; the rest of the forward pass is cut off, and
    parameters that are not looked at stay where they are.

    Args:
        program: The program.
        part: (x, y, sample_weight) of a micro-batch; x as the model takes it.
        training: Training or inference.
    """

    def __init__(self, program: Program, part: Any, training: bool) -> None:
        state = program.state
        sizes = len(state.params), len(state.carried)
        given = leaves(part)

        def count(*flat: Any) -> Any:
            params, carried = flat[: sizes[0]], flat[sizes[0] : sum(sizes)]
            data = rebuild(part, flat[sum(sizes) : -1])
            return program.counts(list(params), list(carried), data, flat[-1], training)

        variables = [*state.params, *state.carried]
        wanted = [program.spec(v) for v in variables]
        wanted += [*specs(given), tf.TensorSpec([], tf.int32)]
        whole = tf.compat.v1.wrap_function(count, wanted)
        needed = _ancestors(whole.outputs)
        self.used = [i for i, t in enumerate(whole.inputs[: len(wanted)]) if t.op.name in needed]
        self._call = pruned(whole, [whole.inputs[i] for i in self.used], whole.outputs)
        self.variables = sum(sizes)

    def __call__(self, variable: Callable[[int], Any], part: Any, rows: Any) -> Any:
        """Counts, float64 (terms,).

        Args:
            variable: Gives the value of a variable, parameters first, then carried state.
            part: The micro-batch.
            rows: Rows of it that count.
        """
        data = [*leaves(part), rows]
        values = [
            variable(i) if i < self.variables else data[i - self.variables] for i in self.used
        ]
        return self._call(*values)[0]


def _ancestors(tensors: Sequence[Any]) -> set[str]:
    found: set[str] = set()
    waiting = [t.op for t in tensors]
    while waiting:
        operation = waiting.pop()
        if operation.name not in found:
            found.add(operation.name)
            waiting.extend(t.op for t in operation.inputs)
    return found


def batch_key(part: Sequence[Any]) -> tuple:
    """Tells apart what needs a trace of its own: structure, shapes, dtypes of a micro-batch."""
    return tuple(_key(one) for one in part)


def _key(part: Any) -> tuple:
    return (repr(keras.tree.map_structure(lambda t: t is None, part)), signature(leaves(part)))
