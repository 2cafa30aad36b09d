"""Several tables and features in one layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from .host_embedding import HostEmbedding
from .padding import dense, is_composite
from .split_embedding import SplitEmbedding
from .tables import FeatureConfig, Features, TableConfig, check_features, flat, mapped


@dataclasses.dataclass(frozen=True)
class _Given:
    """Features, in their structure and flat."""

    structure: Features
    flat: tuple[FeatureConfig, ...]

    def of(self, given: Any, what: str) -> list[Any]:
        return flat(self.structure, given, what)

    def packed(self, values: Sequence[Any]) -> Any:
        rest = iter(values)
        return mapped(self.structure, lambda _: next(rest))


@keras.saving.register_keras_serializable("kdist")
class DistributedEmbedding(keras.layers.Layer):
    """Looks several features up in several tables, each on the host or on the devices.

    It has the vocabulary of KerasRS's layer of the same name (which places tables on TPUs alone).
    Features share tables, ids of an example are combined with or without weights, and while
    `kdist.parallelize` trains the model, each table is where its `placement` says. Elsewhere the
    layer computes the same on one device.

    Args:
        feature_configs: A `FeatureConfig`, or lists and dicts of them, nested.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name`.

    Call arguments:
        inputs: Integer ids in the structure of `feature_configs`, of each feature's `input_shape`.
            Ids below 0 are padding: they look up nothing, and a row of none is zero. Ragged and
            sparse ids are padded so. Inner axes and `prefetch` need them dense: `kdist.parallelize`
            has inputs that no other layer takes padded before a step, and `preprocess` pads others.
        weights: None, or a factor for each id, in the same structure and shapes.

    Output shape:
        The structure of `feature_configs`, with each feature's `output_shape`.

    Raises:
        ValueError: The structure of the inputs is another one; names repeat.
        tf.errors.InvalidArgumentError: An id is not in its table, and the table says
            `oov="error"`. Not with `jit_compile=True`: XLA leaves assertions out.

    Example:
    ```python
    users = kdist.layers.TableConfig("users", 100_000, 64, placement="host")
    words = kdist.layers.TableConfig("words", 5_000, 64, combiner="sum")
    layer = kdist.layers.DistributedEmbedding({
        "user": kdist.layers.FeatureConfig("user", users, (None,), (None, 64)),
        "query": kdist.layers.FeatureConfig("query", words, (None, 8), (None, 64)),
    })
    user, query = keras.Input((), dtype="int32"), keras.Input((8,), dtype="int32")
    rows = layer({"user": user, "query": query})
    ```
    """

    def __init__(self, feature_configs: Features, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Keras would wrap lists and dicts that an attribute holds.
        self._given = _Given(feature_configs, tuple(flat(feature_configs, feature_configs, "")))
        self._tables = {table.name: self._made(table) for table in self.table_configs}

    def _made(self, table: TableConfig) -> keras.layers.Embedding:
        initializer = table.initializer
        if initializer is None:
            initializer = keras.initializers.VarianceScaling(mode="fan_out")
        given = {
            "dim": table.embedding_dim,
            "embeddings_initializer": initializer,
            "dtype": self.dtype_policy,
            "name": table.name,
        }
        if table.placement == "host":
            return HostEmbedding(table.vocabulary_size, prefetch=table.prefetch, **given)
        if table.placement == "split":
            rows, given["dim"] = table.rows or table.vocabulary_size, table.columns or given["dim"]
            return SplitEmbedding(rows, axis=table.axis, **given)
        return keras.layers.Embedding(table.vocabulary_size, given.pop("dim"), **given)

    @property
    def feature_configs(self) -> Features:
        """As given."""
        return self._given.structure

    @property
    def tables(self) -> Mapping[str, keras.layers.Embedding]:
        """The embedding of each table, by name: for `kdist.shard`, or their values."""
        return dict(self._tables)

    @property
    def table_configs(self) -> list[TableConfig]:
        """The configuration of each table, once."""
        return check_features(self._given.flat)

    def build(self, input_shape: Any) -> None:
        """Makes the tables."""
        for layer in self._tables.values():
            layer.build()

    def call(self, inputs: Any, weights: Any = None) -> Any:
        """The rows of each feature.

        Args:
            inputs: In the structure of `feature_configs`, integer ids of each feature's
                `input_shape`, or ragged or sparse ones; -1 is padding.
            weights: Of the ids, in the same structure and shapes; None for 1.

        Returns:
            In the same structure, of each feature's `output_shape`, in the layer's compute dtype.

        Raises:
            ValueError: Another structure. An id that is not in its table, with `oov="error"`, is a
                `tf.errors.InvalidArgumentError` when the call runs.
        """
        ids = self._given.of(inputs, f"The input of layer {self.name!r}")
        factors = (
            [None] * len(ids)
            if weights is None
            else self._given.of(weights, f"weights of layer {self.name!r}")
        )
        rows = [
            self._look_up(feature, one, factor)
            for feature, one, factor in zip(self._given.flat, ids, factors, strict=True)
        ]
        return self._given.packed(rows)

    def _look_up(self, feature: FeatureConfig, ids: Any, weights: Any) -> Any:
        table = feature.table
        if is_composite(ids):
            ids = dense(feature, ids)
        if is_composite(weights):
            weights = dense(feature, weights, 0)
        ids = ops.cast(ids, "int64" if ids.dtype == "int64" else "int32")
        ids, valid = _in_table(ids, feature)
        rows = self._tables[table.name](ids)
        factors = ops.cast(valid, rows.dtype)
        if weights is not None:
            factors = factors * ops.cast(weights, rows.dtype)
        rows = rows * ops.expand_dims(factors, -1)
        return _combined(rows, factors, table.combiner) if feature.combines else rows

    def compute_output_spec(self, inputs: Any, weights: Any = None) -> Any:
        """Symbolic tensors of each feature's shape."""
        ids = self._given.of(inputs, f"The input of layer {self.name!r}")
        found = []
        for feature, one in zip(self._given.flat, ids, strict=True):
            _check_shape(feature, tuple(one.shape))
            leading = one.shape[:-1] if feature.combines else one.shape
            shape = (*leading, feature.table.embedding_dim)
            found.append(keras.KerasTensor(shape, dtype=self.compute_dtype))
        return self._given.packed(found)

    def preprocess(self, inputs: Any) -> Any:
        """Makes padded ids of ragged and sparse ones, in a `tf.data` pipeline or before `fit`.

        Args:
            inputs: In the structure of `feature_configs`: lists of lists, `tf.RaggedTensor`,
                `tf.SparseTensor`, or dense ids, which stay as they are.

        Returns:
            Dense ids of each feature's `input_shape`, filled up with -1.

        Raises:
            ValueError: An example has more ids than `input_shape` has room for; in a `tf.data`
                pipeline, where sizes are not known before, a `tf.errors.InvalidArgumentError`.

        Example:
            >>> table = kdist.layers.TableConfig("words", 100, 8)
            >>> query = kdist.layers.FeatureConfig("query", table, (None, 3), (None, 8))
            >>> layer = kdist.layers.DistributedEmbedding(query)
            >>> layer.preprocess(tf.ragged.constant([[5], [1, 2]])).numpy().tolist()
            [[5, -1, -1], [1, 2, -1]]
        """
        given = self._given.of(inputs, f"What layer {self.name!r} prepares")
        padded = [dense(*both) for both in zip(self._given.flat, given, strict=True)]
        return self._given.packed(padded)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor, each table once."""
        features = mapped(self.feature_configs, FeatureConfig.get_config)
        tables = [one.get_config() for one in self.table_configs]
        return {**super().get_config(), "feature_configs": features, "tables": tables}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DistributedEmbedding:
        """Makes the layer of what `get_config` returned."""
        config = dict(config)
        tables = {one["name"]: TableConfig(**one) for one in config.pop("tables")}

        def made(given: Any) -> Any:
            if isinstance(given, dict) and {"table", "output_shape"} <= given.keys():
                return FeatureConfig(**{**given, "table": tables[given["table"]]})
            if isinstance(given, dict):
                return {name: made(one) for name, one in given.items()}
            return [made(one) for one in given]

        return cls(made(config.pop("feature_configs")), **config)


def _in_table(ids: Any, feature: FeatureConfig) -> tuple[Any, Any]:
    """Ids of rows that exist, and which of them count."""
    table = feature.table
    valid = ids >= 0
    if table.oov == "hash":
        ids = ops.mod(ids, table.vocabulary_size)
    elif table.oov == "drop":
        valid = ops.logical_and(valid, ids < table.vocabulary_size)
    else:
        ids = _asserted(ids, feature)
    return ops.where(valid, ids, 0), valid


def _asserted(ids: Any, feature: FeatureConfig) -> Any:
    table = feature.table
    largest = tf.reduce_max(ids)
    message = (
        f"Feature {feature.name} has an id that table {table.name} does not have: ids are 0 to "
        f"{table.vocabulary_size - 1}, and below 0 for padding. Set `oov` of its TableConfig to "
        "drop or hash to take others. The largest id is"
    )
    right = largest < tf.cast(table.vocabulary_size, ids.dtype)
    check = tf.debugging.Assert(right, [message, largest])
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(ids)


def _combined(rows: Any, factors: Any, combiner: str) -> Any:
    total = ops.sum(rows, axis=-2)
    if combiner == "sum":
        return total
    if combiner == "mean":
        weight = ops.sum(factors, axis=-1, keepdims=True)
    else:
        # Where there is no id, the root's slope would be infinite.
        squares = ops.sum(ops.square(factors), axis=-1, keepdims=True)
        weight = ops.sqrt(ops.where(squares > 0, squares, 1))
    return ops.divide_no_nan(total, weight)


def _check_shape(feature: FeatureConfig, shape: tuple[int | None, ...]) -> None:
    known = [(have, want) for have, want in zip(shape[1:], feature.input_shape[1:], strict=False)]
    if len(shape) != len(feature.input_shape) or any(
        have is not None and want is not None and have != want for have, want in known
    ):
        raise ValueError(
            f"Feature {feature.name!r} takes ids of shape {feature.input_shape}. Received: {shape}"
        )
