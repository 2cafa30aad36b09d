"""From checked values to results: group by group, eager or traced, with gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from kdist._compat import collective_runtime
from kdist.comm import gradients, processes, tape
from kdist.comm.call import DTYPES, Call
from kdist.comm.execute import Row
from kdist.comm.operations import perform
from kdist.sharding.mesh import Device

import tensorflow as tf

Values = list[Any]
_REDUCING = ("reduce", "all_reduce", "reduce_scatter", "scan")
_ONE_SHAPE = (*_REDUCING, "broadcast")
_ALONG_A_DIM = ("gather", "all_gather", "scatter", "reduce_scatter", "all_to_all")


def collective(call: Call, values: Sequence[Any]) -> Values:
    """Runs a call.

    Args:
        call: What is asked.
        values: One per device of this process, in the mesh's order.

    Returns:
        One result per device of this process; None where the operation gives none.

    Raises:
        ValueError: For values that do not fit the call.
        PeerError: Eagerly, if another process does not take part.
    """
    results, thread = _run(call, values, tape.thread())
    tape.advance(thread)
    return results


def _run(
    call: Call, values: Sequence[Any], thread: tf.Tensor | None
) -> tuple[Values, tf.Tensor | None]:
    """Runs a call; the thread of a tape goes through it (`kdist.comm.tape`)."""
    given = _placed(call, values)
    check_values(call, given)
    if not call.group.crosses_processes:
        return _here(call, given), thread
    _check_static(call, given)
    if not gradients.is_differentiable(given):
        thread = None
    if not tf.executing_eagerly():
        return _across(call, given, thread)
    signature = tuple(
        (tuple(value.shape), value.dtype.name, tf.is_tensor(value)) if value is not None else None
        for value in given
    )
    tensors = [value for value in [*given, thread] if tf.is_tensor(value)]
    with processes.named_errors():
        results, thread = _traced(call, signature, thread is not None)(*tensors)
        return _on_own_devices(call, results), thread


def _here(call: Call, values: Values) -> Values:
    """In one process."""
    if not any(map(tf.is_tensor, values)) or not gradients.is_differentiable(values):
        return _rows(call, values, [])
    inputs = [value for value in values if tf.is_tensor(value)]
    with collective_runtime.unrecorded():
        results = _rows(call, values, [])
    outputs = [result for result in results if result is not None]

    def backward(*grads: Any) -> Values:
        upstream = iter(grads)
        found = gradients.backward(
            call, values, [None if r is None else next(upstream) for r in results], collective
        )
        return [grad for grad, value in zip(found, values) if tf.is_tensor(value)]

    collective_runtime.record_gradient(call.operation, outputs, inputs, backward)
    return results


def _across(
    call: Call, values: Values, thread: tf.Tensor | None
) -> tuple[Values, tf.Tensor | None]:
    """Across processes, in a graph. One device per process needs no gradient of several devices."""
    mask = [tf.is_tensor(value) for value in values]
    layout: list[bool] = []

    def forward(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        feed = iter(tensors)
        full = [next(feed) if tensor else value for value, tensor in zip(values, mask)]
        started: list[tf.Operation] = []
        with processes.kept(started) if call.apart else processes.lane(started):
            number = "" if call.apart else f"|{processes.number_in_graph()}"
            results = _rows(call, full, started, number)
        with tf.control_dependencies(started):
            results = _on_own_devices(call, results)
            ended = [tf.identity(passed) for passed in feed]
        layout[:] = [result is not None for result in results]

        def backward(*grads: Any) -> Values:
            upstream = iter(grads)
            given = [next(upstream) if there else None for there in layout]
            passed = next(upstream, None)

            def collective(call: Call, values: Values) -> Values:
                nonlocal passed
                results, passed = _run(call, values, passed)
                return results

            found = gradients.backward(call, full, given, collective, tied=passed is not None)
            kept = [grad for grad, tensor in zip(found, mask) if tensor]
            return kept if passed is None else [*kept, passed]

        return [result for result in results if result is not None] + ended, backward

    inputs = [value for value in [*values, thread] if tf.is_tensor(value)]
    if inputs and gradients.is_differentiable(values):
        outputs = tf.custom_gradient(forward)(*inputs)
    else:
        outputs, _ = forward(*inputs)
    rest = iter(outputs)
    return [next(rest) if there else None for there in layout], next(rest, None)


@functools.lru_cache(maxsize=512)
def _traced(call: Call, signature: tuple[Any, ...], threaded: bool) -> Any:
    """The graph of an eager call: op by op, a send would wait before the receive is asked for."""

    def program(*tensors: tf.Tensor) -> tuple[Values, tf.Tensor | None]:
        feed = iter(tensors)
        values = [
            None if part is None else next(feed) if part[2] else tf.TensorSpec(part[0], part[1])
            for part in signature
        ]
        return _across(call, values, next(feed) if threaded else None)

    return tf.function(program, autograph=False)


def _rows(call: Call, values: Values, started: list[tf.Operation], number: str = "") -> Values:
    group = call.group
    at = dict(zip(group.local, values))
    found: dict[int, Any] = {}
    for which, positions in enumerate(group.local_rows):
        order = positions[::-1] if call.backwards else positions
        row = Row(
            devices=tuple(group.devices[position] for position in order),
            local=tuple(position in at for position in order),
            operation=call.operation,
            axis=group.axis,
            about=f"{call.operation}|{call.algorithm}|{group.axis}{number}",
            timeout_seconds=group.timeout_seconds,
            started=started,
        )
        results = perform(call.in_group(which), [at.get(position) for position in order], row)
        found.update(zip(order, results))
    inputs = {id(value) for value in values}
    results = []
    for position in group.local:
        result = found[position]
        if id(result) in inputs:  # a gradient needs a tensor of its own
            with tf.device(group.devices[position]):
                result = tf.identity(result)
        results.append(result)
    return results


def _on_own_devices(call: Call, values: Values) -> Values:
    """The results of a function lie on its first device."""
    results = []
    for value, device in zip(values, call.group.local_devices):
        with tf.device(device):
            results.append(None if value is None else tf.identity(value))
    return results


def _placed(call: Call, values: Sequence[Any]) -> Values:
    """Values as tensors on their devices."""
    devices = call.group.local_devices
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != len(devices):
        raise ValueError(
            f"{call.operation} over axis {call.group.axis!r} takes a list of {len(devices)} "
            f"values, one per device of the mesh in this process. Received: values={_short(values)}"
        )
    return [
        value if value is None or isinstance(value, tf.TensorSpec) else place(value, device)
        for value, device in zip(values, devices)
    ]


def place(value: Any, device: str) -> tf.Tensor:
    """A value as a tensor on a device."""
    with tf.device(device):
        tensor = tf.convert_to_tensor(value)
        if tf.executing_eagerly() and _is_on(tensor, device):
            return tensor
        return tf.identity(tensor)


def _is_on(tensor: tf.Tensor, device: str) -> bool:
    return Device.parse(tensor.device) == Device.parse(device)


def check_values(call: Call, values: Values) -> None:
    """Refuses values that do not fit a call."""
    group, ranks = call.group, _ranks(call)
    for value, rank in zip(values, ranks):
        if not tf.is_tensor(value) and _needs_value(call, rank):
            raise ValueError(
                f"{call.operation} over axis {group.axis!r} needs a tensor of every device"
                f"{f' of rank {call.root}' if call.operation in ('broadcast', 'scatter') else ''}. "
                f"Received: value={value} for rank {rank}"
            )
    given = [value for value in values if value is not None]
    if not given:
        raise ValueError(
            f"{call.operation} over axis {group.axis!r} has no value in this process to tell the "
            "shape. Give tf.TensorSpec(shape, dtype) for what comes from another process. "
            f"Received: values={values}"
        )
    dtypes = {value.dtype.name for value in given}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        raise ValueError(
            f"The values of {call.operation} have one dtype of {', '.join(DTYPES)}. Cast them. "
            f"Received: dtypes={sorted(dtypes)}"
        )
    if call.reduction == "mean" and call.operation in _REDUCING and "int" in next(iter(dtypes)):
        raise ValueError(
            "A mean of integers is not an integer. Cast the values to a float dtype, or use "
            f"reduction='sum'. Received: reduction='mean', dtype={next(iter(dtypes))!r}"
        )
    one_shape = call.operation in _ONE_SHAPE and not call.by_group
    if one_shape and not all(given[0].shape.is_compatible_with(one.shape) for one in given):
        raise ValueError(
            f"The values of {call.operation} over axis {group.axis!r} have one shape. "
            f"Received: shapes={[tuple(value.shape) for value in given]}"
        )
    if call.operation in _ALONG_A_DIM:
        _check_dims(call, values, ranks)


def _check_dims(call: Call, values: Values, ranks: list[int]) -> None:
    rows = call.group.local_rows
    groups = {position: number for number, row in enumerate(rows) for position in row}
    for value, rank, position in zip(values, ranks, call.group.local):
        if value is None:
            continue
        for name, dim in (("dim", call.dim), ("join_dim", call.join_dim)):
            dims = value.shape.rank
            if dims is None or not isinstance(dim, int) or not -dims <= dim < dims:
                raise ValueError(
                    f"`{name}` of {call.operation} is a dim of the values, which have {dims}. "
                    f"Received: {name}={dim!r}"
                )
        said = call.in_group(groups[position]).sizes
        if said is None:
            continue
        sizes = said[rank] if call.operation == "all_to_all" else said
        joined = call.operation in ("gather", "all_gather")
        needed = sizes[rank] if joined else None if _unknown(sizes) else sum(sizes)
        have = value.shape[call.dim]
        if isinstance(needed, int) and have is not None and have != needed:
            raise ValueError(
                f"The sizes say that dim {call.dim} of rank {rank}'s value is {needed} long in "
                f"{call.operation}. Received: sizes={said}, shape={tuple(value.shape)}"
            )


def _unknown(sizes: Sequence[Any]) -> bool:
    return not all(isinstance(size, int) for size in sizes)


def _check_static(call: Call, values: Values) -> None:
    for value in values:
        if value is not None and not value.shape.is_fully_defined():
            raise ValueError(
                f"{call.operation} over axis {call.group.axis!r} crosses processes, and the other "
                "side must know the shape: give the function an input_signature without None, or "
                f"use tf.ensure_shape. Received: shape={value.shape}"
            )


def _needs_value(call: Call, rank: int) -> bool:
    if call.operation in ("broadcast", "scatter"):
        return rank == call.root
    if call.operation == "send_recv":
        return any(rank == source for source, _ in call.pairs)
    return not call.apart  # `apart` has looked at them


def _ranks(call: Call) -> list[int]:
    """Rank of each device of this process."""
    ranks = {position: rank for row in call.group.rows for rank, position in enumerate(row)}
    return [ranks[position] for position in call.group.local]


def _short(values: Any) -> str:
    if isinstance(values, Sequence) and not isinstance(values, str):
        return f"{type(values).__name__} of {len(values)}"
    return repr(values)[:200]
