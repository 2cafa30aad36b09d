"""Batches whose gradients half precision decides.

A ReLU whose input is zero but for rounding is on or off by chance: one row's part of a gradient is
then there or not, in correct programs too. Such a batch cannot tell a wrong program from a right
one. Plain Keras on one device, alone, says which batches these are.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from ..equivalence.case import Case, Data
from ..equivalence.harness import precision
from ..equivalence.outcome import eps_of

SCALE = 256.0
"""Keeps small gradients in float16's range."""
SEEDS = range(3, 23)


def decided_batch(case: Case, policy: str, weights: list[np.ndarray], rows: int) -> Data:
    """The first batch whose gradients one device computes in `policy` as it does in float64.

    As it does: within half of what `kdist.verify` allows.

    Raises:
        ValueError: If there is none among the first ones.
    """
    for seed in SEEDS:
        batch = case.data(seed, rows)
        half, true = (_gradients(case, p, weights, batch) for p in (policy, "float64"))
        top = max(np.abs(each).max() for each in true)
        allowed = [16 * eps_of(policy) * max(np.abs(each).max(), top / 2) for each in true]
        if all(np.abs(h - t).max() <= most for h, t, most in zip(half, true, allowed)):
            return batch
    raise ValueError(f"no batch that half precision decides. Received: case={case.name!r}")


def _gradients(case: Case, policy: str, weights: list[np.ndarray], batch: Data) -> list[np.ndarray]:
    x, y, sample_weight = batch
    with precision(policy):
        model = case.build()
        model.set_weights(weights)
        model.compile(loss=case.loss("sum_over_batch_size"), loss_weights=case.loss_weights)
        with tf.GradientTape() as tape:
            loss = SCALE * model.compute_loss(x, y, model(x, training=True), sample_weight)
        found = tape.gradient(loss, [v.value for v in model.trainable_variables])
    arrays = [keras.ops.convert_to_numpy(tf.convert_to_tensor(each)) for each in found]
    return [each.astype("float64") / SCALE for each in arrays]
