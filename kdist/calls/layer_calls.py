"""The layers of a model, called over its mesh by a training step of the user's own.

The outermost call of a layer whose outputs all have a row per example runs over the mesh
(`kdist.calls.over_mesh`). All else of the step is plain TensorFlow on whole tensors: losses,
metrics, what a model computes between its layers. So its numbers are those of one device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator
from types import CodeType
from typing import Any

from kdist._compat import (
    function_graphs,
    keras_autocast,
    keras_models,
    keras_remat,
    keras_seeds,
    keras_trainer,
)
from kdist._compat.custom_gradients import is_recorded
from kdist.calls.anchors import anchor, handle_of
from kdist.calls.arguments import CallArguments, any_symbolic, without_rows
from kdist.calls.by_replica import NotByReplica, by_replica, refuse_others
from kdist.calls.call_site import Again, call_site
from kdist.calls.functions import CalledProgram, CallFunctions, CallInput, NoRowsError, used_by
from kdist.calls.many_traces import ManyTraces
from kdist.calls.over_mesh import OverMesh
from kdist.calls.tables import CallTables
from kdist.calls.xla import refuse_within_xla
from kdist.dtensor import sizes
from kdist.dtensor.retraced import CannotExpand, Retrace
from kdist.dtensor.signatures import signature
from kdist.program.batch import SplitBatch, split
from kdist.program.program import Program
from kdist.rows.model import study_program
from kdist.rows.model_study import ModelStudy
from kdist.runtime.stage_backend import StageBackend
from kdist.stages.leaves import leaves
from kdist.stages.lowered import UNKNOWN, Known
from kdist.storage.constant_ids import knowing

import keras
import tensorflow as tf

_IN_LOOPS = "A call in a tf.cond, tf.while_loop, tf.map_fn or tf.vectorized_map"
_STATELESS = "A call by stateless_call, or within another keras.StatelessScope"


class LayerCalls:
    """Calls layers over a mesh.

    Args:
        program: The model's: knows its variables.
        backend: What a call runs on: `OneDevice` or `InnerAxes`.
        loss_from_layers: See `ParallelConfig`.
        tell: Told of what runs on one device, and of rows that meet.
        jit_compile: Whether XLA compiles calls over the mesh.

    Attributes:
        apart: Layers, by identity, whose calls run on one device.
        again: Calls that are differentiated again.
        every_gradient: Whether tensors that no tape knows get gradients too.
        inside: What stands for each `tf.function` that the step calls; see `traced_anew`.
    """

    def __init__(
        self,
        program: Program,
        backend: StageBackend,
        loss_from_layers: str,
        tell: Callable[[str], None],
        jit_compile: bool = False,
    ) -> None:
        self.program, self.backend, self.apart = program, backend, set[int]()
        self._jit_compile = jit_compile
        self.again, self._ran = Again(), dict[int, int]()
        self._loss_from_layers, self.every_gradient = loss_from_layers, False
        self._layers = keras_models.flat_layers(program.model)
        self._tell, self._many = tell, ManyTraces(tell)
        self._functions: dict[tuple[Hashable, Hashable], CallFunctions] = {}
        self._known: dict[Hashable, Known] = {}
        self._sorted: dict[Hashable, tuple[str, ...] | None] = {}
        self._studies: dict[Hashable, ModelStudy] = {}
        self._tables: dict[Hashable, CallTables] = {}
        self._alone, self._step = False, None
        self._begin: CodeType
        self.inside: dict[Any, Any] = {}
        anchor(backend.entries)

    @contextlib.contextmanager
    def over_mesh(self, begin: CodeType) -> Iterator[None]:
        """Meanwhile, calls of the model's layers run over the mesh.

        What the step draws without a seed comes from where they draw, one after the other.

        Args:
            begin: Code of the function that calls the step.
        """
        self._begin = begin
        self._ran.clear()
        self._step = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        taken_back = keras_remat.taken_back(self.program.model)
        drawing = keras_seeds.drawing_from(self.program.unseeded)
        with taken_back, drawing, keras_models.calls_kept(self._layers):
            for layer in self._layers:
                call = keras_models.call_of(layer)
                keras_models.give_call(layer, self._wrapped(layer, call))
            yield

    def trace_anew(self, reason: Retrace) -> None:
        """Forgets what was traced, to trace it again."""
        if reason.gather_first:
            self.backend.gather_first = True
            self._known.clear()
        self._functions.clear()

    def settle(self) -> None:
        """Looks at what calls were lowered to: which of their operations communicate.

        Raises:
            Retrace: Some run again that should not; traced once more, they are kept.
        """
        found = False
        for (key, *_), functions in self._functions.items():
            known = self._known.get(key, UNKNOWN).communicate
            if new := functions.repeated_communication() - known:
                self._known[key], found = Known(known | new), True
        if found:
            raise Retrace(gather_first=False)
        for note in self.backend.idle:
            self._tell(str(note))
        blocks = self.program.blocks
        made = [one for one in self._functions.values() if id(one) in self._ran]
        if blocks and blocks.layers and made and not any(one.repeats for one in made):
            self._tell(
                "recompute computes nothing again in this step: no layer is called over the mesh "
                "in a block that has something inside. Name larger blocks, or leave it out. "
                f"Received: {blocks.describe()}"
            )

    def set_apart(self, layer: keras.Layer, reason: str) -> None:
        """Has calls of a layer run on one device from now on."""
        self.apart.add(id(layer))
        self._tell_apart(layer, reason)

    def _tell_apart(self, layer: keras.Layer, reason: str, where: str = "one device") -> None:
        name, blocks = layer.path or layer.name, self.program.blocks
        kept = ", and recompute computes nothing in it again" if blocks and blocks.layers else ""
        plain = ", and jit_compile=True compiles nothing in it" if self._jit_compile else ""
        self._tell(f"{reason}: layer {name!r} computes on {where}, on whole weights{kept}{plain}")

    def _wrapped(self, layer: keras.Layer, call: Callable) -> Callable:
        def called(*args: Any, **kwargs: Any) -> Any:
            stateless = keras_trainer.is_stateless()
            if self._alone or stateless or any_symbolic((args, kwargs)):
                if stateless and not self._alone and self._in_step:  # the user's own scope
                    self._tell_apart(layer, _STATELESS)
                    return self._on_one_device(call, args, kwargs)
                return call(*args, **kwargs)
            if id(layer) in self.apart:
                return self._on_one_device(call, args, kwargs)
            if function_graphs.in_control_flow(self._step) or function_graphs.in_vectorized_loop():
                self.set_apart(layer, _IN_LOOPS)
                return self._on_one_device(call, args, kwargs)
            inside = keras_models.flat_layers(layer)
            given = self._by_rows(layer, call, CallArguments.of(args, kwargs, inside))
            # What returns other things than rows leaves it to the layers inside.
            if given is None:
                return call(*args, **kwargs)
            # By its name: layouts that are declared for the layer stand before its call by then.
            by_name = keras_autocast.autocast_as_now(
                lambda *a, **k: keras_models.call_of(layer)(*a, **k)
            )
            try:
                with keras_autocast.without_autocast():
                    return self._over_mesh(layer, by_name, given)
            except NoRowsError:
                self._sorted[self._kind(layer, given)] = None
                return call(*args, **kwargs)
            except NotByReplica as reason:
                self.set_apart(layer, str(reason))
                if id(layer) in self._ran.values():  # its calls are to agree on what they do
                    raise Retrace(gather_first=False) from None
                return self._on_one_device(call, args, kwargs)

        return called

    def _on_one_device(self, call: Callable, args: Any, kwargs: Any) -> Any:
        """Calls a layer, and those inside it, as Keras does."""
        self._alone = True
        try:
            return call(*args, **kwargs)
        finally:
            self._alone = False

    def _by_rows(
        self, layer: keras.Layer, call: Callable, given: CallArguments
    ) -> CallArguments | None:
        """Its arguments, sorted so that all that it returns has rows; None if there is no such way.

        Looked at once for arguments of a kind.
        """
        key = self._kind(layer, given)
        if key not in self._sorted:
            self._sorted[key] = self._found(layer, call, given)
        kinds = self._sorted[key]
        return None if kinds is None else given.sorted_by(kinds)

    def _found(
        self, layer: keras.Layer, call: Callable, given: CallArguments
    ) -> tuple[str, ...] | None:
        """The kinds of arguments with which all outputs have rows; tells if no call succeeds."""
        reasons: list[Exception | None] = []
        for one in given.ways():
            try:
                if not without_rows(one, call):
                    return one.kinds
                reasons.append(None)
            except Exception as reason:  # the user's code, for sizes that it may not be made for
                reasons.append(reason)
        if reasons and all(reasons):
            why = "fails on another number of rows than it is called with, which replicas have"
            if given.composite:
                why = "takes ragged or sparse tensors, and fails on the dense ones it is tried on"
            self._tell(
                f"Layer {layer.path or layer.name!r} {why}. What it computes itself runs on one "
                f"device, layers inside it over the mesh. Received: {reasons[0]}"
            )
        return None

    def _key(self, layer: keras.Layer, given: CallArguments, python: bool = True) -> Hashable:
        """What decides what a call computes, but for its tensors; see `CallArguments.key`."""
        trainable = tuple(one.trainable for one in keras_models.flat_layers(layer))
        masked = tuple(mask is not None for mask in given.masks)
        context = keras_trainer.call_context()
        return (id(layer), trainable, given.key(python), masked, context, sizes.active())

    def _kind(self, layer: keras.Layer, given: CallArguments) -> Hashable:
        return (self._key(layer, given), given.shapes())

    def _over_mesh(self, layer: keras.Layer, call: Callable, given: CallArguments) -> Any:
        refuse_within_xla(f"A call of layer {layer.path or layer.name!r}")
        batch = self._split(given)
        self._tell_thawed(layer)
        wanted = self._wanted(layer)
        parts = [
            CallInput(rows, given.shared, masks).differentiated(wanted)
            for (rows, masks), _, _ in batch.parts
        ]
        rows = self._tables_of(layer, call, given).fetch(parts)
        with rows.taken():
            functions = [
                self._functions_of(layer, call, given, one, functools.partial(rows.spec, r))
                for r, one in enumerate(parts)
            ]
        self._leave_held(layer, functions[0])
        site = call_site(self._begin)
        if why := self.again.reason(layer, site):
            study = self._study(self._key(layer, given), layer, call, given)
            refuse_others(functions[0], study, why)
            several = self.backend.topology.data_size > 1
            self._tell_apart(layer, why, "one device per replica" if several else "one device")
            return self._on_one_device(by_replica, (functions[0], call, given, batch), {})
        self._ran |= {id(one): id(layer) for one in functions}
        return OverMesh(self, layer, site, functions, parts, batch, rows, not self._in_step)()

    def _tell_thawed(self, layer: keras.Layer) -> None:
        """Says which weights train by now, and were frozen when the model's programs were made."""
        state = self.program.state
        frozen = {id(v) for v in (*state.frozen, *state.fixed)}
        if thawed := [v.path for v in layer.trainable_variables if id(v) in frozen]:
            self._tell(
                "Weights were frozen before this step, which made them trainable: they get no "
                "gradients. Set trainable=True before compile, and fit or the first call of the "
                "step; freeze within the step what is not to train in a part of it. "
                f"Received: {thawed[:3]}"
            )

    def _leave_held(self, layer: keras.Layer, functions: CallFunctions) -> None:
        """Leaves a call off the mesh that would keep gradients from tensors that a layer holds.

        Raises:
            NoRowsError: It reads some that a tape knows.
        """
        held = [t for t in functions.held if not self._in_step or is_recorded(t)]
        if held:
            self._tell(
                f"Layer {layer.path or layer.name!r} reads a tensor that the step computes, from "
                "an attribute or a closure. For its gradient, what the layer computes itself runs "
                "on one device, layers inside it over the mesh. Make it an argument of the call. "
                f"Received: tensors of shapes {[t.shape.as_list() for t in held[:3]]}"
            )
            raise NoRowsError

    def _tables_of(self, layer: keras.Layer, call: Callable, given: CallArguments) -> CallTables:
        """What fetches rows of tables for a call."""
        key = self._key(layer, given)
        if key not in self._tables:
            self._tables[key] = CallTables(self.program, layer, call, given)
        return self._tables[key]

    @property
    def _in_step(self) -> bool:
        """Whether what is traced is the step itself, and not a function that it calls."""
        return not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is self._step

    def _wanted(self, layer: keras.Layer) -> Callable[[Any], bool]:
        """Tells which tensors get a gradient: those that a tape of the step knows.

        All of them where that cannot be seen: without a tape, and in functions that the step calls.
        """
        if self.every_gradient:
            return lambda tensor: True
        used, _ = used_by(layer, self.program)
        trainable = self.program.state.trainable
        weights = [handle_of(trainable[i]) for i in used if i < len(trainable)]
        if self._in_step and any(map(is_recorded, weights)):
            return is_recorded
        return lambda tensor: True

    def _split(self, given: CallArguments) -> SplitBatch:
        """Cuts rows over the replicas.

        Raises:
            CannotExpand: Over inner axes, tensors are sparse or of unknown size.
        """
        if self.backend.exact:
            for leaf in (*given.rows, *given.shared):
                if not isinstance(leaf, tf.Tensor):
                    raise CannotExpand("sparse inputs", of_batch=True)
                if not leaf.shape.is_fully_defined() and sizes.active() is None:
                    raise CannotExpand(f"batches of unknown size, here {leaf.shape}", of_batch=True)
        replicas = self.backend.topology.data_size
        return split((given.rows, given.masks), None, None, replicas, static=True)

    def _functions_of(
        self,
        layer: keras.Layer,
        call: Callable,
        arguments: CallArguments,
        given: CallInput,
        spec: Callable[[keras.Variable], tf.TensorSpec],
    ) -> CallFunctions:
        """The functions of a call, for tensors of such shapes."""
        tensors = leaves([given.rows, given.shared])
        look = self._key(layer, arguments)
        # What a lowering has shown holds for the next trace, though attributes differ by then.
        lasting = (self._key(layer, arguments, False), signature(tensors), given.sources)
        key = (lasting, look)
        if key not in self._functions:
            self._many.see(keras_models.flat_layers(layer), lasting, arguments.python)
            study = self._study(look, layer, call, arguments)
            with knowing(study.constant_ids):
                known = self._known.get(lasting, UNKNOWN)
                self._functions[key] = CallFunctions(
                    self.program, self.backend, layer, call, arguments, given, spec, known
                )
                self._functions[key].row_adders = study.row_adders
        return self._functions[key]

    def _study(
        self, key: Hashable, layer: keras.Layer, call: Callable, arguments: CallArguments
    ) -> ModelStudy:
        """Where rows of the batch meet in a call, looked at once; warns of it."""
        if self.backend.topology.data_size == 1:
            return ModelStudy()
        if key not in self._studies:
            program = CalledProgram(self.program, call, arguments)
            training = bool(dict(keras_trainer.call_context()).get("training"))
            study = study_program(
                program, (arguments.rows, arguments.masks), training, self._loss_from_layers
            )
            self._studies[key] = study
            if study.row_adders:
                names = sorted({(one or layer).name for one in study.row_adders})
                self._tell(
                    "Layers give add_loss an entry for each row. In self.losses of a step of your "
                    "own that is their sum over the batch, which compute_loss adds: take no mean "
                    f"of it. Received: {names}"
                )
            if text := study.warning():
                self._tell(text)
        return self._studies[key]
