"""Two inner axes that cut one dim together: lowered as one, in every order, equal to one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import kdist
from kdist.api.attached import attached
from kdist.dtensor import relayout
from kdist.sharding.merged_axes import merged_axes
from kdist.sharding.mesh import Device, Topology
from kdist.storage.variables import same_device, stored

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from .case import Layout
from .harness import compare
from .matrix import level_config, product, spread
from .optimizer_zoo import OPTIMIZERS
from .zoo import BY_NAME

ALONE = {"data": 1, "model": 2, "expert": 2}
# The axes of the group are not neighbours in the mesh.
APART = {"expert": 2, "data": 2, "model": 2}
MESHES = {"one": ALONE, "replicas": {**ALONE, "data": 2}, "apart": APART}
ORDERS = {"model_first": ("model", "expert"), "expert_first": ("expert", "model")}
LEVELS = ("level0", "level1", "level3")


def over_both(layout_map: Mapping[str, Layout], axes: tuple[str, str]) -> dict[str, Any]:
    """A layout map that cuts over both axes what was cut over `model`."""
    return {
        pattern: tuple(axes if dim == "model" else dim for dim in dims)
        for pattern, dims in layout_map.items()
    }


@pytest.mark.parametrize(
    ("name", "mesh", "order", "level"),
    spread(
        product(("mlp", "gpt", "dlrm"), MESHES, ORDERS, LEVELS),
        [("mlp", "replicas", "expert_first", "level1")],
    ),
)
def test_two_axes_on_one_dim_equal_one_device(
    name: str, mesh: str, order: str, level: str, engine: str
) -> None:
    compare(
        BY_NAME[name],
        MESHES[mesh],
        optimizer=OPTIMIZERS["adam"],
        engine=engine,
        layout_map=over_both(BY_NAME[name].layout_map, ORDERS[order]),
        config=level_config(level),
    )


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_two_axes_on_one_dim_in_stages(schedule: str, engine: str) -> None:
    compare(
        BY_NAME["mlp"],
        {"pipe": 2, "model": 2, "expert": 2},
        optimizer=OPTIMIZERS["adam"],
        engine=engine,
        layout_map=over_both(BY_NAME["mlp"].layout_map, ("expert", "model")),
        config={"pipeline": kdist.PipelineConfig(micro_batches=2, schedule=schedule)},
    )


def placed(
    axes: Mapping[str, int], layout: Any, declare: Callable[[Any], Any] = lambda tensor: tensor
) -> keras.Model:
    """A model of two layers, the first cut by columns over some axes."""
    x = keras.Input((4,))
    hidden = declare(layers.Dense(8, name="up")(x))
    model = keras.Model(x, layers.Dense(2, name="head")(hidden))
    layout_map = {"up/kernel": (None, layout)} if layout else None
    config = kdist.ParallelConfig(mesh=kdist.mesh(**axes), layout_map=layout_map)
    kdist.parallelize(model, config)
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_every_device_holds_its_quarter(axes: Mapping[str, int], order: tuple[str, str]) -> None:
    model = placed(axes, order)
    kernel = model.get_layer("up").kernel
    value, entry = kernel.numpy(), stored(kernel)
    assert entry is not None
    sizes = list(axes.values())
    names = kdist.mesh(**axes).devices.reshape(sizes)
    known = [Device.parse(device.name) for device in tf.config.list_logical_devices()]
    slices = attached(model).topology.slices
    for coordinate in np.ndindex(*sizes):
        at = dict(zip(axes, coordinate, strict=True))
        part = 2 * at[order[0]] + at[order[1]]
        device = Device.parse(names[coordinate]).among(known).name
        s = next(n for n, one in enumerate(slices) if device in one.devices)
        local = entry.locals[s, slices[s].devices.index(device)]
        assert same_device(local.value.device, device)
        np.testing.assert_array_equal(local.numpy(), value[:, 2 * part : 2 * part + 2])


def test_the_axes_are_one_to_what_was_lowered() -> None:
    model = placed(ALONE, ("model", "expert"), lambda t: kdist.shard(t, out_strategy=(1, 4)))
    model.train_on_batch(np.ones((4, 4)), np.ones((4, 2)))
    inspection = kdist.inspect(model)
    assert inspection.fallbacks == ()
    # The head sums over what four devices have each.
    (summed,) = [c for c in inspection.collectives if c.phase == "forward"]
    assert (summed.kind, summed.axis) == ("all-reduce", ("model", "expert"))


def test_an_axis_that_is_used_alone_too_is_refused() -> None:
    def alone(tensor: Any) -> Any:
        return kdist.shard(tensor, out_strategy=(None, "expert"))

    with pytest.raises(
        ValueError,
        match=r"'model' and 'expert' cut one dim of 'up/kernel' tog.*'relayout.*Received",
    ):
        placed(ALONE, ("model", "expert"), alone)

    def backwards(tensor: Any) -> Any:
        return kdist.shard(tensor, out_strategy=(None, ("expert", "model")))

    with pytest.raises(ValueError, match="alone or in another order; the output of layer 'relayo"):
        placed(ALONE, ("model", "expert"), backwards)


class Inside(layers.Layer):
    """Cuts a tensor where kdist sees it while tracing only."""

    def __init__(self, *dims: Any) -> None:
        super().__init__()
        self.dims = dims

    def call(self, x: Any) -> Any:
        return kdist.shard(x, out_strategy=self.dims)


def test_axes_that_meet_inside_a_layer_first_are_refused() -> None:
    x, y = np.ones((4, 4)), np.ones((4, 2))
    known = placed(ALONE, ("model", "expert"), Inside(None, ("model", "expert")))
    known.train_on_batch(x, y)
    assert kdist.inspect(known).fallbacks == ()
    for layout, dims in ((None, ("model", "expert")), (("model", "expert"), "expert")):
        model = placed(ALONE, layout, Inside(None, dims))
        with pytest.raises(ValueError, match="A dim of a tensor is to be cut by.*Received: axes="):
            model.train_on_batch(x, y)


def test_axes_of_size_one_cut_nothing() -> None:
    topology = Topology.from_mesh(kdist.mesh(data=2, model=1, expert=2))
    cuts = [("one", (None, ("model", "expert"))), ("two", ("expert", None)), ("three", ("model",))]
    assert merged_axes(cuts, topology) == ()
    names = [relayout.mesh_dim_for(dims[-1], topology) for _, dims in cuts]
    assert names == ["expert", "unsharded", "unsharded"]
