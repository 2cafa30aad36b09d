"""The configuration that `kdist.parallelize` takes: a frozen dataclass, validated once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kdist.config.compression import CompressionConfig
from kdist.config.fusion import FusionConfig
from kdist.config.optimizer import OptimizerConfig
from kdist.config.pipeline import PipelineConfig
from kdist.config.recompute import RecomputeConfig
from kdist.config.unknown_fields import explains_fields
from kdist.config.whole_batch import GLOBAL
from kdist.sharding.axes import PIPE_NAME
from kdist.sharding.layout import read_layout_map
from kdist.sharding.mesh import Topology

import keras


@explains_fields
@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How a model is trained on many devices.

    Raises:
        ValueError: If a field is of another type or has a value that is not listed, and for
            everything that `Topology.from_mesh` and `read_layout_map` refuse. What depends on the
            model (patterns without a variable, shapes) is checked by `kdist.parallelize`.

    Example:
    ```python
    config = kdist.ParallelConfig(
        mesh=kdist.mesh(data=2, model=2),
        layout_map={".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)},
    )
    print(config)
    ```
    """

    mesh: keras.distribution.DeviceMesh
    """The devices and their axes: `data` (or `batch`) for replicas, any other axis to cut tensors.
    See `kdist.mesh`."""

    layout_map: Mapping[str, Any] | None = None
    """Regex of a variable's path to its layout: a dict of tuples such as `(None, "model")` or
    `keras.distribution.TensorLayout`s, or a `keras.distribution.LayoutMap`. None: every weight
    that no `kdist.shard` declares is whole on every device."""

    indivisible: Literal["error", "replicate"] = "error"
    """What becomes of a weight that the layout map or `kdist.shard` cuts along a dim that does not
    divide, such as the one key head of a multi-query model. `"replicate"`: that dim is whole on
    every device, and the plan says so."""

    enable_alltoall: bool = False
    """Whether a re-layout that moves a cut from one dim of a tensor to another may use the
    all-to-all collective. Otherwise the tensor is made whole and cut again."""

    sequence_parallel: bool = False
    """Whether tensors between layers that are cut over an inner axis are cut along dim 1, the
    sequence: what ends in a sum over the axis is scattered, and what a kernel cut by columns takes
    is gathered, so that norms, dropout and sums in between are of a part of the tokens on each
    device, and so is what is kept of them for the backward pass (Korthikanti et al. 2022). Of
    `Dense`, `EinsumDense` and `Embedding` layers, which all layers of Keras and KerasHub are made
    of, unless the layout map or `kdist.shard` lays out what they take or give, or cuts a kernel in
    two dims."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer parallelism (ZeRO levels). A `kdist.ShardedOptimizer` given to `compile` says the
    same for its model."""

    fusion: FusionConfig = FusionConfig()
    """Which gradients, their new values, and parameters that level 3 gathers travel together, when
    they leave, and which way sums go between processes."""

    compression: CompressionConfig | None = None
    """How gradients travel over the data axis: cast to 16 bits, or as low-rank factors, variable by
    variable. None: as they are."""

    pipeline: PipelineConfig | None = None
    """How the model is cut into stages over the mesh's `pipe` axis, and in which order they work.
    Goes with that axis: both or neither."""

    recompute: RecomputeConfig | None = None
    """Which layers run again in the backward pass, so that their activations need not be kept.
    None: those alone that `kdist.recompute` was called for."""

    batch_semantics: Literal["replica", "global"] = "replica"
    """What a layer sees in which rows of the batch meet. `"replica"`: its replica's rows, as on any
    data-parallel system: a contrastive loss has the negatives of its replica alone, a
    `BatchNormalization` normalises by the statistics of its replica's rows. `"global"`: all rows,
    as on one device; `BatchNormalization` too, whatever its `synchronized`. The data axis is then
    inside DTensor for the forward and backward pass, as an inner axis that cuts the batch;
    optimizer levels, fusion and compression are what they are with `"replica"`. A pipeline has one
    micro-batch; tables on the host or split by hand, and `loss_from_layers="sum"`, are refused. A
    batch that the axis does not divide is computed whole on every device. See
    docs/batch_semantics.md."""

    loss_from_layers: Literal["mean", "sum"] = "mean"
    """How values that layers give to `add_loss` are combined over replicas. `"mean"`: weighted by
    each replica's number of examples, right for values that are means over examples, which
    includes Keras's activity regularizers. `"sum"`: added, right for sums over examples. A layer
    that gives tensors with an entry for each example alone, which Keras adds up, adds in both."""

    verify: Literal["first_step"] | None = None
    """`"first_step"`: the first training batch is compared with one device before any update, and
    training is refused with a `kdist.VerificationError` where they differ. See `kdist.verify`."""

    def __post_init__(self) -> None:
        topology = self.topology
        read_layout_map(self.layout_map, topology)
        if isinstance(self.layout_map, dict):
            # The user's dict may change later, unchecked.
            object.__setattr__(self, "layout_map", dict(self.layout_map))
        if self.indivisible not in ("error", "replicate"):
            raise ValueError(
                "indivisible is 'error', or 'replicate' (a dim that does not divide is whole on "
                f"every device). Received: indivisible={self.indivisible!r}"
            )
        for switch in ("enable_alltoall", "sequence_parallel"):
            value = getattr(self, switch)
            if not isinstance(value, bool):
                raise ValueError(f"{switch} is True or False. Received: {switch}={value!r}")
        if not isinstance(self.optimizer, OptimizerConfig):
            raise ValueError(
                "optimizer is a kdist.OptimizerConfig(level=...). "
                f"Received: optimizer={self.optimizer!r}"
            )
        if not isinstance(self.fusion, FusionConfig):
            raise ValueError(
                f"fusion is a kdist.FusionConfig(mode=...). Received: fusion={self.fusion!r}"
            )
        if not isinstance(self.compression, CompressionConfig | None):
            raise ValueError(
                "compression is a kdist.CompressionConfig(patterns=..., rest=...), or None. "
                f"Received: compression={self.compression!r}"
            )
        if not isinstance(self.recompute, RecomputeConfig | None):
            raise ValueError(
                "recompute is a kdist.RecomputeConfig(layers=[...], policy=...), or None. "
                f"Received: recompute={self.recompute!r}"
            )
        self._check_pipeline(topology)
        if self.loss_from_layers not in ("mean", "sum"):
            raise ValueError(
                "loss_from_layers is 'mean' (values that layers give to add_loss are means over "
                "examples) or 'sum' (they are sums). "
                f"Received: loss_from_layers={self.loss_from_layers!r}"
            )
        if self.verify not in (None, "first_step"):
            raise ValueError(
                "verify is 'first_step' (the first training batch is compared with one device) or "
                f"None. Received: verify={self.verify!r}"
            )
        self._check_batch_semantics()

    def _check_batch_semantics(self) -> None:
        if self.batch_semantics not in ("replica", "global"):
            raise ValueError(
                "batch_semantics is 'replica' (layers see their replica's rows) or 'global' (they "
                f"see the whole batch). Received: batch_semantics={self.batch_semantics!r}"
            )
        if self.batch_semantics == "replica":
            return
        if self.loss_from_layers != "mean":
            raise ValueError(
                "With batch_semantics='global' add_loss gets values of the whole batch, which are "
                "not combined over replicas. Use batch_semantics='replica', or leave "
                "loss_from_layers out. "
                f"Received: loss_from_layers={self.loss_from_layers!r}"
            )
        GLOBAL.refuse(self.pipeline)

    def _check_pipeline(self, topology: Topology) -> None:
        if self.pipeline is not None and not isinstance(self.pipeline, PipelineConfig):
            raise ValueError(
                "pipeline is a kdist.PipelineConfig(micro_batches=...). "
                f"Received: pipeline={self.pipeline!r}"
            )
        if (self.pipeline is None) == (PIPE_NAME in topology.axis_names):
            raise ValueError(
                "The mesh axis 'pipe' and pipeline=kdist.PipelineConfig(micro_batches=...) go "
                "together. Add what is missing, as in kdist.mesh(pipe=2, data=4), or drop both. "
                f"Received: mesh {topology.describe_axes()}, pipeline={self.pipeline}"
            )
        if self.pipeline is None:
            return
        self.pipeline.schedule_for(topology.num_stages)

    @property
    def topology(self) -> Topology:
        """The mesh as the engine sees it: replicas, inner axes, slices."""
        return Topology.from_mesh(self.mesh)

    def __str__(self) -> str:
        topology = self.topology
        patterns = read_layout_map(self.layout_map, topology)
        width = max(map(len, patterns), default=0)
        lines = ["ParallelConfig"]
        lines += [f"  {line}" for line in str(topology).splitlines()]
        lines.append(
            f"  layout_map: {len(patterns)} patterns" if patterns else "  layout_map: none"
        )
        lines += [f"    {pattern:<{width}}  {dims}" for pattern, dims in patterns.items()]
        lines.append(f"  indivisible: {self.indivisible}")
        lines.append(f"  enable_alltoall: {self.enable_alltoall}")
        if self.sequence_parallel:
            lines.append("  sequence_parallel: True")
        lines.append(f"  optimizer: {self.optimizer}")
        lines.append(f"  fusion: {self.fusion}")
        if self.compression is not None:
            lines += [f"  {line}" for line in str(self.compression).splitlines()]
        if self.pipeline is not None:
            lines.append(f"  pipeline: {self.pipeline}")
        if self.recompute is not None:
            lines.append(f"  recompute: {self.recompute}")
        lines.append(f"  batch_semantics: {self.batch_semantics}")
        lines.append(f"  loss_from_layers: {self.loss_from_layers}")
        if self.verify is not None:
            lines.append(f"  verify: {self.verify}")
        return "\n".join(lines)
