"""Which parameter is cut over the data axis, which is dealt out, which stays whole, and why.

Pure: placements and flags in, decisions out.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

from kdist.config.compression import Compressor
from kdist.config.fusion import FusionConfig
from kdist.config.optimizer import OptimizerConfig
from kdist.plan.bucket import Bucket, make_buckets
from kdist.plan.exchange import (
    Exchange,
    check_replicas,
    is_low_rank,
    make_exchanges,
    on_every_slice,
)
from kdist.plan.routes import routed
from kdist.sharding.dims import axes_of
from kdist.sharding.layout import WeightLayout
from kdist.sharding.mesh import HOST, Topology
from kdist.sharding.owners import UpdateUnit, assign_owners
from kdist.sharding.placement import Placement, place

How = Literal["slice", "parameter", "whole"]
Fuse = Callable[[Sequence[Placement]], Sequence[Hashable | None]]
"""Where parameters are stored -> the key of each one's bucket, None to keep it out."""


def alone(placements: Sequence[Placement]) -> list[Hashable | None]:
    """Every parameter travels alone."""
    return list(range(len(placements)))


@dataclasses.dataclass(frozen=True)
class Decision:
    """What optimizer parallelism does with one parameter.

    Attributes:
        path: Keras path of the parameter.
        how: "slice": a dim is cut over the replicas; "parameter": one replica has all of it;
            "whole": not spread (still, one replica updates it).
        reason: Why.
        dim: Which dim a "slice" is of.
    """

    path: str
    how: How
    reason: str
    dim: int = 0


def decide(
    placements: Sequence[Placement],
    whole: Sequence[bool],
    wanted: Sequence[bool | None],
    config: OptimizerConfig,
    topology: Topology,
) -> tuple[Decision, ...]:
    """Decides for every trainable parameter.

    Args:
        placements: As the layouts alone would place them.
        whole: Per parameter, whether its update must see the whole tensor.
        wanted: Per parameter, what `kdist.set_parallel_optimizer` said; None if nothing.
        config: The settings.
        topology: The mesh.

    Raises:
        ValueError: `partition="slice"`, and an update must see the whole tensor.
    """
    return tuple(
        _decide_one(p, w, asked, config, topology) for p, w, asked in zip(placements, whole, wanted)
    )


def _decide_one(
    placement: Placement,
    whole: bool,
    wanted: bool | None,
    config: OptimizerConfig,
    topology: Topology,
) -> Decision:
    def stays(reason: str) -> Decision:
        return Decision(placement.path, "whole", reason)

    if placement.on_host:
        return stays("it is on the host")
    if placement.split is not None:
        return stays(f"it is split over {placement.split.axis!r} by hand")
    if config.level == 0:
        return stays("level 0")
    if config.state_on == "host" and config.level < 3:
        return stays("its state is on the host")
    if wanted is False:
        return stays("set_parallel_optimizer(..., False)")
    if placement.data_dim is not None:
        return stays("its layout cuts it over the data axis already")
    if topology.data_size == 1:
        return stays("there is one replica")
    if placement.nbytes < config.threshold_bytes and not wanted:
        return stays(f"{placement.nbytes} bytes, below {config.threshold_bytes:g}")
    one = Decision(placement.path, "parameter", "its update sees the whole tensor")
    if whole:
        if config.partition == "slice":
            raise ValueError(
                "partition='slice' is for optimizers whose update of an element looks at that "
                "element alone (no Lamb, Muon, Adafactor, clipnorm, constraint). Use "
                f"partition='auto' or 'parameter'. Received: parameter {placement.path!r}, whose "
                "update sees the whole tensor"
            )
        return one
    if config.partition == "parameter":
        return dataclasses.replace(one, reason="partition='parameter'")
    shape = [s.stop - s.start for s in placement.shards[0].index]
    replicas = topology.data_size
    for dim, size in enumerate(shape):
        if size % replicas == 0:
            return Decision(placement.path, "slice", f"dim {dim} over {replicas} replicas", dim)
    if not shape:
        return stays("it is a scalar")
    reason = f"no dim of {tuple(shape)} divides by {replicas} replicas"
    return stays(reason) if config.partition == "slice" else dataclasses.replace(one, reason=reason)


