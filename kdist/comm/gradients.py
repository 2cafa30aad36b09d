"""Gradients of collectives: the transposed collective, by the same algorithm.

| forward | backward |
| --- | --- |
| broadcast | reduce by sum |
| reduce, all_reduce by sum or mean | broadcast, all_reduce (divided by p for a mean) |
| gather, all_gather | scatter, reduce_scatter by sum |
| scatter, reduce_scatter by sum or mean | gather, all_gather |
| all_to_all | all_to_all with cut and join exchanged |
| scan by sum | scan from the other end |
| send_recv | send_recv the other way |
| send, recv | recv, send |
| max, min, product | every device gathers all values and differentiates its own |

The gradient with respect to a device's value is the sum over all results that it went into, as if
one program had computed everything. In an SPMD loss that every device computes alike, divide it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kdist.comm.call import FLOATS, Call
from kdist.comm.execute import FOLDS, shape_of

import tensorflow as tf

Values = list[Any]
Collective = Callable[[Call, Values], Values]
Transpose = Callable[[Call, Values, Values, Collective], Values]
# With a plain tape, a backward pass runs where the forward had a result, so all must have one.
EVERYWHERE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "scan")


def is_differentiable(values: Sequence[Any]) -> bool:
    """Whether values have a dtype with gradients."""
    given = next(value for value in values if value is not None)
    return given.dtype.name in FLOATS


def backward(
    call: Call, inputs: Values, upstream: Values, collective: Collective, *, tied: bool = True
) -> Values:
    """Gradients with respect to the inputs of a call.

    Args:
        call: The forward call.
        inputs: Its values, one per device of this process.
        upstream: Gradient of each result, None where there was none.
        collective: Runs a call, differentiably.
        tied: Across processes, whether all of them run this backward pass, as they do with a
            `kdist.comm.GradientTape`.

    Returns:
        One gradient per device; None where there is no input.

    Raises:
        ValueError: For an operation whose results, or inputs, are not in every process, with a
            plain tape.
    """
    if call.group.crosses_processes and call.operation not in EVERYWHERE and not tied:
        raise ValueError(
            f"The gradient of {call.operation} across processes needs a backward pass in processes "
            "that have no result, or no input, of it. In every process, make a "
            "kdist.comm.GradientTape around the call, in the same tf.function as it, and ask it "
            "for a gradient. "
            f"Received: operation={call.operation!r} over {call.group}, with another tape"
        )
    reduces = call.operation in ("reduce", "all_reduce", "reduce_scatter", "scan")
    if reduces and call.reduction not in ("sum", "mean"):
        return _of_any_reduction(call, inputs, upstream, collective)
    transpose = _TRANSPOSES[call.operation]
    if call.operation in _BY_GROUP:
        transpose = _group_by_group(transpose)
    found = transpose(call, inputs, upstream, collective)
    if reduces and call.reduction == "mean":
        return _each(call, found, lambda grad: grad / tf.cast(call.group.size, grad.dtype))
    return found


def _each(call: Call, values: Values, change: Callable[[Any], Any]) -> Values:
    """Applies a function on each value's device."""
    results = []
    for value, device in zip(values, call.group.local_devices):
        with tf.device(device):
            results.append(None if value is None else change(value))
    return results


def _awaited(call: Call, upstream: Values, inputs: Values, length: Any = None) -> Values:
    """Gradients, and what is known of those that come from another process.

    Args:
        call: The forward call.
        upstream: Gradients of results, None where there was none.
        inputs: Of the forward call.
        length: Along its dim, of a result; None: as of an input.
    """
    if not call.group.crosses_processes:
        return upstream
    return [
        grad if grad is not None or x is None else tf.TensorSpec(_resized(call, x, length), x.dtype)
        for grad, x in zip(upstream, inputs)
    ]


def _resized(call: Call, value: Any, length: Any) -> list[int]:
    shape = value.shape.as_list()
    if length is not None:
        shape[call.dim] = length
    return shape


def _broadcast(call: Call, inputs: Values, upstream: Values, collective: Collective) -> Values:
    return collective(call.changed(operation="reduce", reduction="sum"), upstream)


def _reduce(call: Call, inputs: Values, upstream: Values, collective: Collective) -> Values:
    given = _awaited(call, upstream, inputs)
    return collective(call.changed(operation="broadcast", reduction="sum"), given)


