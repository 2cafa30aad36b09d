"""Synthetic advertisement clicks that a model can learn: the data of two examples."""

import dataclasses
from typing import Any

import numpy as np
from absl import flags

Part = tuple[dict[str, np.ndarray], np.ndarray]
"""Inputs by name, `categories` and `numbers`, and who clicked."""


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


def define_flags(values: flags.FlagValues, epochs: int) -> None:
    """Adds the flags of the data, and of how a model trains on it.

    Args:
        values: gets them.
        epochs: passes over the impressions, if nothing else is said.
    """
    flags.DEFINE_multi_integer(
        "rows", [4096, 2048, 512, 128, 64, 16], "values of a category column", flag_values=values
    )
    for name, default, meaning in (
        ("numbers", 8, "numeric columns"),
        ("width", 16, "features of an embedding"),
        ("examples", 80_000, "impressions to train on"),
        ("batch", 512, "impressions in a global batch"),
        ("epochs", epochs, "passes over the impressions"),
    ):
        flags.DEFINE_integer(name, default, meaning, lower_bound=1, flag_values=values)
    flags.DEFINE_integer("seed", 0, "seed of weights and data", flag_values=values)


def learn_and_rest(args: Any) -> tuple[Part, Part]:
    """Impressions to train on, and a tenth as many, at least a batch, that are held out.

    Args:
        args: values of `define_flags`.
    """
    held_out = max(args.batch, args.examples // 10)
    clicks = make(args.examples + held_out, tuple(args.rows), args.numbers, args.seed)
    inputs = {"categories": clicks.categories, "numbers": clicks.numbers}

    def part(rows: slice) -> Part:
        return {name: column[rows] for name, column in inputs.items()}, clicks.clicked[rows]

    return part(slice(0, args.examples)), part(slice(args.examples, None))
