import dataclasses

from kdist.config.compression import CompressionConfig
from kdist.config.fusion import FusionConfig
from kdist.config.optimizer import OptimizerConfig
from kdist.config.parallel import ParallelConfig
from kdist.config.pipeline import PipelineConfig
from kdist.sharding.mesh import Topology, mesh

import keras
import pytest


def test_defaults():
    made = mesh(data=2, model=2)
    config = ParallelConfig(mesh=made)
    assert config.mesh is made
    assert config.layout_map is None
    assert config.enable_alltoall is False
    assert config.batch_semantics == "replica"
    assert config.loss_from_layers == "mean"
    assert config.topology == Topology.from_mesh(made)


def test_only_these_fields_exist():
    names = [field.name for field in dataclasses.fields(ParallelConfig)]
    assert names == [
        "mesh",
        "layout_map",
        "indivisible",
        "enable_alltoall",
        "sequence_parallel",
        "optimizer",
        "fusion",
        "compression",
        "pipeline",
        "recompute",
        "batch_semantics",
        "loss_from_layers",
        "verify",
    ]
    with pytest.raises(TypeError, match="remat"):
        ParallelConfig(mesh=mesh(data=2), remat=None)


def test_the_mesh_is_required_and_fields_have_names():
    with pytest.raises(TypeError, match="mesh"):
        ParallelConfig()
    with pytest.raises(TypeError, match="positional"):
        ParallelConfig(mesh(data=2))


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ParallelConfig(mesh=mesh(data=2)).enable_alltoall = True


@pytest.mark.parametrize("value", [None, {"data": 2}, (2, 2), "mesh"])
def test_mesh_of_another_type(value):
    with pytest.raises(ValueError, match="A mesh is a keras.distribution.DeviceMesh"):
        ParallelConfig(mesh=value)


def test_the_mesh_is_checked():
    made = keras.distribution.DeviceMesh((2,), ["model"], ["cpu:0", "cpu:77"])
    with pytest.raises(ValueError, match="do not exist: CPU:77"):
        ParallelConfig(mesh=made)


@pytest.mark.parametrize(
    ("layout_map", "message"),
    [
        ("map", "A layout map is a dict"),
        ([("a", (None,))], "A layout map is a dict"),
        ({"a": "model"}, "one entry a dim"),
        ({"a": (None, "modle")}, "no axis 'modle'"),
        ({"(": (None,)}, "no regular expression"),
        ({"a": ("model", "model")}, "more than once"),
    ],
)
def test_the_layout_map_is_checked(layout_map, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(mesh=mesh(data=2, model=2), layout_map=layout_map)


def test_the_layout_map_is_for_this_mesh():
    made = mesh(data=2, model=2)
    same = keras.distribution.LayoutMap(made)
    same["kernel"] = (None, "model")
    assert ParallelConfig(mesh=made, layout_map=same).layout_map is same
    other = keras.distribution.LayoutMap(mesh(data=2, model=4))
    with pytest.raises(ValueError, match="another mesh"):
        ParallelConfig(mesh=made, layout_map=other)


def test_a_later_change_of_the_users_dict_has_no_effect():
    patterns = {"a": (None, "model")}
    config = ParallelConfig(mesh=mesh(model=2), layout_map=patterns)
    patterns["b"] = ("nonsense",)
    assert config.layout_map == {"a": (None, "model")}


@pytest.mark.parametrize("value", [None, 1, "yes"])
@pytest.mark.parametrize("switch", ["enable_alltoall", "sequence_parallel"])
def test_a_switch_is_a_bool(switch, value):
    with pytest.raises(ValueError, match=f"Received: {switch}="):
        ParallelConfig(mesh=mesh(data=2), **{switch: value})


@pytest.mark.parametrize("value", [None, "pad", True, ["error"]])
def test_indivisible_is_error_or_replicate(value):
    with pytest.raises(ValueError, match="Received: indivisible="):
        ParallelConfig(mesh=mesh(data=2), indivisible=value)


@pytest.mark.parametrize("value", [None, "none", "average", ["mean"]])
def test_loss_from_layers_is_mean_or_sum(value):
    with pytest.raises(ValueError, match="Received: loss_from_layers="):
        ParallelConfig(mesh=mesh(data=2), loss_from_layers=value)


@pytest.mark.parametrize("value", [None, True, "whole", ["global"]])
def test_batch_semantics_is_replica_or_global(value):
    with pytest.raises(ValueError, match="Received: batch_semantics="):
        ParallelConfig(mesh=mesh(data=2), batch_semantics=value)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": OptimizerConfig(level=1)},
        {"optimizer": OptimizerConfig(level=3)},
        {"fusion": FusionConfig(mode="none")},
        {"fusion": FusionConfig(overlap=False)},
        {"compression": CompressionConfig(rest="bf16")},
    ],
)
def test_global_semantics_take_what_replicas_exchange(options):
    config = ParallelConfig(mesh=mesh(data=2), batch_semantics="global", **options)
    assert config.batch_semantics == "global"


