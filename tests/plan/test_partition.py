"""Which parameters optimizer parallelism spreads, how, and where they then live."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from kdist.config.optimizer import OptimizerConfig
from kdist.plan.partition import decide, spread
from kdist.sharding.layout import WeightLayout
from kdist.sharding.mesh import Topology, mesh
from kdist.sharding.placement import Placement, place

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st


def topology(**axes: int) -> Topology:
    return Topology.from_mesh(mesh(**axes))


def placed(topo: Topology, *shapes: Sequence[int], dims: Any = None) -> list[Placement]:
    return [
        place(f"w{i}", shape, 4, WeightLayout(dims or (None,) * len(shape)), topo)
        for i, shape in enumerate(shapes)
    ]


def how(topo: Topology, shape: Sequence[int], *, whole: bool = False, wanted: Any = None, **config):
    (decision,) = decide(placed(topo, shape), [whole], [wanted], OptimizerConfig(**config), topo)
    return decision.how


@pytest.mark.parametrize(
    ("size", "expected"), [(65_532, "whole"), (65_536, "slice"), (65_540, "slice")]
)
def test_exactly_at_the_threshold_a_parameter_is_cut(size: int, expected: str) -> None:
    topo = topology(data=2)
    half = place("w", (size // 2,), 2, WeightLayout((None,)), topo)
    (decision,) = decide([half], [False], [None], OptimizerConfig(level=1), topo)
    assert decision.how == expected


def test_the_threshold_counts_bytes_of_the_whole_shape() -> None:
    topo = topology(data=2, model=2)
    cut = placed(topo, (16, 1024), dims=(None, "model"))
    (decision,) = decide(cut, [False], [None], OptimizerConfig(level=1), topo)
    assert cut[0].nbytes == 65_536
    assert decision.how == "slice"


def test_opt_out_and_opt_in() -> None:
    topo = topology(data=2)
    assert how(topo, (1024, 1024), level=1, wanted=False) == "whole"
    assert how(topo, (4,), level=1, wanted=True) == "slice"
    assert how(topo, (5,), level=1, wanted=True) == "parameter"
    assert how(topo, (5,), level=1, wanted=True, partition="slice") == "whole"
    assert how(topo, (), level=1, wanted=True) == "whole"


def test_the_optimizer_decides_what_auto_means() -> None:
    topo = topology(data=2)
    assert how(topo, (64, 64), level=1, threshold_kb=0) == "slice"
    assert how(topo, (64, 64), level=1, threshold_kb=0, whole=True) == "parameter"
    assert how(topo, (64, 64), level=1, threshold_kb=0, partition="parameter") == "parameter"
    with pytest.raises(ValueError, match=r"Received: parameter 'w0'"):
        how(topo, (64, 64), level=1, threshold_kb=0, whole=True, partition="slice")


def test_divisibility_is_judged_on_what_the_layout_leaves() -> None:
    topo = topology(data=2, model=2)
    config = OptimizerConfig(level=1, threshold_kb=0)
    cut = placed(topo, (6, 3), (6, 4), (8, 4), dims=("model", None))
    found = decide(cut, [False] * 3, [None] * 3, config, topo)
    assert [(d.how, d.dim) for d in found] == [("parameter", 0), ("slice", 1), ("slice", 0)]
    assert found[0].reason == "no dim of (3, 3) divides by 2 replicas"


def test_what_does_not_divide_is_dealt_out() -> None:
    topo = topology(data=3)
    config = OptimizerConfig(level=3, threshold_kb=0)
    weights = placed(topo, *[(8, 8)] * 4, (4, 4), (4, 4))
    found = spread(weights, [False] * 6, [None] * 6, config, topo)
    assert {d.how for d in found.decisions} == {"parameter"}
    stored = [sum(p.stored_bytes((s, 0)) for p in found.placements) for s in range(3)]
    size = placed(topo, (8, 8))[0].nbytes
    assert sorted(stored) == [5 * size // 4, 5 * size // 4, 2 * size]


@pytest.mark.parametrize("level", [1, 3])
def test_the_first_dim_that_divides_is_cut(level: int) -> None:
    topo = topology(data=4)
    config = OptimizerConfig(level=level, threshold_kb=0, partition="slice")
    shapes = [(3, 3, 8, 16), (8, 3), (3, 5, 12)]
    weights = [one for shape in shapes for one in placed(topo, shape)]
    found = spread(weights, [False] * 3, [None] * 3, config, topo)
    assert [d.dim for d in found.decisions] == [2, 0, 2]
    for v, (shape, dim) in enumerate(zip(shapes, (2, 0, 2), strict=True)):
        units = [unit for unit in found.units if unit.variable == v]
        boxes = [unit.index(found.placements[v]) for unit in units]
        assert len({unit.owner for unit in units}) == len(units) == 4
        assert [box[dim] for box in boxes] == [
            slice(n * shape[dim] // 4, (n + 1) * shape[dim] // 4) for n in range(4)
        ]
        assert all(box[i] == slice(0, n) for box in boxes for i, n in enumerate(shape) if i != dim)
        stored = {found.placements[v].stored_bytes((s, 0)) for s in range(4)}
        assert stored == {weights[v].nbytes // (4 if level == 3 else 1)}


def test_a_weight_cut_over_data_by_its_layout_stays() -> None:
    topo = topology(data=2)
    config = OptimizerConfig(level=3, threshold_kb=0)
    (decision,) = decide(placed(topo, (8, 4), dims=(None, "data")), [False], [None], config, topo)
    assert decision.how == "whole"
    assert "layout" in decision.reason


@given(
    data=st.sampled_from([1, 2, 4]),
    model=st.sampled_from([1, 2]),
    level=st.sampled_from([1, 2, 3]),
    shapes=st.lists(
        st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), max_size=3).map(tuple), min_size=1, max_size=6
    ),
    flags=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_every_element_is_updated_once_where_it_is_stored(
    data: int, model: int, level: int, shapes: Any, flags: Any
) -> None:
    topo = topology(data=data, model=model)
    config = OptimizerConfig(level=level, threshold_kb=0)
    whole = flags[: len(shapes)]
    result = spread(placed(topo, *shapes), whole, [None] * len(shapes), config, topo)
    for v, placement in enumerate(result.placements):
        units = [u for u in result.units if u.variable == v]
        updates = np.zeros(placement.shape, int)
        for unit in units:
            index = unit.index(placement)
            assert unit.nbytes(placement) == 4 * math.prod(i.stop - i.start for i in index)
            updates[index] += 1
            assert unit.shard is None or unit.owner in placement.shards[unit.shard].holders
        assert (updates == 1).all()
        stored = sum(
            placement.stored_bytes((s, k)) for s in range(data) for k in range(topo.inner_size)
        )
        copies = stored / placement.nbytes
        spread_out = level == 3 and result.decisions[v].how != "whole"
        assert copies == topo.inner_size * (1 if spread_out else data)


@given(level=st.sampled_from([1, 2, 3]), count=st.integers(1, 9))
def test_dealt_parameters_are_balanced(level: int, count: int) -> None:
    topo = topology(data=4)
    config = OptimizerConfig(level=level, threshold_kb=0, partition="parameter")
    shapes = [(8, 8)] * count
    result = spread(placed(topo, *shapes), [True] * count, [None] * count, config, topo)
    load = [0] * 4
    for unit in result.units:
        load[unit.owner[0]] += 1
    assert max(load) - min(load) <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": 4}, "level is 0, 1, 2 or 3. Received: level=4"),
        ({"level": True}, "Received: level=True"),
        ({"level": 1.0}, "Received: level=1.0"),
        ({"level": 1, "threshold_kb": -1}, "Received: threshold_kb=-1"),
        ({"level": 1, "threshold_kb": "64"}, "Received: threshold_kb='64'"),
        ({"level": 1, "partition": "rows"}, "Received: partition='rows'"),
        ({"level": 1, "keep_gathered": True}, "Only level 3"),
        ({"gradient_accumulation_shard": True}, "from level 1 on"),
        ({"partition": "slice"}, "Level 0 cuts nothing"),
        ({"level": 1, "gradient_accumulation_shard": 1}, "is True or False"),
    ],
)
def test_wrong_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**options)


def test_settings_print_readably() -> None:
    assert str(OptimizerConfig()) == "level 0 (off)"
    text = str(OptimizerConfig(level=3, keep_gathered=True, gradient_accumulation_shard=True))
    assert text == (
        "level 3, threshold 64 KB, partition auto, gathered parameters kept, "
        "accumulated gradients sharded"
    )


def decided(topo: Topology, shapes: Sequence[Any], keys: Any = None, **options: Any) -> list[str]:
    config = OptimizerConfig(**{"level": 3, "threshold_kb": 0, **options})
    count = len(shapes)
    fuse = (lambda placed: keys) if keys else (lambda placed: list(range(count)))
    tables = frozenset({0}) if options.get("level") == 1 else frozenset()
    found = spread(
        placed(topo, *shapes), [False] * count, [None] * count, config, topo, fuse, apart=tables
    )
    return [d.how[0] for d in found.decisions]


def test_of_parameters_of_equal_size_as_many_as_divide_are_dealt_out() -> None:
    topo = topology(data=2)
    assert decided(topo, [(8, 4)] * 5) == list("pppps")
    assert decided(topo, [(8, 4), (8, 2), (4, 8), (8, 2), (8, 4)]) == list("pppps")
    assert decided(topo, [(8, 4)] * 2, level=2) == list("pp")


def test_what_shares_a_bucket_and_tables_are_cut() -> None:
    topo = topology(data=2)
    assert decided(topo, [(8, 4)] * 4, keys=["a", "a", "b", "c"]) == list("sspp")
    assert decided(topo, [(8, 4)] * 3, level=1) == list("spp")
    assert decided(topo, [(8, 4)] * 2, partition="slice") == list("ss")


def test_devices_with_memory_of_their_own_receive_no_whole_gradients_from_level_2_on() -> None:
    topo = topology(data=2)
    slices = tuple(
        dataclasses.replace(one, devices=(f"/device:GPU:{n}",)) for n, one in enumerate(topo.slices)
    )
    gpus = dataclasses.replace(topo, slices=slices)
    assert topo.shares_memory and not gpus.shares_memory
    for level, how in ((1, "p"), (2, "s"), (3, "s")):
        found = spread(
            placed(topo, *[(8, 4)] * 4),
            [False] * 4,
            [None] * 4,
            OptimizerConfig(level=level, threshold_kb=0),
            gpus,
        )
        assert {d.how[0] for d in found.decisions} == {how}


@given(
    data=st.sampled_from([1, 2, 4]),
    level=st.sampled_from([1, 2, 3]),
    shapes=st.lists(st.sampled_from([(4, 4), (8, 2), (8, 8), (4,)]), min_size=1, max_size=12),
)
def test_state_is_spread_evenly_whatever_is_dealt_out(data: int, level: int, shapes: Any) -> None:
    topo = topology(data=data)
    config = OptimizerConfig(level=level, threshold_kb=0)
    found = spread(placed(topo, *shapes), [False] * len(shapes), [None] * len(shapes), config, topo)
    load = [0] * data
    for unit in found.units:
        load[unit.owner[0]] += unit.nbytes(found.placements[unit.variable])
    assert len(set(load)) == 1


def test_state_is_spread_evenly_where_each_of_two_optimizers_has_some() -> None:
    """One keeps moments, the other none: alike in turn, one device would get all moments."""
    topo = topology(data=2)
    config = OptimizerConfig(level=1, threshold_kb=0)
    shapes, kinds = [(8, 4)] * 4, [0, 1, 0, 1]
    found = spread(placed(topo, *shapes), [False] * 4, [None] * 4, config, topo, kinds=kinds)
    owners = {kind: {u.owner for u in found.units if kinds[u.variable] == kind} for kind in (0, 1)}
    assert {len(one) for one in owners.values()} == {2}
