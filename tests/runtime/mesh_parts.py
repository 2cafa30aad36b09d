"""Meshes without devices, and hypothesis strategies that draw them, for tests of pure parts."""

from __future__ import annotations

import math

from kdist.sharding.mesh import Topology

import keras
from hypothesis import strategies as st

AXES = ("data", "model", "seq", "expert")


def device_mesh(**axes):
    names = [f"cpu:{i}" for i in range(math.prod(axes.values()))]
    return keras.distribution.DeviceMesh(tuple(axes.values()), list(axes), names)


def topology(**axes):
    made = device_mesh(**axes)
    return Topology.from_mesh(made, available=made.devices.flatten())


@st.composite
def meshes(draw):
    names = draw(st.permutations(AXES))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    return topology(**dict(zip(names, sizes, strict=False)))


@st.composite
def layouts(draw, axes):
    """Draws dims in which each of `axes` stands once at most."""
    rank = draw(st.integers(0, 4))
    groups = [[] for _ in range(rank)]
    for axis in draw(st.permutations(axes)):
        place = draw(st.integers(-1, rank - 1))
        if place >= 0:
            groups[place].append(axis)
    return tuple((None, *g)[-1] if len(g) < 2 else tuple(g) for g in groups)
