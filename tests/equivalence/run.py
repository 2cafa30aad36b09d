"""What two trainings of a comparison share, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from .case import Case, Layout
from .features import Feature

REPLICA_AXES = ("data", "batch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that two runs of a comparison share.

    Attributes:
        case: The model and its data.
        mesh_axes: Mesh axis -> size, for engines that have a mesh.
        optimizer: Makes an optimizer; features' options are passed by keyword.
        batch_size: Examples per global batch; the last batch of an epoch may be smaller.
        samples: Examples of the data set.
        epochs: Passes over the data.
        features: What else changes the loss, the gradient or the update.
        dtype: "float64", "float32" or a mixed policy.
        layout_map: Pattern -> axes, or a function from the mesh to a Keras `LayoutMap`; None takes
            the case's, where the mesh has a `model` axis.
        config: Further options of `kdist.ParallelConfig`.
        declare: Declares layouts on the built model with `kdist.shard`; kdist's run alone.
        compile: Options of `compile` for kdist's run alone: how it computes, not what.
        source: "numpy" arrays or a `tf.data` "dataset".
    """

    case: Case
    mesh_axes: Mapping[str, int]
    optimizer: Callable[..., keras.optimizers.Optimizer]
    batch_size: int = 8
    samples: int = 16
    epochs: int = 2
    features: Sequence[Feature] = ()
    dtype: str = "float64"
    layout_map: Mapping[str, Layout] | Callable[[Any], Any] | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    declare: Callable[[keras.Model], None] | None = None
    compile: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str = "numpy"

    @property
    def replicas(self) -> int:
        """How many parts a global batch is split into."""
        sizes = [size for axis, size in self.mesh_axes.items() if axis in REPLICA_AXES]
        return int(np.prod(sizes)) if sizes else 1

    @property
    def micro_batches(self) -> int:
        """How many micro-batches each replica's part is split into."""
        pipeline = self.config.get("pipeline")
        return 1 if pipeline is None else pipeline.micro_batches

    @property
    def layouts(self) -> Mapping[str, Layout] | Callable[[Any], Any]:
        """The layouts that the parallel run uses."""
        if self.layout_map is not None:
            return self.layout_map
        return self.case.layout_map if self.mesh_axes.get("model", 1) > 1 else {}

    @property
    def title(self) -> str:
        """One line that names the run."""
        mesh = "x".join(f"{axis}{size}" for axis, size in self.mesh_axes.items())
        names = "+".join(feature.name for feature in self.features) or "none"
        return f"{self.case.name} on {mesh or 'one device'}, {names}, {self.dtype}"