def _all_reduce(call: Call, inputs: Values, upstream: Values, collective: Collective) -> Values:
    return collective(call.changed(reduction="sum"), upstream)


def _group_by_group(transpose: Transpose) -> Transpose:
    """The same in one call, with the lengths of each group."""

    def of_all(call: Call, inputs: Values, upstream: Values, collective: Collective) -> Values:
        place = {position: k for k, position in enumerate(call.group.local)}
        asked: list[Call] = []
        given: Values = [None] * len(inputs)

        def ask(back: Call, values: Values) -> Values:
            asked.append(back)
            return values

        for number, row in enumerate(call.group.local_rows):
            own = [place[position] for position in row if position in place]
            mine, grads = ([values[k] for k in own] for values in (inputs, upstream))
            one = call.in_group(number).changed(group=call.group.only(row))
            for k, value in zip(own, transpose(one, mine, grads, ask)):
                given[k] = value
        back = asked[0].changed(group=call.group, sizes=None, join_sizes=None)
        return collective(back.changed(by_group=tuple(asked)), given)

    return of_all


def _lengths(call: Call, values: Values) -> tuple[Any, ...]:
    """Length along the dim of each rank's value, of the one group that a call is over."""
    if call.sizes is not None:
        return call.sizes
    place = {position: k for k, position in enumerate(call.group.local)}
    row = call.group.local_rows[0]
    if call.group.crosses_processes:
        # Without sizes, the forward pass took all for equal.
        return (int(values[0].shape[call.dim]),) * len(row)
    return tuple(shape_of(values[place[position]])[call.dim] for position in row)


def _gather(call: Call, inputs: Values, upstream: Values, collective: Collective) -> Values:
    other = {"gather": "scatter", "all_gather": "reduce_scatter"}[call.operation]
    sizes = _lengths(call, inputs)
    back = call.changed(operation=other, reduction="sum", sizes=sizes)
    if call.operation == "gather" and call.group.crosses_processes:
        upstream = _awaited(call, upstream, inputs, sum(sizes))
    return collective(back, upstream)


def _scatter(call: Call, inputs: Values, upstream: Values, collective: Collective) -> Values:
    other = {"scatter": "gather", "reduce_scatter": "all_gather"}[call.operation]
    sizes = call.sizes
    if sizes is None and call.group.crosses_processes:
        from kdist.comm.operations import balanced

        known = next(x for x in inputs if x is not None)
        sizes = tuple(balanced(int(known.shape[call.dim]), call.group.size))
    return collective(call.changed(operation=other, reduction="sum", sizes=sizes), upstream)


def _all_to_all(call: Call, inputs: Values, upstream: Values, collective: Collective) -> Values:
    from kdist.comm.operations import balanced

    # What rank d got from rank s goes back: lengths along the joined dim.
    p, place = call.group.size, {position: k for k, position in enumerate(call.group.local)}
    row = call.group.local_rows[0]
    cuts = None
    if call.dim != call.join_dim:
        if call.group.crosses_processes:
            lengths = list(call.join_sizes or [int(inputs[0].shape[call.join_dim])] * p)
            # All ranks cut alike, or their parts did not join. What rank d got is as long as that.
            cuts = tuple((call.sizes or [balanced(int(inputs[0].shape[call.dim]), p)])[0])
        else:
            lengths = [shape_of(inputs[place[position]])[call.join_dim] for position in row]
        sizes = (tuple(lengths),) * p
    elif call.sizes is not None:
        sizes = tuple(tuple(call.sizes[s][d] for s in range(p)) for d in range(p))
    elif call.group.crosses_processes:
        one = balanced(int(inputs[0].shape[call.dim]), p)
        sizes = tuple((one[d],) * p for d in range(p))
    else:
        table = [balanced(shape_of(inputs[place[q]])[call.dim], p) for q in row]
        sizes = tuple(tuple(table[s][d] for s in range(p)) for d in range(p))
    back = call.changed(dim=call.join_dim, join_dim=call.dim, sizes=sizes, join_sizes=cuts)
    return collective(back, upstream)


def _scan(call: Call, inputs: Values, upstream: Values, collective: Collective) -> Values:
    return collective(call.changed(backwards=not call.backwards), upstream)