def residents(
    placements: Sequence[Placement],
    decisions: Sequence[Decision],
    topology: Topology,
    kinds: Sequence[int] = (),
) -> list[int | None]:
    """Which slice alone stores each parameter that is dealt out whole at level 3.

    Biggest first, to the least loaded slice (longest-processing-time rule, Graham 1969).
    """
    load = [0] * len(topology.slices)
    kinds = kinds or [0] * len(placements)
    where: list[int | None] = [None] * len(placements)
    dealt = [i for i, d in enumerate(decisions) if d.how == "parameter"]
    for i in sorted(dealt, key=lambda i: (-placements[i].nbytes, kinds[i], i)):
        slice_number = min(placements[i].home, key=lambda s: (load[s], s))
        load[slice_number] += placements[i].nbytes
        where[i] = slice_number
    return where


def deal_alike(
    decisions: Sequence[Decision],
    placements: Sequence[Placement],
    keys: Sequence[Hashable | None],
    apart: frozenset[int],
    kinds: Sequence[int] = (),
) -> tuple[Decision, ...]:
    """Deals out whole what would be cut, where every replica gets as much either way.

    Of m parameters of equal size, such as those of a model's blocks, the N devices that have one
    get m // N each, in turn; the m % N last ones stay cut. A whole parameter is one sum, one update
    and one message to each holder, N times fewer than its rows on N replicas are: graphs are
    traced, prepared and run sooner.

    Args:
        decisions: See `decide`.
        placements: As the layouts alone would place them.
        keys: Parameters with the same key travel together; they stay as they are.
        apart: See `spread`; they stay as they are.
        kinds: See `spread`.
    """
    kinds = kinds or [0] * len(placements)
    company = collections.Counter(key for key in keys if key is not None)
    alike: dict[Hashable, list[int]] = {}
    for i, (one, decision, key) in enumerate(zip(placements, decisions, keys)):
        if decision.how == "slice" and i not in apart and (key is None or company[key] == 1):
            sizes = tuple(math.prod(shard.shape) for shard in one.shards)
            alike.setdefault((sizes, one.itemsize, one.groups, one.home, kinds[i]), []).append(i)
    found = list(decisions)
    for members in alike.values():
        # Several devices of a replica may have the same part, of which one updates it.
        devices = len(placements[members[0]].shards[0].holders)
        for i in members[: len(members) // devices * devices]:
            reason = f"one of {len(members)} of equal size, for {devices} devices that have them"
            found[i] = dataclasses.replace(decisions[i], how="parameter", reason=reason)
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Spread:
    """How optimizer parallelism places and updates the trainable parameters.

    Attributes:
        config: The settings.
        decisions: One per parameter.
        placements: Where each parameter is stored.
        units: Who updates which part.
        keys: Parameters with the same key travel together where they can; None: alone.
        buckets: What travels together.
        exchanges: What travels compressed.
    """

    config: OptimizerConfig
    decisions: tuple[Decision, ...]
    placements: tuple[Placement, ...]
    units: tuple[UpdateUnit, ...]
    keys: tuple[Hashable | None, ...]
    buckets: tuple[Bucket, ...]
    exchanges: tuple[Exchange, ...] = ()


def spread(
    placements: Sequence[Placement],
    whole: Sequence[bool],
    wanted: Sequence[bool | None],
    config: OptimizerConfig,
    topology: Topology,
    fuse: Fuse = alone,
    compressors: Sequence[Compressor] | None = None,
    fusion: FusionConfig | None = None,
    apart: frozenset[int] = frozenset(),
    kinds: Sequence[int] = (),
) -> Spread:
    """Decides, then places (at level 3 parameters are stored cut, or by one slice) and deals.

    Args:
        placements: See `decide`.
        whole: See `decide`.
        wanted: See `decide`.
        config: See `decide`.
        topology: See `decide`.
        fuse: Gives the key of each parameter's bucket.
        compressors: How each gradient travels over the data axis; None for all as they are. What
            travels compressed and is not spread is updated by every slice, which then has nothing
            to send.
        fusion: How sums and new values go between processes.
        apart: Positions of parameters whose gradients are not summed as vectors are: rows, maxima.
        kinds: Per parameter, the number of the optimizer that updates it: state is as large for
            parameters of equal size and kind. None given: all are of one kind.

    Raises:
        ValueError: For what `decide`, `check_replicas` or `routed` refuses.
    """
    decisions = decide(placements, whole, wanted, config, topology)
    placed = _stored(placements, decisions, config, topology, kinds)
    if _may_deal(config, topology):
        decisions = deal_alike(decisions, placements, fuse(placed), apart, kinds)
        placed = _stored(placements, decisions, config, topology, kinds)
    cut = [d.dim if d.how == "slice" and config.level < 3 else None for d in decisions]
    keys = tuple(fuse(placed))
    # What is spread to save memory is dealt evenly; only what is not may gather on one owner.
    together = [key if d.how == "whole" else None for key, d in zip(keys, decisions)]
    units = assign_owners(placed, whole, topology, cut, together, kinds)
    if config.state_on == "host":
        units = _on_host(placed, compressors)
    compressors = ["none"] * len(placed) if compressors is None else list(compressors)
    check_replicas(placed, compressors)
    every = [d.how == "whole" and c != "none" for d, c in zip(decisions, compressors)]
    near = config.state_on == "device"
    every = [e and near and p.data_dim is None for e, p in zip(every, placed)]
    units = on_every_slice(units, every, placed)
    buckets = tuple(make_buckets(units, placed, keys, whole))
    if fusion is not None:
        direct = apart | {v for v, how in enumerate(compressors) if how != "none"}
        units = routed(units, buckets, placed, topology, fusion, direct)
        buckets = tuple(make_buckets(units, placed, keys, whole))
    exchanges = make_exchanges(units, placed, compressors, keys, buckets)
    return Spread(config, decisions, tuple(placed), units, keys, buckets, exchanges)


def _may_deal(config: OptimizerConfig, topology: Topology) -> bool:
    """Whether parameters that could be cut may be dealt out whole.

    Their owner receives N whole gradients to add up, where each of N owners of rows would receive
    one gradient's bytes. At level 1 that is as much in a step; from level 2 on, which sums chunk by
    chunk to save memory, only devices that read each other's memory do so.
    """
    if config.partition != "auto" or config.level == 0 or config.state_on == "host":
        return False
    return config.level == 1 or topology.shares_memory


def _stored(
    placements: Sequence[Placement],
    decisions: Sequence[Decision],
    config: OptimizerConfig,
    topology: Topology,
    kinds: Sequence[int],
) -> list[Placement]:
    """Where parameters are stored: at level 3 what is spread is cut, or one slice has it."""
    if config.level < 3:
        return list(placements)
    where = residents(placements, decisions, topology, kinds)
    placed = list(placements)
    for i, (placement, decision) in enumerate(zip(placements, decisions)):
        if decision.how == "slice":
            layout = _cut(placement.layout, decision.dim, topology)
            placed[i] = _again(placement, topology, layout)
        elif decision.how == "parameter":
            placed[i] = _again(placement, topology, placement.layout, where[i])
    return placed


def _on_host(
    placements: Sequence[Placement], compressors: Sequence[Compressor] | None
) -> tuple[UpdateUnit, ...]:
    """Every parameter is updated whole on the host, which has a copy unless it has the parameter.

    Raises:
        ValueError: A gradient travels as factors.
    """
    if wrong := [p.path for p, c in zip(placements, compressors or ()) if is_low_rank(c)]:
        raise ValueError(
            "PowerSGD makes its factors of sums that all replicas get back, and with "
            "state_on='host' gradients go to the host alone. Use 'bf16' or 'fp16', or leave "
            f"state_on='host' out. Received: state_on='host' with PowerSGD for {wrong[0]!r}"
        )
    return tuple(
        UpdateUnit(v, 0 if one.on_host else None, HOST) for v, one in enumerate(placements)
    )


def _cut(layout: WeightLayout, dim: int, topology: Topology) -> WeightLayout:
    """The layout with a dim cut over the data axis too, inside what other axes leave."""
    assert topology.data_axis is not None
    dims = [*layout.dims]
    dims[dim] = (*axes_of(dims[dim]), topology.data_axis)
    return WeightLayout(tuple(dims))


def _again(
    old: Placement, topology: Topology, layout: WeightLayout, resident: int | None = None
) -> Placement:
    return place(old.path, old.shape, old.itemsize, layout, topology, resident, old.groups)
