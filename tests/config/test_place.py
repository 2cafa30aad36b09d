"""What `kdist.place` takes, and which tables cannot be on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kdist

import keras
import numpy as np
import pytest

TOKENS = np.zeros((4, 3), "int32")


def model(table: keras.layers.Layer, after: Callable[[Any], Any] = lambda x: x) -> keras.Model:
    tokens = keras.Input((3,), dtype="int32")
    return keras.Model(tokens, keras.layers.Dense(1)(keras.layers.Flatten()(after(table(tokens)))))


def parallel(made: keras.Model, **options: Any) -> keras.Model:
    mesh = options.pop("mesh", {"data": 2})
    return kdist.parallelize(made, kdist.ParallelConfig(mesh=kdist.mesh(**mesh), **options))


def trained(made: keras.Model, **options: Any) -> keras.Model:
    parallel(made, **options).compile("sgd", "mse")
    made.train_on_batch(TOKENS, np.zeros((4, 1)))
    return made


def test_another_place() -> None:
    with pytest.raises(ValueError, match="'host' or the 'device'.*Received: where='disk'"):
        kdist.place(keras.layers.Embedding(5, 2), "disk")  # type: ignore[arg-type]


def test_no_layer() -> None:
    with pytest.raises(ValueError, match="takes a keras layer"):
        kdist.place(3)  # type: ignore[arg-type]


def test_no_table() -> None:
    with pytest.raises(ValueError, match="Leave this layer as it is.*'down' of type Dense"):
        kdist.place(keras.layers.Dense(3, name="down"))


def test_a_model_names_the_tables_inside() -> None:
    made = model(keras.layers.Embedding(5, 2, name="table"))
    with pytest.raises(ValueError, match=r"Name these one by one: \['table'\]"):
        kdist.place(made)


def test_tied_weights_are_a_second_use() -> None:
    tied = keras.layers.ReversibleEmbedding(5, 2, tie_weights=True, name="tied")
    with pytest.raises(ValueError, match="used whole a second time.*reverse=True.*layer 'tied'"):
        kdist.place(tied)


def test_a_call_that_reads_the_table_itself() -> None:
    class Taking(keras.layers.Embedding):
        def call(self, inputs: Any) -> Any:
            return keras.ops.take(self.embeddings, inputs, axis=0)

    made = model(kdist.place(Taking(5, 2, name="taking")))
    with pytest.raises(ValueError, match=r"super\(\).call\(ids\).*read whole in '.*taking"):
        trained(made)


def test_a_table_with_lora_factors() -> None:
    made = model(kdist.place(keras.layers.Embedding(5, 2, name="table", lora_rank=2)))
    with pytest.raises(ValueError, match="has LoRA.*without kdist.place.*enable_lora.*'table'"):
        parallel(made)


@pytest.mark.parametrize("placed", ["host", "split"])
def test_factors_of_lora_after_parallelize(placed: str) -> None:
    table = keras.layers.Embedding(5, 2, name="table")
    if placed == "host":
        kdist.place(table)
    else:
        kdist.shard(table, manual_split=(2, 3), axis="data")
    made = trained(model(table))
    table.enable_lora(2)
    said = "without (kdist.place|manual_split).*build it again. Received: layer 'table'"
    with pytest.raises(ValueError, match=said):
        made.compile("sgd", "mse")


@pytest.mark.parametrize("mesh", [{"data": 2}, {"data": 1}])
def test_a_table_of_a_parallel_model_stays(mesh: dict[str, int]) -> None:
    """On the host it is one variable, as all weights are on one device."""
    table = kdist.place(keras.layers.Embedding(5, 2, name="table"))
    parallel(model(table), mesh=mesh)
    with pytest.raises(ValueError, match="before parallelize. Received: layer 'table'"):
        kdist.place(table, "device")
    with pytest.raises(ValueError, match="before parallelize. Received: layer 'table'"):
        kdist.shard(table, manual_split=(2, 3), axis="data")


def penalized() -> keras.layers.Embedding:
    return keras.layers.Embedding(5, 2, name="table", embeddings_regularizer="l2")


def test_a_penalty_that_a_loss_of_ones_own_may_leave_out() -> None:
    class Own(keras.Model):
        def compute_loss(self, x: Any, y: Any, y_pred: Any, *args: Any, **kwargs: Any) -> Any:
            return keras.ops.mean(y_pred)

    inner = model(kdist.place(penalized()))
    with pytest.raises(
        ValueError, match=r"compute_loss of Own, embeddings_regularizer of \['table"
    ):
        trained(Own(inner.inputs, inner.outputs))


def test_a_penalty_of_rows_that_are_looked_up_ahead() -> None:
    made = parallel(model(kdist.place(penalized(), prefetch=True)))
    made.compile("sgd", "mse", steps_per_execution=2)
    with pytest.raises(ValueError, match="which changes all rows of .'table'"):
        made.fit(TOKENS, np.zeros((4, 1)), batch_size=2, verbose=0)


def test_a_layout() -> None:
    made = model(kdist.place(keras.layers.Embedding(6, 2, name="table")))
    layouts = {"table/embeddings": ("model", None)}
    with pytest.raises(ValueError, match=r"whole there.*'table/embeddings' with layout \('model'"):
        parallel(made, mesh={"model": 2}, layout_map=layouts)


def test_layers_over_the_whole_batch() -> None:
    made = model(kdist.place(keras.layers.Embedding(6, 2, name="table")))
    with pytest.raises(ValueError, match=r"batch_semantics='global'.*\['table'\]"):
        parallel(made, batch_semantics="global")


def test_a_second_use_is_named() -> None:
    table = kdist.place(keras.layers.Embedding(6, 2, name="table"))

    class Head(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x @ keras.ops.transpose(table.embeddings)

    made = model(table, Head(name="head"))
    with pytest.raises(ValueError, match="'table/embeddings', read whole in '.*head"):
        trained(made)


def test_indices_that_follow_from_weights() -> None:
    table = kdist.place(keras.layers.Embedding(6, 2, name="table"))
    tokens = keras.Input((3,), dtype="int32")
    hidden = keras.layers.Dense(3, name="hidden")(keras.ops.cast(tokens, "float32"))
    chosen = keras.ops.cast(keras.ops.clip(hidden, 0, 5), "int32")
    made = keras.Model(tokens, keras.layers.Dense(1)(keras.layers.Flatten()(table(chosen))))
    with pytest.raises(ValueError, match="layer 'table', whose indices follow from variable 'hid"):
        trained(made)


def test_indices_that_follow_from_rows() -> None:
    table = kdist.place(keras.layers.Embedding(6, 2, name="table"))

    class Again(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return table(keras.ops.cast(keras.ops.abs(x[..., 0]) > 0, "int32"))

    with pytest.raises(ValueError, match="follow from rows of 'table/embeddings'"):
        trained(model(table, Again()))


def test_host_embedding_comes_back_from_its_configuration() -> None:
    layer = kdist.layers.HostEmbedding(7, 3, mask_zero=True, name="table")
    again = kdist.layers.HostEmbedding.from_config(layer.get_config())
    assert (again.input_dim, again.output_dim, again.mask_zero) == (7, 3, True)
    made = model(again)
    assert parallel(made).plan().weights[0].on_host
    assert not parallel(model(kdist.place(layer, "device"))).plan().weights[0].on_host


def in_stages(count: int, ids: Callable[[Any], Any], last: int) -> keras.Model:
    """A chain of stages; the first one looks rows up, and so does stage `count - 1`."""
    table = kdist.place(keras.layers.Embedding(6, 2, name="table"))
    tokens = keras.Input((3,), dtype="int32")
    x = table(tokens)
    for stage in range(count):
        layer = keras.layers.Dense(2, name=f"layer_{stage}")
        kdist.set_stage(layer, stage)
        x = layer(x)
    x = keras.layers.Add()([x, table(ids(tokens))])
    head = keras.layers.Dense(1, name="head")
    kdist.set_stage(head, last)
    return keras.Model(tokens, head(keras.layers.Flatten()(x)))


def test_a_table_that_does_not_train() -> None:
    """Its rows travel, which the plan says."""
    table = kdist.place(keras.layers.Embedding(6, 2, name="table", trainable=False))
    made = parallel(model(table))
    assert any("'table' does not train" in note for note in made.plan().notes)
    (planned,) = made.plan().host_tables()
    assert planned.down and planned.up and not planned.back