def _send_recv(call: Call, inputs: Values, upstream: Values, collective: Collective) -> Values:
    """A target's own value was replaced; a source keeps its value and has sent it."""
    targets = {target for _, target in call.pairs}
    ranks = {position: rank for row in call.group.rows for rank, position in enumerate(row)}
    sent = collective(
        call.changed(pairs=tuple((target, source) for source, target in call.pairs)),
        _awaited(call, upstream, inputs),
    )
    sources = {source for source, _ in call.pairs}
    results = []
    for k, position in enumerate(call.group.local):
        rank = ranks[position]
        parts = [upstream[k]] if rank not in targets and upstream[k] is not None else []
        parts += [sent[k]] if rank in sources else []
        with tf.device(call.group.devices[position]):
            if parts:
                results.append(tf.add_n(parts))
            else:
                results.append(tf.zeros_like(inputs[k]) if tf.is_tensor(inputs[k]) else None)
    return results


def _apart(call: Call, inputs: Values, upstream: Values, collective: Collective) -> Values:
    other = {"send": "recv", "recv": "send"}[call.operation]
    pairs = tuple((target, source) for source, target in call.pairs)
    given = upstream
    if call.operation == "send":
        given = [None if x is None else tf.TensorSpec(x.shape, x.dtype) for x in inputs]
    return collective(call.changed(operation=other, pairs=pairs), given)


_BY_GROUP = ("gather", "all_gather", "scatter", "reduce_scatter", "all_to_all")
"""What has lengths that may be others in each group of a mesh, where a call has one for all."""

_TRANSPOSES: dict[str, Transpose] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_reduce": _all_reduce,
    "gather": _gather,
    "all_gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _scatter,
    "all_to_all": _all_to_all,
    "scan": _scan,
    "send_recv": _send_recv,
    "send": _apart,
    "recv": _apart,
}


def _of_any_reduction(
    call: Call, inputs: Values, upstream: Values, collective: Collective
) -> Values:
    """Gathers all inputs and upstream gradients; each device differentiates by its own input."""
    group = call.group
    ranks = {position: rank for row in group.rows for rank, position in enumerate(row)}
    every = call.changed(operation="all_gather", algorithm="auto", root=0, dim=0, sizes=None)
    stacked = collective(every, _each(call, inputs, lambda x: x[None]))
    grads = upstream
    if call.operation == "reduce":
        grads = _reduce(call, inputs, upstream, collective)
    elif call.operation == "all_reduce":
        grads = _all_reduce(call, inputs, upstream, collective)
    elif call.operation == "reduce_scatter":
        grads = _scatter(call, inputs, upstream, collective)
    elif call.operation == "scan":
        grads = collective(every, _each(call, upstream, lambda x: x[None]))
    results = []
    for k, position in enumerate(group.local):
        with tf.device(group.devices[position]):
            terms = tf.unstack(stacked[k], group.size)
            derivative = _of_prefixes if call.operation == "scan" else _of_total
            results.append(derivative(call, terms, ranks[position], grads[k]))
    return results


def _of_total(call: Call, terms: list[tf.Tensor], rank: int, grad: tf.Tensor) -> tf.Tensor:
    """Derivative of a reduction by one of its terms, times the gradient of the result."""
    with tf.GradientTape() as tape:
        tape.watch(terms[rank])
        total = FOLDS[call.reduction](terms)
    return tape.gradient(total, terms[rank], output_gradients=grad)


def _of_prefixes(call: Call, terms: list[tf.Tensor], rank: int, grads: tf.Tensor) -> tf.Tensor:
    """Derivative of all prefixes that a value is in, times their gradients."""
    order = list(range(len(terms)))[:: -1 if call.backwards else 1]
    with tf.GradientTape() as tape:
        tape.watch(terms[rank])
        prefixes = {}
        for place, at in enumerate(order):
            before = order[: place + (not call.exclusive)]
            if rank in before:
                prefixes[at] = FOLDS[call.reduction]([terms[r] for r in before])
    if not prefixes:
        return tf.zeros_like(terms[rank])
    return tape.gradient(
        list(prefixes.values()), terms[rank], output_gradients=[grads[at] for at in prefixes]
    )
