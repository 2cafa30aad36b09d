"""Synthetic advertisement clicks that a model can learn: the data of the click-through example."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Clicks:
    """Impressions of advertisements.

    Attributes:
        categories: int32 `(count, columns)`; column `i` counts from 0 below `rows[i]`.
        numbers: float32 `(count, numbers)`, standard normal.
        clicked: float32 `(count, 1)`, 1 where the user clicked.
        rows: how many values each category column can take.
    """

    categories: np.ndarray
    numbers: np.ndarray
    clicked: np.ndarray
    rows: tuple[int, ...]


def make(count: int, rows: tuple[int, ...], numbers: int, seed: int) -> Clicks:
    """Draws impressions whose clicks follow a hidden factorization machine.

    Each category value has a hidden bias and a hidden vector; the log-odds of a click are the sum
    of the biases, of the products between pairs of columns, and of a linear function of the
    numbers. Values are drawn with probability falling as one over their rank, as identifiers are in
    real logs.

    Args:
        count: impressions.
        rows: values of each category column.
        numbers: numeric columns.
        seed: of everything.
    """
    rng = np.random.default_rng(seed)
    categories = np.empty((count, len(rows)), np.int32)
    log_odds = np.full(count, -0.5)
    vectors = []
    for column, size in enumerate(rows):
        weights = 1.0 / np.arange(1, size + 1)
        categories[:, column] = rng.choice(size, count, p=weights / weights.sum())
        log_odds += rng.normal(0, 0.7, size)[categories[:, column]]
        vectors.append(rng.normal(0, 0.6, (size, 4))[categories[:, column]])
    stacked = np.stack(vectors)
    log_odds += 0.5 * (stacked.sum(0) ** 2 - (stacked**2).sum(0)).sum(-1)
    dense = rng.normal(size=(count, numbers)).astype(np.float32)
    log_odds += dense @ rng.normal(0, 0.5, numbers)
    clicked = rng.random(count) < 1 / (1 + np.exp(-log_odds))
    return Clicks(categories, dense, clicked.astype(np.float32)[:, None], rows)
