"""Per-layer declarations of layouts: `shard` stores them, `resolve_declaration` reads them.

Nothing is patched: a declaration is an attribute of the layer instance that Keras neither tracks
nor saves. It is for the model that is trained here, not part of the model's configuration.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kdist._compat import keras_models
from kdist.config.operands import ShardedOperator, name_of, operands, relaid
from kdist.config.settings import check_not_placed
from kdist.config.tables import split_by_hand
from kdist.sharding.dims import Dims, WeightFit, check_dims
from kdist.sharding.layout import WeightLayout, closest_names, match_pattern
from kdist.sharding.mesh import Topology
from kdist.sharding.strategy import Strategy, check_strategy, parse_strategy, split_operands

import keras
import tensorflow as tf

_ATTRIBUTE = "_kdist_shard"


@dataclass(frozen=True)
class ShardDeclaration:
    """What the user declared about one layer, before any mesh is known.

    Attributes:
        in_strategy: One strategy an operand, or None.
        out_strategy: One strategy an output, or None.
        weights: Weight name, path inside the layer, or regex, to strategy; or None.
    """

    in_strategy: tuple[Strategy, ...] | None = None
    out_strategy: tuple[Strategy, ...] | None = None
    weights: Mapping[str, Strategy] | None = None


@dataclass(frozen=True)
class ResolvedShard:
    """A declaration on one mesh.

    Attributes:
        inputs: Layout of each declared input, in the order of the call's tensors; empty where
            none is declared.
        outputs: Layout of each declared output, in order.
        weights: Path of a variable to its layout, for the declared ones.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    weights: dict[str, WeightLayout]


def shard(
    target: Any,
    in_strategy: Any = None,
    out_strategy: Any = None,
    weights: Mapping[str, Any] | None = None,
    manual_split: Sequence[int] | None = None,
    axis: str = "model",
    local_columns: bool = False,
) -> Any:
    """Declares how a layer, an operator or a tensor is cut over the mesh.

    A strategy has one entry a dim: all names (None, a mesh axis, or a tuple of axes, major first)
    or all cut counts (`1` is not cut), which stand for the axes of that size. Dim 0 of an input and
    an output is the batch, which the data axis already cuts. A declaration takes effect in
    `kdist.parallelize`; a second one on a layer replaces the first. Elsewhere what is declared
    computes the same, uncut. MindSpore's `Primitive.shard` is the same idea.

    Args:
        target: A `keras.layers.Layer`; an operator: any callable on tensors, `keras.ops.matmul`;
            a `keras.KerasTensor` of a functional model; or a tensor inside a layer's `call`.
        in_strategy: One tuple an operand, `((4, 1), (1, 1))`, or one flat tuple for the first
            operand. In a layer with a kernel the second operand is its kernel (and the bias
            follows a cut of the kernel's last dim); else operands are the tensors among the
            arguments, as they are written in the call, those in lists included.
        out_strategy: One tuple an output, or one flat tuple for the first output; of a tensor
            target, the layout that it gets.
        weights: Weight name (`"kernel"`), path inside the layer, or regex, to strategy.
        manual_split: Of a `keras.layers.Embedding`, alone: the rows of its table that each device
            of `axis` holds, unequal and without padding: `(10, 20, 30, 4)`. MindSpore's name.
        axis: The axis of `manual_split`, any but `pipe`.
        local_columns: With `manual_split`, that column j of all ids, along their last dim, has ids
            of part j alone; see `kdist.layers.SplitEmbedding`.

    Returns:
        The layer itself; for an operator, a callable with its arguments and results, for tensors
        of a functional model or inside a layer's `call`; for a tensor, its values in the layout.

    Raises:
        ValueError: If nothing is declared; a strategy or the target is of another form; an operator
            gets `weights`, a tensor anything but `out_strategy`; the layer's model is parallel.

    Example:
    ```python
    up = kdist.shard(keras.layers.Dense(64), weights={"kernel": (None, "model")})
    down = kdist.shard(keras.layers.Dense(16), in_strategy=((2, 4), (4, 1)))  # data=2, model=4
    x = keras.Input((32,))
    y = kdist.shard(down(up(x)), out_strategy=("data", None))
    product = kdist.shard(keras.ops.matmul, in_strategy=((2, 1, 4), (2, 4, 1)))
    z = product(keras.Input((8, 4)), keras.Input((4, 6)))  # (batch, n, k) and (batch, k, m)
    ```
    """
    if isinstance(target, keras.layers.Layer):
        check_not_placed(target, "kdist.shard")
    strategies = (in_strategy, out_strategy, weights)
    _check_split(manual_split, strategies, axis, local_columns)
    if manual_split is not None:
        return split_by_hand(target, manual_split, axis, local_columns)
    return _declared(target, *strategies)


