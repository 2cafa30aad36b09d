"""A pure function and its vector-Jacobian product, traced together and cut into two functions.

TensorFlow's tape keeps everything that a backward pass looks at, parameters included. Here forward
and backward are traced into one graph, which is then cut at the forward tensors that the backward
part needs. Of these only the ones that depend on *inputs* are kept from forward to backward; what
follows from parameters alone (casts, reshapes) is computed again, from parameters given again. So
gathered parameters can be freed in between. The idea of cutting a joint graph is that of PyTorch's
AOTAutograd partitioner.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from kdist._compat import function_graphs, keras_trainer
from kdist.program.pruning import effects_in, pruned
from kdist.program.python_tapes import refuse_python_tapes
from kdist.storage import sparse

import tensorflow as tf

PureFunction = Callable[[list[Any], list[Any]], list[Any]]
"""(parameters, inputs) -> outputs, all flat lists of tensors."""


class CapturesVariables(Exception):
    """The function reads variables that are not among its arguments."""


class Vjp:
    """The two halves of a function, once it is cut.

    Args:
        function: What to differentiate; pure.
        params: Specs of the parameters.
        inputs: Specs of the inputs.
        wrap: Makes a callable of a concrete function (how it is compiled) and, if that is of the
            backward pass, of the numbers of its inputs that come with the gradient.

    Attributes:
        saved: Specs of what is kept from the forward to the backward half.
        output_dtypes: Dtypes of the outputs.
        rows: Parameters whose gradient is rows, with (inputs that the indices depend on, merged,
            how many rows at the end do not depend on the batch).

    Raises:
        CapturesVariables: See there.
    """

    def __init__(
        self,
        function: PureFunction,
        params: Sequence[tf.TensorSpec],
        inputs: Sequence[tf.TensorSpec],
        wrap: Callable[..., Callable],
    ) -> None:
        self._function = function
        self._sizes = len(params), len(inputs)
        self._forward_ops: set[str] = set()
        self._outputs: list[Any] = []
        self._cotangents: list[int] = []
        joint = tf.compat.v1.wrap_function(self._joint, [*params, *inputs])
        self._refuse_variables(joint.graph)
        self._joint_trace, self._wrap = joint, wrap
        self._find_fetches()

    def forward(
        self, params: Sequence[Any], inputs: Sequence[Any], *where: Any
    ) -> tuple[list[Any], list[Any]]:
        """Outputs, and what the backward half needs.

        Args:
            params: The parameters.
            inputs: The inputs.
            *where: What `wrap`'s callables take before tensors.
        """
        flat = list(self._call_forward(*where, *params, *inputs))
        split = len(self.output_dtypes)
        return flat[:split], flat[split:]

    def backward(
        self, params: Sequence[Any], saved: Sequence[Any], cotangents: Sequence[Any], *where: Any
    ) -> tuple[list[Any], list[Any]]:
        """Gradients of the parameters and of the inputs; None where there is none.

        Args:
            params: The parameters, again.
            saved: From `forward`.
            cotangents: Gradient of each output; those of outputs that take none are not looked at.
            *where: See `forward`.
        """
        given = [cotangents[i] for i in self._cotangents]
        found = unflatten(self._kinds, self._call_backward(*where, *params, *saved, *given))
        return found[: self._sizes[0]], found[self._sizes[0] :]

    def from_outside(self) -> list[Any]:
        """Tensors that it reads from the graph around it, before it is cut."""
        return [t for t, _ in self._joint_trace.graph.captures if tf.is_symbolic_tensor(t)]

    def takes_cotangent(self, output: int) -> bool:
        """Whether the gradient of an output has any effect."""
        return output in self._cotangents

    def _joint(self, *flat: Any) -> list[Any]:
        count, _ = self._sizes
        params, inputs = list(flat[:count]), list(flat[count:])
        watched = self._sources(params, inputs)
        graph = tf.compat.v1.get_default_graph()
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(watched)
            outputs = [tf.identity(t) for t in self._function(params, inputs)]
        self._outputs = outputs
        self._forward_ops = {op.name for op in graph.get_operations()}
        self._cotangents = self._targets(outputs)
        self._given = [
            tf.compat.v1.placeholder(outputs[i].dtype, outputs[i].shape) for i in self._cotangents
        ]
        targets = [outputs[i] for i in self._cotangents]
        found = tape.gradient(targets, watched, output_gradients=self._given)
        refuse_python_tapes()
        rows_allowed = {id(t) for t in params}
        given, self._alike = self._of_batch(inputs), {}
        self._found = [
            tf.convert_to_tensor(g) if sparse.is_sparse(g) and id(t) not in rows_allowed else g
            for t, g in zip(watched, found)
        ]
        for i, g in enumerate(self._found):
            if sparse.is_sparse(g):
                self._found[i], how = sparse.arranged(g, given)
                # Where all are alike, all of them are at the end.
                size = sum(n for _, n in how.same) if how.by_batch else g.indices.shape[0] or 0
                self._alike[id(watched[i])] = size
        self._arguments, self._watched = (params, inputs), watched
        self._laid = [
            None if g is None else self._laid_out(t, g) for t, g in zip(watched, self._found)
        ]
        return outputs

    def _laid_out(self, source: Any, gradient: Any) -> Any:
        """A gradient as it is returned."""
        return gradient

    def _of_batch(self, inputs: list[Any]) -> list[Any]:
        """Inputs that come with the batch."""
        return inputs

    def _sources(self, params: list[Any], inputs: list[Any]) -> list[Any]:
        """What may get a gradient."""
        return [t for t in (*params, *inputs) if differentiable(t)]

    def _targets(self, outputs: list[Any]) -> list[int]:
        """Positions of the outputs that take a cotangent."""
        return [i for i, t in enumerate(outputs) if differentiable(t)]

    @staticmethod
    def _refuse_variables(graph: Any) -> None:
        if any(function_graphs.is_variable(t) for t, _ in graph.captures):
            raise CapturesVariables

    def _find_fetches(self) -> None:
        """Finds which tensors of the trace the gradients are, and what depends on inputs."""
        params, inputs = self._arguments
        self._depends = dependencies(self._joint_trace.graph, params, inputs)
        gradient = {id(t): g for t, g in zip(self._watched, self._found)}
        laid: dict[int, Any] = {id(t): g for t, g in zip(self._watched, self._laid)}
        found = [gradient.get(id(t)) for t in (*params, *inputs)]
        returned: list[Any] = [laid.get(id(t)) for t in (*params, *inputs)]
        self._kinds: list[Any] = []
        self._fetches: list[Any] = []
        self.rows: dict[int, tuple[list[int], bool, int]] = {}
        for i, (g, given) in enumerate(zip(found, returned)):
            if g is None:
                self._kinds.append(None)
            elif sparse.is_sparse(g):
                self._kinds.append(params[i].shape.as_list())
                self._fetches += [given.values, given.indices]
                reached = [j for j, x in enumerate(inputs) if sparse.depends_on(g.indices, [x])]
                alike = self._alike[id(params[i])]
                self.rows[i] = (reached, sparse.look_up(g.indices, inputs).merged, alike)
            else:
                self._kinds.append("dense")
                self._fetches.append(given)
        del self._found, self._alike, self._laid, self._watched

    def cut(self, again: Collection[str] = ()) -> None:
        """Cuts the trace into the two halves, which may be called from then on.

        Args:
            again: Names of the forward operations that the backward half runs again, if it needs
                them.
        """
        params, inputs = self._arguments
        joint, wrap = self._joint_trace, self._wrap
        saved = self._frontier(again)
        self.saved = [tf.TensorSpec(t.shape, t.dtype) for t in saved]
        self.output_dtypes = [t.dtype for t in self._outputs]
        effects = self._effects_in(forward=True)
        forward = pruned(joint, [*params, *inputs], [*self._outputs, *saved], effects)
        self._call_forward = wrap(forward)
        self._kept_feeds = len(params) + len(saved)
        self._cut_backward([*params, *saved, *self._given])
        self._outputs, self._fetches = [], []
        del self._given, self._arguments, self._joint_trace, self._wrap, self._depends

    def _cut_backward(self, feeds: Sequence[Any]) -> None:
        joint, effects = self._joint_trace, self._effects_in(forward=False)
        self._call_backward = InnerFunction(
            joint, feeds, self._fetches, self._wrap, self._kept_feeds, effects
        )

    def _effects_in(self, *, forward: bool) -> list[tf.Operation]:
        """What prints, asserts or writes, in the forward or in the backward part of the trace."""
        found = effects_in(self._joint_trace.graph)
        return [op for op in found if (op.name in self._forward_ops) == forward]

    def _frontier(self, repeated: Collection[str]) -> list[Any]:
        """Forward tensors that the backward part needs and that depend on inputs."""
        saved: dict[Any, Any] = {}
        seen: set[Any] = set()
        waiting = list(self._fetches)
        waiting += [t for op in self._effects_in(forward=False) for t in op.inputs]
        given = {t.op.name for t in self._given}
        while waiting:
            tensor = waiting.pop()
            if tensor.ref() in seen or tensor.op.name in given:
                continue
            seen.add(tensor.ref())
            again = tensor.op.name in repeated or not self._passes(tensor)
            if tensor.op.name not in self._forward_ops or again:
                waiting.extend(tensor.op.inputs)
            elif self._depends[tensor.op.name]:
                saved[tensor.ref()] = tensor
        return list(saved.values())

    def _passes(self, tensor: Any) -> bool:
        """Whether the forward half may hand a tensor on; else what made it is computed again."""
        return True


def differentiable(tensor: Any) -> bool:
    """Whether a tensor, or a spec, can have a gradient."""
    dtype = tf.as_dtype(tensor.dtype)
    return bool(dtype.is_floating or dtype.is_complex)


class InnerFunction:
    """The part of a wrapped function between tensors of its graph, as a function of all of them.

    Args:
        joint: The wrapped function.
        feeds: What it may be given.
        fetches: What it returns.
        wrap: See `Vjp`.
        late: Number of the first feed that comes with the gradient.
        effects: See `pruned`.

    Attributes:
        needs: Positions of the feeds whose values it depends on; of others a layout may be asked.
    """

    def __init__(
        self,
        joint: Any,
        feeds: Sequence[Any],
        fetches: Sequence[Any],
        wrap: Callable,
        late: int,
        effects: Sequence[tf.Operation] = (),
    ) -> None:
        wanted = [*fetches, *(t for op in effects for t in op.inputs)]
        needed, values = reached(feeds, wanted), reached(feeds, wanted, values=True)
        self.needs = [i for i, t in enumerate(feeds) if t.ref() in values]
        self._taken = [i for i, t in enumerate(feeds) if t.ref() in needed]
        self._count = len(feeds)
        seeds = [n for n, i in enumerate(self._taken) if i >= late]
        part = pruned(joint, [feeds[i] for i in self._taken], fetches, effects)
        self._call = wrap(part, seeds)

    def __call__(self, *arguments: Any) -> Any:
        """Calls it with what `wrap`'s callable takes first, and then all feeds."""
        first = len(arguments) - self._count
        return self._call(*arguments[:first], *(arguments[first + i] for i in self._taken))


