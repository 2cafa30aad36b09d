"""Where rows of the batch meet in a Keras model: outputs, `add_loss`, state, one by one.

A replica computes its own rows. What follows from them alone equals one device: outputs row by
row, means over rows, statistics that are linear in means. Everything else is a `Finding`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from kdist._compat import keras_models
from kdist.config.operands import operands
from kdist.graphs.chance import chance_kept
from kdist.graphs.layer_names import layer_of
from kdist.program.program import Program
from kdist.rows.interpreter import ROW_BY_ROW
from kdist.rows.model_study import Finding, ModelStudy, Path, Square
from kdist.rows.study import Analysis, NotStudied, analyse, cause
from kdist.rows.values import Const, Linear, Mixing, RowDependence, Rows, Value, flow_of

import keras
import tensorflow as tf

_ROW_BY_ROW = (
    keras.layers.BatchNormalization,
    keras.layers.TextVectorization,
    keras.layers.HashedCrossing,
)


def study_model(model: keras.Model, x: Any, training: bool, loss_from_layers: str) -> ModelStudy:
    """Follows the batch through a built model's forward pass. Nothing runs.

    Args:
        model: The model.
        x: Its inputs, as structure of anything with shape and dtype; dim 0 is the batch.
        training: Whether the pass is that of training.
        loss_from_layers: See `ParallelConfig`.
    """
    if x is None:
        return ModelStudy(failed="its inputs are not known before the first batch")
    program = Program(model, loss_from_layers == "mean")
    return study_program(
        program, _with_declared_sizes(x, model), training, loss_from_layers, _static_batch(model)
    )


def study_program(
    program: Program, x: Any, training: bool, loss_from_layers: str, rows: int | None = None
) -> ModelStudy:
    """Follows the batch through a program's forward pass. Nothing runs.

    Args:
        program: The program.
        x: See `study_model`.
        training: See `study_model`.
        loss_from_layers: See `study_model`.
        rows: Of the batch, if it takes no others.
    """
    try:
        specs = keras.tree.map_structure(_spec, x)
        sizes = [n for v in program.state.written for n in v.shape]
        returned = _Returned()
        with chance_kept(), _marked_row_by_row(program.model):
            analysis = analyse(
                _pass_of(program, training, returned),
                specs,
                batch_size=rows,
                avoid=[n for n in sizes if n],
            )
        return _Reading(program, analysis, returned, loss_from_layers).result()
    except NotStudied as error:
        return ModelStudy(failed=str(error))
    except Exception as error:  # whatever a model does: training must not depend on this
        return ModelStudy(failed=f"{type(error).__name__}: {error}")


def _spec(leaf: Any) -> tf.TensorSpec | None:
    if leaf is None:
        return None
    if getattr(leaf, "sparse", False) or getattr(leaf, "ragged", False):
        raise NotStudied("an input is sparse or ragged")
    return tf.TensorSpec(leaf.shape, leaf.dtype)


def _with_declared_sizes(x: Any, model: keras.Model) -> Any:
    """Inputs, in which sizes that a batch (a ragged one, say) leaves open are the model's."""

    def filled(given: Any, declared: Any) -> Any:
        if given is None or getattr(given, "sparse", False) or getattr(given, "ragged", False):
            return given
        both = zip(given.shape, declared.shape, strict=True)
        shape = [want if have is None else have for have, want in both]
        return keras.KerasTensor(shape, keras.backend.standardize_dtype(given.dtype))

    try:
        return keras.tree.map_structure(filled, x, model.input)
    except (AttributeError, TypeError, ValueError):  # another structure, or none that is known
        return x