def _check_split(
    manual_split: Sequence[int] | None, strategies: Sequence[Any], axis: str, local_columns: bool
) -> None:
    """Refuses `manual_split` beside strategies, and its settings without it."""
    if manual_split is not None:
        if any(one is not None for one in strategies):
            raise ValueError(
                "manual_split says how a table is cut, and stands alone. "
                f"Received: manual_split={manual_split!r} with other strategies"
            )
        return
    if axis != "model":
        raise ValueError(f"axis is of manual_split. Received: axis={axis!r} without it")
    if local_columns:
        raise ValueError("local_columns is of manual_split. Received: local_columns without it")


def _declared(target: Any, in_strategy: Any, out_strategy: Any, weights: Any) -> Any:
    """What `shard` returns for strategies, by the kind of its target."""
    if in_strategy is None and out_strategy is None and weights is None:
        raise ValueError(
            "Declare at least one of in_strategy, out_strategy and weights. "
            f"Received: shard({target!r})"
        )
    ins = None if in_strategy is None else split_operands(in_strategy, "in_strategy")
    outs = None if out_strategy is None else split_operands(out_strategy, "out_strategy")
    if isinstance(target, keras.layers.Layer):
        return declare(target, ShardDeclaration(ins, outs, _check_weights(weights)))
    if isinstance(target, keras.KerasTensor | tf.Tensor):
        if ins is not None or weights is not None or outs is None or len(outs) != 1:
            raise ValueError(
                "A tensor has one layout: give out_strategy alone, such as ('data', 'model'). "
                f"Received: in_strategy={in_strategy!r}, out_strategy={out_strategy!r}, "
                f"weights={weights!r}"
            )
        return relaid(target, outs[0])
    _check_operator(target, weights)
    return ShardedOperator(target, ins or (), outs or ())


def _check_operator(target: Any, weights: Any) -> None:
    """Refuses what is no operator, and weights of one."""
    if not callable(target) or isinstance(target, type):
        raise ValueError(
            "shard takes a keras layer, an operator such as keras.ops.matmul, a KerasTensor, or a "
            "tensor inside a layer's call; of a class, an instance. For a variable, declare "
            "weights={name: strategy} on its layer, or use a layout map. "
            f"Received: target={target!r} of type {type(target).__name__}"
        )
    if weights is not None:
        raise ValueError(
            "An operator has no weights of its own: give the strategies of its operands with "
            f"in_strategy. Received: weights={weights!r} for {target!r}"
        )


def declare(layer: keras.layers.Layer, declaration: ShardDeclaration) -> keras.layers.Layer:
    """Stores a declaration on a layer, in place of an earlier one; returns the layer."""
    # Past the layer's own __setattr__ and Keras's tracker: a declaration is no state of it.
    object.__setattr__(layer, _ATTRIBUTE, declaration)
    return layer


def declaration_of(layer: keras.layers.Layer) -> ShardDeclaration | None:
    """The declaration that `shard` stored on a layer, or None."""
    return getattr(layer, _ATTRIBUTE, None)


def declarations(model: keras.layers.Layer) -> list[tuple[keras.layers.Layer, ShardDeclaration]]:
    """Every declared layer of a model, itself included, with its declaration."""
    found = [(layer, declaration_of(layer)) for layer in keras_models.flat_layers(model)]
    return [(layer, declared) for layer, declared in found if declared is not None]