def reached(feeds: Sequence[Any], fetches: Sequence[Any], values: bool = False) -> set[Any]:
    """References of the feeds that fetches depend on; with `values`, on more than their layout."""
    fed, fed_ops = {t.ref() for t in feeds}, {t.op for t in feeds}
    found = {t.ref() for t in fetches} & fed
    waiting = [t.op for t in fetches if t.ref() not in fed]
    seen: set[Any] = set()
    while waiting:
        operation = waiting.pop()
        if operation in seen:
            continue
        seen.add(operation)
        inputs = list(operation.inputs)
        if values and operation.type == "RelayoutLike":
            inputs = inputs[:1]
        found |= {t.ref() for t in inputs} & fed
        waiting.extend(t.op for t in inputs if t.ref() not in fed)
        waiting.extend(op for op in operation.control_inputs if op not in fed_ops)
    return found


def unflatten(kinds: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """Gradients from the flat tensors of a backward function.

    Args:
        kinds: Per gradient: None (there is none), "dense", or the shape of the table of one that is
            rows, whose values and indices are two tensors.
        tensors: The tensors.
    """
    flat = iter(tensors)
    found: list[Any] = []
    for kind in kinds:
        if kind is None:
            found.append(None)
        elif kind == "dense":
            found.append(next(flat))
        else:
            values, indices = next(flat), next(flat)
            found.append(tf.IndexedSlices(values, indices, tf.constant(kind, indices.dtype)))
    return found


def dependencies(graph: Any, params: Sequence[Any], inputs: Sequence[Any]) -> dict[str, bool]:
    """Per operation of a graph, whether it depends on an input, rather than on parameters alone.

    What waits for something (an assertion about a batch of unknown size) depends on it. What may be
    another value next time counts as such: random numbers, and what Python makes.
    """
    sources = {t.op.name for t in inputs}
    found: dict[str, bool] = {}
    for op in graph.get_operations():
        used = [*(t.op for t in op.inputs), *op.control_inputs]
        changes = op.name in sources or op.op_def.is_stateful
        found[op.name] = changes or any(found.get(one.name, True) for one in used)
    return found


def as_node(concrete: Any, *, jit_compile: bool = False) -> Callable:
    """A concrete function as one node of whatever graph calls it, on every device that does.

    Raises:
        ValueError: XLA is asked for, and the function takes or returns what XLA keeps inside.
    """
    lists = [t.name for t in (*concrete.inputs, *concrete.outputs) if t.dtype == tf.variant]
    if jit_compile and lists:
        raise ValueError(
            "XLA cannot hand what a loop keeps (a list of tensors) from a forward to a backward "
            "function, as stages and chunks do, and a loss over the whole batch between them. "
            "Compile with jit_compile='auto' or False, or unroll the loop "
            f"(keras.layers.LSTM(unroll=True)). Received: jit_compile=True, {lists}"
        )

    shared = function_graphs.of_one_device_too(concrete)

    def call(*arguments: Any) -> list[Any]:
        check_dtypes(concrete, arguments)
        return keras_trainer.call_flat(shared, list(arguments), concrete.captured_inputs)

    if jit_compile:
        return tf.function(call, autograph=False, jit_compile=True)
    return function_graphs.one_device_function(call)


def check_dtypes(concrete: Any, arguments: Sequence[Any]) -> None:
    """Refuses arguments that a concrete function was not traced for.

    TensorFlow would find out when it runs, and often report no more than that the other devices'
    receives were cancelled.

    Raises:
        TypeError: Naming the first one.
    """
    for i, (given, wanted) in enumerate(zip(arguments, concrete.inputs)):
        if given.dtype != wanted.dtype:
            raise TypeError(
                "A function takes the dtypes that it was traced for, here "
                f"{wanted.dtype.name} as argument {i} of {concrete.name}. Received: {given!r}"
            )
