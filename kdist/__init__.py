"""kdist: hybrid-parallel training for Keras 3 on the TensorFlow backend.

Example:
    >>> import keras, kdist
    >>> kdist.init(cpu_devices=8)
    >>> mesh = kdist.mesh(data=2, model=2)
    >>> config = kdist.ParallelConfig(mesh=mesh, layout_map={".*up/kernel": (None, "model")})
    >>> model = kdist.parallelize(build_model(), config)
    >>> model.compile("adam", "mse")
    >>> model.fit(x, y)
"""

import importlib
from typing import TYPE_CHECKING

# Before anything that imports TensorFlow or Keras; the order of these imports matters.
from kdist._compat.environment import prepare
from kdist._compat.version import VERSION

prepare()

from kdist import callbacks, checkpoint, comm, export, layers  # noqa: E402
from kdist.api.custom_loop import apply_gradients, gradients, reduce  # noqa: E402
from kdist.api.deal_tables import deal_tables  # noqa: E402
from kdist.api.inspection import Inspection, inspect  # noqa: E402
from kdist.api.layout_map_for import layout_map_for  # noqa: E402
from kdist.api.mirrored_scope import mesh_from_strategy  # noqa: E402
from kdist.api.own_functions import function  # noqa: E402
from kdist.api.parallelize import parallelize  # noqa: E402
from kdist.api.pipeline_model import PipelineModel  # noqa: E402
from kdist.api.scope import scope  # noqa: E402
from kdist.api.sharded_optimizer import ShardedOptimizer, set_parallel_optimizer  # noqa: E402
from kdist.cluster.joining import init  # noqa: E402
from kdist.config.compression import CompressionConfig, PowerSGD  # noqa: E402
from kdist.config.fusion import FusionConfig, get_comm_fusion, set_comm_fusion  # noqa: E402
from kdist.config.optimizer import OptimizerConfig  # noqa: E402
from kdist.config.parallel import ParallelConfig  # noqa: E402
from kdist.config.pipeline import PipelineConfig  # noqa: E402
from kdist.config.recompute import RecomputeConfig, recompute  # noqa: E402
from kdist.config.shard import shard  # noqa: E402
from kdist.config.state_format import StateFormatConfig  # noqa: E402
from kdist.config.tables import place  # noqa: E402
from kdist.layers.lazy import lazy  # noqa: E402
from kdist.plan.plan import Plan  # noqa: E402
from kdist.sharding.mesh import mesh  # noqa: E402
from kdist.stages.stages import set_stage  # noqa: E402
from kdist.verification import Verification, VerificationError, verify  # noqa: E402

__version__ = VERSION


if not TYPE_CHECKING:  # which would take every name for one of this module

    def __getattr__(name: str) -> object:
        if name == "ray":  # on first use: Ray is optional, and takes seconds to import
            return importlib.import_module("kdist.ray")
        raise AttributeError(f"module 'kdist' has no attribute {name!r}")


__all__ = [
    "CompressionConfig",
    "FusionConfig",
    "Inspection",
    "OptimizerConfig",
    "ParallelConfig",
    "PipelineConfig",
    "PipelineModel",
    "Plan",
    "PowerSGD",
    "RecomputeConfig",
    "ShardedOptimizer",
    "StateFormatConfig",
    "Verification",
    "VerificationError",
    "apply_gradients",
    "callbacks",
    "checkpoint",
    "comm",
    "deal_tables",
    "export",
    "get_comm_fusion",
    "function",
    "gradients",
    "init",
    "inspect",
    "layers",
    "layout_map_for",
    "lazy",
    "mesh",
    "mesh_from_strategy",
    "parallelize",
    "place",
    "recompute",
    "reduce",
    "scope",
    "set_comm_fusion",
    "set_parallel_optimizer",
    "set_stage",
    "shard",
    "verify",
]
