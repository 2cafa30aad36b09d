"""Which gradients travel together: fusion ids, and buckets by size or position. Pure.

Communication of many small tensors costs one latency each; of one bucket, one. Buckets are filled
in reverse parameter order, the order in which a backward pass makes gradients, so that the first
bucket travels while later ones are still computed. Ids and modes are those of MindSpore's
`comm_fusion`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from kdist.comm.algorithms import ALGORITHMS
from kdist.comm.cost import LinkCost
from kdist.config.settings import Setting
from kdist.config.unknown_fields import explains_fields

import keras

MODES = ("auto", "size", "index", "none")
WAYS = ("auto", *ALGORITHMS, "torus")
MAX_MB = 64
OVERLAPPING = 8
"""Buckets that `mode="auto"` aims at: the last one, which nothing hides, is an eighth of all."""

IN_PROCESS = LinkCost(a=50e-6, b=2e-10)
"""A message in one process: its operations cost, and one device reads what another wrote."""
COPY = 1e-10
"""Seconds to copy a byte, as packing a bucket does, and unpacking it."""

comm_fusion: Setting[int] = Setting("kdist.set_comm_fusion")
"""What `set_comm_fusion` said."""


@explains_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """How gradients, and the new values that they lead to, are fused into buckets.

    So are parameters that level 3 gathers for one chunk of the model; embedding tables are not. Ids
    given with `kdist.set_comm_fusion` go before modes.

    Raises:
        ValueError: For a value that is not listed.

    Example:
    ```python
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=8), fusion=kdist.FusionConfig(mode="size", size_mb=4)
    )
    ```
    """

    mode: Literal["auto", "size", "index", "none"] = "auto"
    """`"auto"`: sizes from the cost model: a parameter whose packing would take longer than a
    message of its own travels alone; others fill buckets of an eighth of all, so that several
    overlap the backward pass, 64 MB at most. `"size"`: buckets of `size_mb`. `"index"`: buckets end
    at the positions of `index`. `"none"`: no fusion."""

    size_mb: float = MAX_MB
    """Bytes of a bucket in MB (1024 * 1024), for `mode="size"`."""

    index: tuple[int, ...] = ()
    """For `mode="index"`: positions, counted in reverse parameter order, at which a bucket ends and
    the next one begins: `(2, 5)` puts the last two parameters together, then the next three, then
    the rest."""

    link: LinkCost | None = None
    """For `mode="auto"`: what a message between replicas costs, as `kdist.comm.calibrate` measures
    it; by default that of devices in one process."""

    overlap: bool = True
    """Whether buckets leave while the backward pass goes on. It runs in chunks for that, and a
    bucket is reduced as soon as the chunks that make its gradients are done. False: at levels 0 and
    1 gradients are exchanged when the backward pass has ended; from level 2 on, chunks free memory
    as well, and a pipeline's buckets leave stage by stage anyway. What XLA compiles
    (`jit_compile=True`) stays whole at levels 0 and 1, and gradients come when it has ended."""

    algorithm: str = "auto"
    """How sums of gradients, and new values, go between processes, each of which adds up what its
    devices have first: one of `kdist.comm`'s algorithms, `"direct"`, `"ring"`, `"tree"`,
    `"halving"`, `"hypercube"`; or `"torus"`, a ring of pieces between all devices of a process and
    those of the next. `"auto"`: the one with which the cost model predicts that all buckets arrive
    soonest, with `link` as the cost of a message between processes (default:
    `kdist.comm.cost.DEFAULT_LINK`). Rows of tables, compressed gradients, what the host updates or
    an optimizer must see whole, and the parameters that level 3 gathers go directly, as does what
    has fewer elements than an algorithm cuts it into."""

    def __post_init__(self) -> None:
        if self.algorithm not in WAYS:
            raise ValueError(
                f"algorithm is one of {WAYS}; TensorFlow's own all-reduce is not among them, since "
                "one program runs all processes. "
                f"Received: algorithm={self.algorithm!r}"
            )
        if self.mode not in MODES:
            raise ValueError(f"mode is one of {MODES}. Received: mode={self.mode!r}")
        if not isinstance(self.overlap, bool):
            raise ValueError(f"overlap is True or False. Received: overlap={self.overlap!r}")
        number = isinstance(self.size_mb, int | float) and not isinstance(self.size_mb, bool)
        if not number or not self.size_mb > 0:
            raise ValueError(f"size_mb is a positive number. Received: size_mb={self.size_mb!r}")
        if self.size_mb != MAX_MB and self.mode != "size":
            raise ValueError(
                "size_mb is for mode='size'. "
                f"Received: size_mb={self.size_mb!r}, mode={self.mode!r}"
            )
        if self.link is not None and (self.mode != "auto" or not isinstance(self.link, LinkCost)):
            raise ValueError(
                "link is a kdist.comm.LinkCost, for mode='auto'. "
                f"Received: link={self.link!r}, mode={self.mode!r}"
            )
        index = tuple(self.index) if isinstance(self.index, Iterable) else (None,)
        rising = all(isinstance(i, int) for i in index) and list(index) == sorted(set(index))
        if not rising or any(i <= 0 for i in index):
            raise ValueError(
                f"index has positive positions in rising order. Received: index={self.index!r}"
            )
        if bool(index) != (self.mode == "index"):
            raise ValueError(
                "index and mode='index' go together. "
                f"Received: index={self.index!r}, mode={self.mode!r}"
            )
        object.__setattr__(self, "index", index)

    def __str__(self) -> str:
        how: str = self.mode
        if self.mode == "size":
            how = f"buckets of {self.size_mb:g} MB"
        elif self.mode == "index":
            how = f"buckets end at {self.index}"
        elif self.link is not None:
            how = f"{self.mode}, messages of {self.link.a:g} s + {self.link.b:g} s per byte"
        how = how if self.algorithm == "auto" else f"{how}, by {self.algorithm} between processes"
        return how if self.overlap else f"{how}, exchanged after the backward pass"


@dataclasses.dataclass(frozen=True)
class Item:
    """One parameter's part in the communication.

    Attributes:
        nbytes: Bytes that it adds to a bucket.
        kind: Only items of one kind can share a bucket: operation, dtype, holders.
        group: Its fusion id; None without one.
    """

    nbytes: int
    kind: Any
    group: int | None = None


def assign_buckets(items: Sequence[Item], config: FusionConfig) -> list[int]:
    """Puts items into buckets.

    Args:
        items: In parameter order.
        config: The mode.

    Returns:
        The number of each item's bucket. Buckets are numbered in the order in which their
        communication can start.

    Raises:
        ValueError: A position of `index` is past the last parameter.
    """
    if config.index and config.index[-1] >= len(items):
        raise ValueError(
            f"index has positions below {len(items)}, the number of parameters. "
            f"Received: index={config.index}"
        )
    size = bucket_size([i.nbytes for i in items], config)
    largest = {"auto": largest_fused(config), "none": 0.0}.get(config.mode, math.inf)
    keys: list[Any] = [None] * len(items)
    filled: dict[Any, tuple[int, float]] = {}
    for position, i in enumerate(reversed(range(len(items)))):
        item = items[i]
        if item.group is not None:
            keys[i] = ("alone", i) if item.group == 0 else ("id", item.group, item.kind)
        elif item.nbytes > largest:
            keys[i] = ("alone", i)
        elif config.mode == "index":
            keys[i] = ("index", sum(end <= position for end in config.index), item.kind)
        else:
            number, used = filled.get(item.kind, (0, 0.0))
            if used and used + item.nbytes > size:
                number, used = number + 1, 0.0
            filled[item.kind] = (number, used + item.nbytes)
            keys[i] = ("size", number, item.kind)
    # A bucket can leave when its last gradient is there, which is its first parameter's.
    ready: dict[Any, int] = {}
    for i, key in enumerate(keys):
        ready.setdefault(key, i)
    order = {key: n for n, key in enumerate(sorted(ready, key=lambda key: -ready[key]))}
    return [order[key] for key in keys]


def bucket_size(sizes: Sequence[int], config: FusionConfig) -> float:
    """Bytes of a bucket under a mode.

    `"auto"`: an eighth of all, so that several overlap the backward pass; but as large as a message
    whose bytes take as long as its start, if that is more; and 64 MB at most.
    """
    if config.mode == "size":
        return config.size_mb * 2**20
    link = config.link or IN_PROCESS
    least = link.a / link.b if link.b else math.inf
    return min(max(sum(sizes) / OVERLAPPING, min(least, sum(sizes) / 2)), MAX_MB * 2**20)


def largest_fused(config: FusionConfig) -> float:
    """Bytes above which `"auto"` leaves a parameter alone: copying it costs a message."""
    return (config.link or IN_PROCESS).a / (2 * COPY)


def set_comm_fusion(target: Any, group: int) -> Any:
    """Gives the parameters of a layer, and of all layers inside, a fusion id.

    Gradients with the same id, dtype and operation travel in one collective; those with id 0 are
    never fused. The same idea is MindSpore's `Cell.set_comm_fusion`. Takes effect with the next
    `compile`; of several calls that reach a parameter the last one counts.

    Args:
        target: A layer, a model, or a `keras.Variable`.
        group: The id, 0 or more.

    Returns:
        The target.

    Raises:
        ValueError: For another target or id.

    Example:
        >>> for number, layer in enumerate(model.layers):
        ...     kdist.set_comm_fusion(layer, 1 + number // 2)  # two layers' gradients at a time
        >>> model.compile("adam", "mse")
    """
    if isinstance(group, bool) or not isinstance(group, int) or group < 0:
        raise ValueError(f"A fusion id is an integer from 0 on. Received: {group!r}")
    comm_fusion.set(target, group)
    return target


def get_comm_fusion(variable: keras.Variable) -> int | None:
    """The fusion id of a parameter, None if it has none.

    Args:
        variable: A parameter.

    Example:
        >>> layer = kdist.set_comm_fusion(model.get_layer("up"), 3)
        >>> kdist.get_comm_fusion(layer.kernel)
        3
    """
    return comm_fusion.of([variable])[0]