def test_global_semantics_refuse_to_combine_losses_of_replicas():
    options = {"loss_from_layers": "sum"}
    assert ParallelConfig(mesh=mesh(data=2), **options).batch_semantics == "replica"
    with pytest.raises(ValueError, match="batch_semantics='replica'.*Received: loss_from_layers="):
        ParallelConfig(mesh=mesh(data=2), batch_semantics="global", **options)


def test_global_semantics_refuse_stages():
    with pytest.raises(ValueError, match="batch_semantics='replica', or one micro-batch"):
        ParallelConfig(
            mesh=mesh(pipe=2, data=2),
            pipeline=PipelineConfig(micro_batches=2),
            batch_semantics="global",
        )


def test_global_semantics_are_printed():
    config = ParallelConfig(mesh=mesh(data=2), batch_semantics="global")
    assert "  batch_semantics: global" in str(config).splitlines()


def test_replace_checks_again():
    config = ParallelConfig(mesh=mesh(data=2), loss_from_layers="sum")
    assert dataclasses.replace(config, enable_alltoall=True).loss_from_layers == "sum"
    with pytest.raises(ValueError):
        dataclasses.replace(config, loss_from_layers="none")


def test_prints_readably():
    config = ParallelConfig(
        mesh=mesh(data=2, model=2),
        layout_map={".*up/kernel": (None, "model"), ".*bias": ("model",)},
    )
    assert str(config).splitlines() == [
        "ParallelConfig",
        "  mesh data=2, model=2: 4 devices, 2 slices of 2",
        "  slice  devices",
        "      0  CPU:0 CPU:1",
        "      1  CPU:2 CPU:3",
        "  layout_map: 2 patterns",
        "    .*up/kernel  (None, 'model')",
        "    .*bias       ('model',)",
        "  indivisible: error",
        "  enable_alltoall: False",
        "  optimizer: level 0 (off)",
        "  fusion: auto",
        "  batch_semantics: replica",
        "  loss_from_layers: mean",
    ]
    assert "  layout_map: none" in str(ParallelConfig(mesh=mesh(data=2))).splitlines()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"schedule": "nonsense"}, "schedule is one of 'gpipe', '1f1b'"),
        ({"schedule": 3}, "schedule is one of"),
        ({"schedule": "missing.csv"}, "path of an existing CSV file"),
        ({"schedule": "."}, "path of an existing CSV file"),
        ({"chunks": 0}, "chunks is an integer from 1 on"),
        ({"stages": ["up", "down"]}, "the layers themselves, not their names"),
        ({"costs": "guessed"}, "costs is 'estimate'"),
    ],
)
def test_a_pipeline_is_checked_where_it_is_declared(given, words):
    with pytest.raises(ValueError, match=words):
        PipelineConfig(micro_batches=2, **given)
