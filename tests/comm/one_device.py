"""Each collective as TensorFlow on one device, and a loss: what gradients must equal."""

from __future__ import annotations

import tensorflow as tf


def plain(operation, xs, reduction="sum", exclusive=False, dim=0, root=0, pairs=(), **_):
    """The collective as single-device TensorFlow; None where a rank has no result."""
    p = len(xs)
    fold = {
        "sum": tf.reduce_sum,
        "mean": tf.reduce_mean,
        "max": tf.reduce_max,
        "min": tf.reduce_min,
        "product": tf.reduce_prod,
    }[reduction]
    total = (
        fold(tf.stack(xs), 0) if operation in ("reduce", "all_reduce", "reduce_scatter") else None
    )
    if operation == "broadcast":
        return [xs[root]] * p
    if operation in ("reduce", "gather"):
        only = total if operation == "reduce" else tf.concat(xs, dim)
        return [only if rank == root else None for rank in range(p)]
    if operation == "all_reduce":
        return [total] * p
    if operation == "all_gather":
        return [tf.concat(xs, dim)] * p
    if operation == "scatter":
        return tf.split(xs[root], p, dim)
    if operation == "reduce_scatter":
        return tf.split(total, p, dim)
    if operation == "all_to_all":
        parts = [tf.split(x, p, dim) for x in xs]
        return [tf.concat([parts[s][d] for s in range(p)], dim) for d in range(p)]
    if operation == "send_recv":
        sent = {target: xs[source] for source, target in pairs}
        return [sent.get(rank, x) for rank, x in enumerate(xs)]
    one = tf.zeros_like(xs[0]) if reduction == "sum" else tf.ones_like(xs[0])
    prefixes = [fold(tf.stack(xs[: r + 1]), 0) for r in range(p)]
    return [one, *prefixes[:-1]] if exclusive else prefixes


def part_of_loss(rank, result):
    """A loss to which each element of each result counts differently, and not linearly."""
    weights = tf.reshape(tf.range(1, tf.size(result) + 1, dtype=tf.int32), tf.shape(result))
    return tf.reduce_sum(tf.cast(weights, tf.float64) * result**2) * (rank + 1)


def loss_of(results):
    """The parts of all ranks that have a result."""
    parts = [part_of_loss(r, result) for r, result in enumerate(results) if result is not None]
    return tf.add_n(parts)