def resolve_declaration(
    layer: keras.layers.Layer,
    declaration: ShardDeclaration,
    topology: Topology,
    fit: WeightFit | None = None,
) -> ResolvedShard:
    """Reads a declaration on a mesh and checks it against what is known of the layer.

    The variables' shapes are known once the layer is built; the inputs' and the output's where the
    layer is part of a functional model.

    Args:
        layer: The layer.
        declaration: What `shard` stored.
        topology: The mesh.
        fit: What becomes of a weight's dim that does not divide; an error by default.

    Returns:
        The layouts of inputs, output and weights. Inputs and output keep the data axis on dim 0
        where it is named; `kdist.sharding.dims.inner_dims` removes it.

    Raises:
        ValueError: As `parse_strategy`; if a layout does not fit a shape, the layer takes fewer
            operands or has several outputs, weights are declared on a layer that is not built, a
            name in `weights` matches no weight or a weight several names, or the kernel is
            declared twice, differently.
    """
    takes = declaration.in_strategy or ()
    if not layer.built and (len(takes) > 1 or declaration.weights):
        raise ValueError(
            f"The weights of layer {layer.name!r} are not built, so their layouts cannot be "
            f"checked: build the model, or call it once, first. Received: {declaration}"
        )
    kernel, kernel_strategy = _kernel(layer), None
    if kernel is not None and len(takes) > 1:
        takes, kernel_strategy = _two_operands(layer, takes)
    inputs = tuple(
        parse_strategy(s, topology, operand=f"input {i} of layer {layer.name!r}", batch_dim=True)
        for i, s in enumerate(takes)
    )
    results = declaration.out_strategy or ()
    outputs = tuple(
        parse_strategy(
            s,
            topology,
            operand=name_of(i, len(results), "output", f"layer {layer.name!r}"),
            batch_dim=True,
        )
        for i, s in enumerate(results)
    )
    for node in keras_models.calls_of(layer):
        _check_call(layer, node, inputs, outputs, topology)
    fit = fit or WeightFit(topology)
    weights = _weight_layouts(layer, declaration.weights or {}, fit)
    if kernel is not None and kernel_strategy is not None:
        _add_kernel(layer, kernel, kernel_strategy, weights, fit)
    return ResolvedShard(inputs, outputs, weights)


def _two_operands(
    layer: keras.layers.Layer, takes: tuple[Strategy, ...]
) -> tuple[tuple[Strategy, ...], Strategy]:
    """The strategies of a layer's input, and of its kernel."""
    if len(takes) > 2:
        raise ValueError(
            f"Layer {layer.name!r} has a kernel, so it has two operands, the input and the "
            "kernel: declare other weights with weights={name: strategy}. "
            f"Received: in_strategy={takes}"
        )
    return takes[:1], takes[1]


def _check_weights(weights: Any) -> dict[str, Strategy] | None:
    """Checks the form of the argument `weights`."""
    if weights is None:
        return None
    named = isinstance(weights, Mapping) and all(isinstance(key, str) for key in weights)
    if not named or not weights:
        raise ValueError(
            "weights is a dict from weight name (or regex) to strategy, such as "
            f"{{'kernel': (None, 'model')}}. Received: weights={weights!r}"
        )
    return {key: check_strategy(value, f"weights[{key!r}]") for key, value in weights.items()}


