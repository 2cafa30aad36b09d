"""What features look up, and in which tables: the configuration of `DistributedEmbedding`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import keras

from .lazy import Lazy, again, lazy

COMBINERS = ("mean", "sum", "sqrtn")
PLACEMENTS = ("auto", "device", "host", "split")
OUT_OF_RANGE = ("error", "drop", "hash")
WRAPPERS = (keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer)


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """One embedding table, for one or several features.

    The names are those of KerasRS, whose tables are on one device unless that is a TPU.

    Attributes:
        name: Unique name of the table; the weight's path ends in `name/embeddings`.
        vocabulary_size: Rows.
        embedding_dim: Columns.
        initializer: Of the table, as `keras.initializers.get` takes it; by default a normal
            distribution, truncated, of standard deviation `1 / sqrt(embedding_dim)`.
        optimizer: None: the model's optimizer updates the table. Else an optimizer of Keras, or its
            name, that updates this table while `kdist.parallelize` trains the model; it is copied.
        dense: Whether that optimizer updates all rows in each step, as Keras does. By default it is
            lazy, see `kdist.lazy`: only rows that a batch looks up, and their state, are read and
            written.
        combiner: How the rows of one example become one: "sum", "mean" (divided by the sum of
            weights) or "sqrtn" (divided by the root of the sum of squared weights).
        placement: "host" keeps the table in host memory, see `kdist.place`; "split" keeps some of
            its rows on each device of an axis, see `rows`; "device" keeps it on every device, or
            cut as the layout map says. "auto" is "device" for a table of up to 256 MB, and one that
            a layout map cuts. Larger ones are dealt over the batch axis, without one over the first
            inner axis; on one device they go to the host, if that is another. `kdist.deal_tables`
            decides for all tables, by what you know of look-ups and memory.
        oov: What happens to an id of `vocabulary_size` or more: "error" names the feature and the
            id, "drop" leaves it out like padding, "hash" looks up the row `id % vocabulary_size`.
        rows: With `placement="split"`, how many rows each device of the axis holds, 0 included;
            together `vocabulary_size`.
        axis: The mesh axis of `rows` or `columns`; `kdist.layers.SplitEmbedding` has "model".
        columns: With `placement="split"` and without `rows`, how many columns each device holds;
            together `embedding_dim`.
        prefetch: With `placement="host"`, whether rows of the next batch are looked up while this
            one computes; see `kdist.place`.

    Raises:
        ValueError: For a value that is none of these.

    Example:
        >>> kdist.layers.TableConfig("users", vocabulary_size=1000, embedding_dim=16).combiner
        'mean'
    """

    name: str
    vocabulary_size: int
    embedding_dim: int
    initializer: Any = None
    optimizer: Any = None
    combiner: Literal["mean", "sum", "sqrtn"] = "mean"
    placement: Literal["auto", "device", "host", "split"] = "auto"
    oov: Literal["error", "drop", "hash"] = "error"
    rows: Sequence[int] | None = None
    axis: str = "data"
    columns: Sequence[int] | None = None
    dense: bool = False
    prefetch: bool = False

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ValueError(f"A table needs a name without '/'. Received: name={self.name!r}")
        for field in ("vocabulary_size", "embedding_dim"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"{field} of table {self.name!r} must be at least 1. "
                    f"Received: {field}={getattr(self, field)}"
                )
        for field, allowed in (
            ("combiner", COMBINERS),
            ("placement", PLACEMENTS),
            ("oov", OUT_OF_RANGE),
        ):
            if getattr(self, field) not in allowed:
                raise ValueError(
                    f"{field} of table {self.name!r} is one of {allowed}. "
                    f"Received: {field}={getattr(self, field)!r}"
                )
        self._check_optimizer()
        if self.prefetch and self.placement != "host":
            raise ValueError(
                "prefetch is of a table on the host. "
                f"Received: prefetch=True, placement={self.placement!r} of table {self.name!r}"
            )
        given = [one for one in (self.rows, self.columns) if one is not None]
        if len(given) != (self.placement == "split"):
            raise ValueError(
                "placement='split' and one of rows and columns go together. "
                f"Received: table {self.name!r}, placement={self.placement!r}, rows={self.rows}, "
                f"columns={self.columns}"
            )
        self._check_parts("rows", self.vocabulary_size)
        self._check_parts("columns", self.embedding_dim)

    def _check_optimizer(self) -> None:
        """Takes the optimizer as it will update the table."""
        if self.optimizer is None:
            if self.dense:
                raise ValueError(
                    "dense is said of a table's own optimizer; the model's is dense already. Leave "
                    f"it out, or give an optimizer. Received: table {self.name!r}, dense=True"
                )
            return
        given = keras.optimizers.get(self.optimizer)
        if isinstance(given, WRAPPERS) or (self.dense and isinstance(given, Lazy)):
            raise ValueError(
                "A table's optimizer does the math itself: loss scaling and choices are for the "
                "model's optimizer, and with dense=True it is one of Keras's. "
                f"Received: table {self.name!r}, optimizer={type(given).__name__}, "
                f"dense={self.dense}"
            )
        object.__setattr__(self, "optimizer", again(given) if self.dense else lazy(given))

    def _check_parts(self, what: str, total: int) -> None:
        sizes = getattr(self, what)
        if sizes is None:
            return
        object.__setattr__(self, what, tuple(sizes))
        if sum(sizes) != total:
            raise ValueError(
                f"The {what} of table {self.name!r} are the whole table: {total}. "
                f"Received: {sum(sizes)}, {what}={tuple(sizes)}"
            )

    def get_config(self) -> dict[str, Any]:
        """As JSON takes it."""
        config = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        if self.optimizer is not None:
            config["optimizer"] = keras.optimizers.serialize(self.optimizer)
        if self.initializer is not None:
            given = keras.initializers.get(self.initializer)
            config["initializer"] = keras.initializers.serialize(given)
        return config


@dataclasses.dataclass(frozen=True)
class FeatureConfig:
    """One feature: ids that are looked up in a table.

    Attributes:
        name: Unique name of the feature.
        table: Where it is looked up; several features may share one.
        input_shape: Of the ids, the batch first: `(batch,)`, or `(batch, ids)`, padded with -1.
            None for a dim of any size.
        output_shape: Of the result. `(*input_shape, dim)` has a row for each id;
            `(*input_shape[:-1], dim)` combines the ids of the last dim into one row.

    Raises:
        ValueError: If the output is neither.

    Example:
        >>> table = kdist.layers.TableConfig("words", 100, 8)
        >>> kdist.layers.FeatureConfig("query", table, (None, 5), (None, 8)).combines
        True
    """

    name: str
    table: TableConfig
    input_shape: Sequence[int | None]
    output_shape: Sequence[int | None]

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_shape", tuple(self.input_shape))
        object.__setattr__(self, "output_shape", tuple(self.output_shape))
        each = (*self.input_shape, self.table.embedding_dim)
        joined = (*self.input_shape[:-1], self.table.embedding_dim)
        allowed = [each] if len(self.input_shape) < 2 else [each, joined]
        if not self.input_shape or self.output_shape not in allowed:
            raise ValueError(
                f"Feature {self.name!r} with ids of shape {self.input_shape} in table "
                f"{self.table.name!r} gives {' or '.join(map(str, allowed))}. "
                f"Received: output_shape={self.output_shape}"
            )

    @property
    def combines(self) -> bool:
        """Whether the ids of the last dim become one row."""
        return len(self.output_shape) == len(self.input_shape)

    def get_config(self) -> dict[str, Any]:
        """As JSON takes it; the table by its name."""
        shapes = {"input_shape": list(self.input_shape), "output_shape": list(self.output_shape)}
        return {"name": self.name, "table": self.table.name, **shapes}


Features = FeatureConfig | Sequence["Features"] | Mapping[str, "Features"]


def flat(features: Features, given: Any, what: str) -> list[Any]:
    """What is given for each feature, in order.

    Args:
        features: A feature, or lists and dicts of them, nested.
        given: Anything in that structure.
        what: Of what the structure is, for the error.

    Raises:
        ValueError: If it has another structure.
    """
    if isinstance(features, FeatureConfig):
        return [given]
    names: Any = range(len(features))
    fits = isinstance(given, list | tuple) and len(given) == len(features)
    if isinstance(features, Mapping):
        names = list(features)
        fits = isinstance(given, Mapping) and given.keys() == features.keys()
    if not fits:
        raise ValueError(
            f"{what} has the structure of the features: {mapped(features, lambda one: one.name)}. "
            f"Received: {given}"
        )
    return [one for name in names for one in flat(features[name], given[name], what)]


def mapped(features: Features, function: Callable[[FeatureConfig], Any]) -> Any:
    """A structure of what a function returns for each feature, in order."""
    if isinstance(features, FeatureConfig):
        return function(features)
    if isinstance(features, Mapping):
        return {name: mapped(one, function) for name, one in features.items()}
    return [mapped(one, function) for one in features]


def check_features(features: Sequence[FeatureConfig]) -> list[TableConfig]:
    """The tables of some features, each once, in the order of their first use.

    Raises:
        ValueError: Two features, or two tables that differ, have one name; or there is none.
    """
    names = [one.name for one in features]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"Features have names, each its own. Received: {names}")
    tables: dict[str, TableConfig] = {}
    for one in features:
        known = tables.setdefault(one.table.name, one.table)
        if known != one.table:
            raise ValueError(
                "Two tables of one name must be the same. "
                f"Received: {known} and, of feature {one.name!r}, {one.table}"
            )
    return list(tables.values())