def _static_batch(model: keras.Model) -> int | None:
    """The only batch size that a model takes, if its inputs name one."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    sizes = {t.shape[0] for t in inputs if t is not None and len(t.shape)}
    return sizes.pop() if len(sizes) == 1 else None


@dataclasses.dataclass
class _Returned:
    """What a traced pass returns.

    Attributes:
        names: For each flat value "output:i", "added:i" or "state:i", i counting within its kind,
            and for state being the position in `ModelState.written`.
        paths: Of the outputs.
        adders: The layer that gave each value of "added".
    """

    names: list[str] = dataclasses.field(default_factory=list)
    paths: list[Path] = dataclasses.field(default_factory=list)
    adders: list[keras.Layer | None] = dataclasses.field(default_factory=list)


def _pass_of(program: Program, training: bool, returned: _Returned) -> Callable[[Any], Any]:
    """The forward pass as a function of the inputs, all state being constants of unknown value.

    Metrics start at zero, so that what is added to them shows. The function fills `returned`.
    """
    state = program.state

    def forward(x: Any) -> Any:
        params = [_unknown(v) for v in state.params]
        carried = [_unknown(v) for v in state.fixed + state.seeds]
        carried += [tf.zeros(v.shape, v.dtype) for v in state.metrics]
        result = program.collect(params, carried, x, training)
        outputs = keras.tree.flatten(result["outputs"])
        returned.paths = [path for path, _ in keras.tree.flatten_with_path(result["outputs"])]
        returned.adders = program.traced(training).adders
        returned.names = [
            *(f"output:{i}" for i in range(len(outputs))),
            *(f"added:{i}" for i in range(len(result["added"]))),
            *(f"state:{i}" for i in program.traced(training).updated),
        ]
        return [*outputs, *result["added"], *result["updated"]]

    return forward


def _unknown(variable: keras.Variable) -> Any:
    return tf.compat.v1.placeholder(variable.dtype, variable.shape)


@contextlib.contextmanager
def _marked_row_by_row(model: keras.Model) -> Iterator[None]:
    """Meanwhile, what some layers of Keras return is marked to count row by row.

    That BatchNormalization normalises by a replica's rows is known and documented, and would hide
    what follows. TextVectorization and HashedCrossing, which go over one list, keep rows.
    """
    layers = [one for one in keras_models.flat_layers(model) if isinstance(one, _ROW_BY_ROW)]
    with keras_models.calls_kept(layers):
        for layer in layers:
            keras_models.give_call(layer, _marked(keras_models.call_of(layer)))
        yield


def _marked(call: Callable) -> Callable:
    def row_by_row(*args: Any, **kwargs: Any) -> Any:
        outputs = call(*args, **kwargs)
        every = [outputs, *operands((args, kwargs))]
        if not all(isinstance(one, tf.Tensor) for one in every):  # ragged or sparse
            return outputs
        marked = tf.identity_n(every, name=ROW_BY_ROW)[0]
        if marked.shape.rank:  # taking texts apart loses how many rows there are
            marked.set_shape([every[1].shape[0], *marked.shape[1:]])
        return marked

    return row_by_row


class _Reading:
    """Turns what is known about the tensors of a model's pass into findings."""

    def __init__(
        self, program: Program, analysis: Analysis, returned: _Returned, loss_from_layers: str
    ) -> None:
        self.program, self.analysis = program, analysis
        self.names, self.paths_of_outputs = returned.names, returned.paths
        self.loss_from_layers = loss_from_layers
        self.layers = keras_models.flat_layers(program.model)
        self.paths = [layer.path for layer in self.layers if layer.path]
        self.adders = returned.adders
        self.row_adders = self._row_adders()

    def result(self) -> ModelStudy:
        """Outputs and losses first, then state."""
        kinds = {"output": self._output, "added": self._added, "state": self._state}
        found: list[Finding] = []
        for i, name in enumerate(self.names):
            kind, _, number = name.partition(":")
            finding = kinds[kind](int(number), self.analysis.values[i], self.analysis.tensors[i])
            if finding is not None:
                found.append(finding)
        accepted = [self._in_layer(m).layer for m in self.analysis.accepted]
        norms = {one.path for one in self.layers if isinstance(one, _ROW_BY_ROW[0])}
        statistics = [path for path in accepted if path in norms]
        return ModelStudy(
            tuple(found),
            tuple(self._in_layer(m) for m in self.analysis.mixings),
            tuple(dict.fromkeys(statistics)),
            moving=tuple(self._moving()),
            constant_ids=self.analysis.constant_ids,
            squares=tuple(self._squares()),
            row_adders=self.row_adders,
            adds_losses=bool(self.adders),
        )

    def _squares(self) -> Iterator[Square]:
        for name, tensor in zip(self.names, self.analysis.tensors):
            kind, _, number = name.partition(":")
            shape = () if tensor is None or not tensor.shape.rank else tensor.shape
            if kind == "output" and self.analysis.batch in shape[1:]:
                yield Square(self._name(int(number)), self.paths_of_outputs[int(number)])

    def _moving(self) -> Iterator[str]:
        state = self.program.state
        known = {id(v) for v in (*state.seeds, *state.metrics)} | self._statistics()
        for name in self.names:
            kind, _, number = name.partition(":")
            if kind == "state" and id(state.written[int(number)]) not in known:
                yield state.written[int(number)].path

    def _in_layer(self, mixing: Mixing) -> Mixing:
        path = layer_of(mixing.name, self.paths) or self.program.model.name
        return dataclasses.replace(mixing, layer=path)

    def _where(self, value: Value, tensor: Any) -> Mixing | None:
        found = cause(value, tensor)
        return None if found is None else self._in_layer(found)

    def _output(self, index: int, value: Value, tensor: Any) -> Finding | None:
        if tensor is None or flow_of(value) is RowDependence.ROWS:
            return None
        alike = isinstance(value, Const) and value.power == 0 and value.is_flat(0)
        if alike and tensor.shape.rank and tensor.shape[0] == self.analysis.batch:
            return None
        name, where = self._name(index), self._where(value, tensor)
        if isinstance(value, Linear | Const | Rows):
            return Finding(name, "has no row of its own for each row of the batch", where)
        return Finding(name, "mixes rows", where)

    def _name(self, index: int) -> str:
        """Of an output."""
        model = self.program.model
        names = getattr(keras_models.functional_of(model) or model, "output_names", None) or []
        if index < len(names):
            return f"output {names[index]!r}"
        path = self.paths_of_outputs[index]
        named = any(isinstance(key, str) for key in path)
        return f"output {'/'.join(map(str, path))!r}" if named else f"output {index}"

    def _row_adders(self) -> frozenset[keras.Layer | None]:
        first = self.names.index("added:0") if "added:0" in self.names else 0
        means: set[keras.Layer | None] = set()
        for i, layer in enumerate(self.adders, start=first):
            if not self._adds_rows_up(self.analysis.values[i], self.analysis.tensors[i]):
                means.add(layer)
        return frozenset(self.adders) - means

    def _adds_rows_up(self, value: Value, tensor: Any) -> bool:
        """Whether a value had an entry for each row before `Program.collect` summed it."""
        if tensor is None or tensor.op.type != "Sum" or flow_of(value) is RowDependence.MEAN:
            return False
        if isinstance(value, Const) and value.power != 1:
            return False
        sizes = tensor.op.inputs[0].shape
        return any(n and n % self.analysis.batch == 0 for n in sizes if sizes.rank)

    def _added(self, index: int, value: Value, tensor: Any) -> Finding | None:
        flow, where = flow_of(value), self._where(value, tensor)
        if where is not None and where.name == tensor.op.name:
            # A value of several entries is summed by the program, outside of the layer.
            where = self._in_layer(dataclasses.replace(where, name=tensor.op.inputs[0].op.name))
        name = "a value given to add_loss"
        constant = isinstance(value, Const) and value.power == 0
        if self.loss_from_layers == "sum" or self.adders[index] in self.row_adders:
            if flow is RowDependence.SUM or (isinstance(value, Const) and value.power == 1):
                return None
            if flow is RowDependence.MEAN or constant:
                why = 'is no sum over rows, and loss_from_layers="sum" adds it replica by replica'
                return Finding(name, why, where)
            if self.loss_from_layers == "mean":
                return Finding(name, "has an entry for each row, in which others may meet", where)
        elif flow is RowDependence.MEAN or constant:
            return None
        elif flow is RowDependence.SUM or isinstance(value, Const):
            why = 'is a sum over rows, which loss_from_layers="sum" is for'
            return Finding(name, why, where)
        return Finding(name, "mixes rows", where)

    def _state(self, position: int, value: Value, tensor: Any) -> Finding | None:
        state = self.program.state
        variable = state.written[position]
        known = isinstance(value, Const) and value.power == 0
        if id(variable) in self._statistics():
            return None
        name, where = f"state {variable.path!r}", self._where(value, tensor)
        if any(variable is v for v in state.metrics):
            added = isinstance(value, Linear) and value.power == 0
            counted = isinstance(value, Const) and value.power == 1
            if added or counted:
                return None
            return Finding(name, "is a metric to which not every row adds its own part", where)
        if known or (flow_of(value) is RowDependence.MEAN and tensor.dtype.is_floating):
            return None
        if isinstance(value, Const):
            return Finding(name, "counts rows", where)
        if isinstance(value, Rows):
            return Finding(name, "holds rows of the batch", where)
        why = "is no mean over rows" if tensor.dtype.is_floating else "counts what is in the rows"
        return Finding(name, why, where)

    def _statistics(self) -> set[int]:
        layers = [n for n in self.layers if isinstance(n, keras.layers.BatchNormalization)]
        return {id(v) for layer in layers for v in layer.variables}