def _check_call(
    layer: keras.layers.Layer,
    node: Any,
    inputs: tuple[Dims, ...],
    outputs: tuple[Dims, ...],
    topology: Topology,
) -> None:
    """Checks layouts against one call of the layer in a functional model."""
    given = node.arguments
    shapes = [x.shape for x in operands([given.args, list(given.kwargs.values())])]
    if len(inputs) > len(shapes):
        names = [variable.name for variable in layer.weights]
        raise ValueError(
            f"Layer {layer.name!r} takes {len(shapes)} tensors and in_strategy has "
            f"{len(inputs)} operands; declare its weights {names} with weights={{name: strategy}}. "
            f"Received: in_strategy={inputs}"
        )
    for index, (dims, shape) in enumerate(zip(inputs, shapes, strict=False)):
        what = f"input {index} of layer {layer.name!r}"
        check_dims(dims, shape, topology, what, skip_dim_0=True)
    if len(outputs) > len(node.output_tensors):
        raise ValueError(
            f"Layer {layer.name!r} gives {len(node.output_tensors)} tensors and out_strategy has "
            f"{len(outputs)} entries: give at most one for each. Received: out_strategy={outputs}"
        )
    for i, (dims, tensor) in enumerate(zip(outputs, node.output_tensors, strict=False)):
        what = name_of(i, len(outputs), "output", f"layer {layer.name!r}")
        check_dims(dims, tensor.shape, topology, what, skip_dim_0=True)


def _kernel(layer: keras.layers.Layer) -> keras.Variable | None:
    """The layer's kernel, None if it has none or several."""
    found = [variable for variable in layer.weights if variable.name == "kernel"]
    if len(found) > 1:
        found = [variable for variable in found if _inside(layer, variable) == "kernel"]
    return found[0] if len(found) == 1 else None


def _inside(layer: keras.layers.Layer, variable: keras.Variable) -> str:
    """A variable's path inside a layer, such as `kernel` or `query/kernel`."""
    return variable.path.removeprefix(f"{layer.path}/")


def _weight_layouts(
    layer: keras.layers.Layer, weights: Mapping[str, Strategy], fit: WeightFit
) -> dict[str, WeightLayout]:
    """Resolves `weights`: a path inside the layer wins over a name, and a name over a regex."""
    layouts, used = {}, set()
    for variable in layer.weights:
        inside = _inside(layer, variable)
        spellings = [inside, variable.name, variable.path]
        key = next((spelling for spelling in spellings if spelling in weights), None)
        if key is None:
            keys = {match_pattern(weights, spelling) for spelling in spellings} - {None}
            if len(keys) > 1:
                raise ValueError(
                    f"Several entries of weights match {variable.path!r}: {sorted(map(str, keys))}."
                    " Make each weight match one, or add its path inside the layer as a key, which "
                    f"wins. Received: weights={dict(weights)}"
                )
            key = keys.pop() if keys else None
        if key is None:
            continue
        used.add(key)
        layouts[variable.path] = _weight_layout(variable, weights[key], fit)
    unused = [key for key in weights if key not in used]
    if unused:
        names = [_inside(layer, variable) for variable in layer.weights]
        raise ValueError(
            f"{unused[0]!r} applies to no weight of layer {layer.name!r}; the closest are "
            f"{closest_names(unused[0], names)}. Correct or remove it. "
            f"Received: weights={dict(weights)}"
        )
    return layouts


def _weight_layout(variable: keras.Variable, strategy: Any, fit: WeightFit) -> WeightLayout:
    shape = tuple(variable.shape)
    what = repr(variable.path)
    dims = parse_strategy(strategy, fit.topology, len(shape), operand=what, batch_dim=False)
    return WeightLayout(fit(dims, shape, what))


def _add_kernel(
    layer: keras.layers.Layer,
    kernel: keras.Variable,
    strategy: Strategy,
    weights: dict[str, WeightLayout],
    fit: WeightFit,
) -> None:
    """Adds the kernel's layout from in_strategy to `weights`, and the bias that follows it."""
    layout = _weight_layout(kernel, strategy, fit)
    declared = weights.setdefault(kernel.path, layout)
    if declared != layout:
        raise ValueError(
            f"The kernel {kernel.path!r} has two layouts: the second operand of in_strategy says "
            f"{layout.dims} and weights says {declared.dims}. Give one of them. "
            f"Received: in_strategy kernel={strategy}, weights={declared.dims}"
        )
    if layout.dims[-1] is None:
        return
    beside = kernel.path.removesuffix("kernel") + "bias"
    for variable in layer.weights:
        follows = variable.path == beside and tuple(variable.shape) == (kernel.shape[-1],)
        if follows and variable.path not in weights:
            weights[variable.path] = WeightLayout(layout.dims[-1:])
