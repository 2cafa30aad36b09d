"""What `kdist.recompute` and `RecomputeConfig` say of a model's layers."""

from __future__ import annotations

from typing import Any

import kdist
from kdist.config.recompute_blocks import Blocks, blocks_of

import keras
import pytest


class Inner(keras.layers.Layer):
    """A block with layers inside."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.up = keras.layers.Dense(4, name="up")
        self.down = keras.layers.Dense(4, name="down")

    def call(self, x: Any) -> Any:
        return self.down(self.up(x))


def model() -> keras.Model:
    x = inputs = keras.Input((4,))
    for i in range(2):
        x = Inner(f"block_{i}")(x)
    return keras.Model(inputs, keras.layers.Dense(2, name="head")(x))


def names(blocks: Blocks) -> list[tuple[str, str | None]]:
    return [
        (layer.path, None if n is None else blocks.blocks[n].name) for layer, n in blocks.layers
    ]


def test_nothing_by_default() -> None:
    assert not blocks_of(model(), None)


def test_layers_inside_are_part_of_the_block() -> None:
    found = blocks_of(model(), kdist.RecomputeConfig(layers=["block_.*"]))
    assert names(found) == [("block_0", "block_0"), ("block_1", "block_1")]
    assert {one.policy for one in found.blocks} == {"full"}


def test_of_a_model_each_layer_is_a_block() -> None:
    one = model()
    assert kdist.recompute(one) is one
    assert [name for name, _ in names(blocks_of(one, None))] == ["block_0", "block_1", "head"]


def test_a_pattern_s_groups_join_layers() -> None:
    found = blocks_of(model(), kdist.RecomputeConfig(layers=[r"block_\d+/(up|down)"]))
    assert len(found.blocks) == 2
    assert names(found)[2] == ("block_1/up", "block_0/up")


def test_the_innermost_call_wins() -> None:
    one = model()
    kdist.recompute(one.get_layer("block_0"))
    kdist.recompute(one.get_layer("block_0").up, mode=False)
    kdist.recompute(one.get_layer("block_1"), mode=False)
    kdist.recompute(one.get_layer("block_1").down)
    assert names(blocks_of(one, None)) == [
        ("block_0", "block_0"),
        ("block_0/up", None),
        ("block_1/down", "block_1/down"),
    ]


def test_calls_win_over_the_configuration() -> None:
    one = model()
    kdist.recompute(one.get_layer("block_0"), mode=False)
    kdist.recompute(one.get_layer("block_1"), mp_comm_recompute=False)
    found = blocks_of(one, kdist.RecomputeConfig())
    assert [(b.name, b.setting.mp_comm_recompute) for b in found.blocks] == [
        ("block_1", False),
        ("head", True),
    ]


def test_an_equal_setting_inside_begins_no_block() -> None:
    one = model()
    kdist.recompute(one.get_layer("block_0"))
    kdist.recompute(one.get_layer("block_0").up)
    assert names(blocks_of(one, None)) == [("block_0", "block_0")]


def test_weights_that_are_gathered_again() -> None:
    one = model()
    kdist.recompute(one.get_layer("block_0"), parallel_optimizer_comm_recompute=True)
    kdist.recompute(one.get_layer("block_0").up, parallel_optimizer_comm_recompute=False)
    freed = blocks_of(one, None).freed
    assert [freed.get(id(v)) for v in one.weights] == [False, False, True, True] + [None] * 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "some"}, "policy is"),
        ({"policy": "budget"}, "takes budget_mb"),
        ({"budget_mb": 1.0}, "takes budget_mb"),
        ({"policy": "budget", "budget_mb": 0}, "a number above 0"),
        ({"layers": "block"}, "layers is a list"),
        ({"layers": True}, "layers is a list"),
        ({"layers": ["("]}, "regular expressions"),
        ({"mp_comm_recompute": 1}, "mp_comm_recompute is"),
        ({"parallel_optimizer_comm_recompute": 0}, "or None"),
    ],
)
def test_what_is_not_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kdist.RecomputeConfig(**options)


def test_wrong_targets_and_patterns() -> None:
    with pytest.raises(ValueError, match="takes a keras layer"):
        kdist.recompute("block")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="matches no layer"):
        blocks_of(model(), kdist.RecomputeConfig(layers=["blocks"]))
    with pytest.raises(ValueError, match="recompute is a kdist.RecomputeConfig"):
        kdist.ParallelConfig(mesh=kdist.mesh(data=2), recompute=True)  # type: ignore[arg-type]
