"""Settings that are accepted and have no effect, or not the whole one, on this mesh and model.

Pure: what was set and what is known about the model in, notes out. `Plan.notes` has them, and
training warns of each once. A new setting that something can leave without effect needs a rule
here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kdist.config.optimizer import OptimizerConfig
from kdist.sharding.device import Device

if TYPE_CHECKING:
    from kdist.config.parallel import ParallelConfig
    from kdist.sharding.mesh import Topology

SHOWN_NAMES = 3
NO_REPLICAS = "gradients travel between replicas, and the mesh {mesh} has one"
ADD_DATA = "Give the mesh a data axis of 2 or more, or leave the setting out"


@dataclasses.dataclass(frozen=True)
class WithoutEffect:
    """One setting without effect.

    Attributes:
        setting: The setting with its value, such as "enable_alltoall=True".
        why: Why it changes nothing here.
        instead: What to do.
        on: What it has no effect on, where it has one on something else; "" if it has none at all.
        sizes: What "{sizes}" of `why` stands for.
    """

    setting: str
    why: str
    instead: str
    on: str = ""
    sizes: tuple[str, ...] = ()

    def __str__(self) -> str:
        on = f" on {self.on}" if self.on else ""
        text = f"{self.setting} has no effect{on}: {self.why}. {self.instead}."
        return text.replace("{sizes}", ", ".join(self.sizes))

    def joined(self, other: WithoutEffect) -> WithoutEffect | None:
        """One note in the place of two that differ in their sizes alone; None if they do not."""
        both = dataclasses.replace(self, sizes=(*dict.fromkeys((*self.sizes, *other.sizes)),))
        return both if both == dataclasses.replace(other, sizes=both.sizes) else None


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """What the rules need to know about a model; paths are those of trainable parameters.

    Attributes:
        compiled: Whether the optimizer is known.
        accumulation_steps: The optimizer's `gradient_accumulation_steps`.
        eager: Whether `run_eagerly` is set.
        staged_layers: Names of the layers that `kdist.set_stage` was given.
        not_spread: By path of a parameter that optimizer parallelism leaves whole, why.
        asked_to_spread: Paths that `kdist.set_parallel_optimizer(..., True)` was given.
        spread: Number of parameters that are spread.
        fusion_ids: By path, the id that `kdist.set_comm_fusion` gave, 0 left out.
        tables: Paths of embedding tables.
        asked_tables: Paths of tables that are split by hand by rows, which are looked up as asked.
        gathered: Paths of what level 3 gathers.
        repeated: Names of the blocks that run again in the backward pass.
        keep_communication: Of these, names of those with mp_comm_recompute=False.
        asked_to_gather: Paths of which it was said whether they are gathered again in the backward
            pass, where no such weight is gathered at all.
        travels: Whether any gradient goes from one slice to another.
        user_steps: Whether steps of the user's own call the layers: an own `train_step`, or
            `kdist.function`.
    """

    compiled: bool = False
    accumulation_steps: int | None = None
    eager: bool = False
    staged_layers: tuple[str, ...] = ()
    not_spread: Mapping[str, str] = dataclasses.field(default_factory=dict)
    asked_to_spread: tuple[str, ...] = ()
    spread: int = 0
    fusion_ids: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tables: tuple[str, ...] = ()
    asked_tables: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    keep_communication: tuple[str, ...] = ()
    asked_to_gather: tuple[str, ...] = ()
    travels: bool = True
    user_steps: bool = False


@dataclasses.dataclass(frozen=True)
class _Case:
    """Everything that the rules look at."""

    config: ParallelConfig
    optimizer: OptimizerConfig
    topology: Topology
    facts: ModelFacts

    @property
    def replicas(self) -> bool:
        """Whether there are several."""
        return self.topology.data_size > 1

    @property
    def chunks(self) -> int:
        """Chunks of a pipeline's stage; 1 without one."""
        pipeline = self.config.pipeline
        return 1 if pipeline is None else pipeline.schedule_for(self.topology.num_stages).chunks

    @property
    def no_replicas(self) -> str:
        return NO_REPLICAS.format(mesh=self.topology.describe_axes())


def without_effect(
    config: ParallelConfig, optimizer: OptimizerConfig, topology: Topology, facts: ModelFacts
) -> list[WithoutEffect]:
    """Lists what was set and changes nothing, or less than it says.

    Args:
        config: What `parallelize` was given.
        optimizer: The settings of optimizer parallelism that count: those of the configuration, or
            of a `ShardedOptimizer`.
        topology: The mesh.
        facts: What is known about the model.

    Example:
        >>> config = kdist.ParallelConfig(mesh=kdist.mesh(data=2), enable_alltoall=True)
        >>> print(*without_effect(config, config.optimizer, config.topology, ModelFacts()))
        enable_alltoall=True has no effect: ...
    """
    case = _Case(config, optimizer, topology, facts)
    return [note for rule in RULES for note in rule(case)]


def _level(case: _Case) -> Iterator[WithoutEffect]:
    """A threshold without a level; levels without replicas, or that leave every parameter whole."""
    level, facts = case.optimizer.level, case.facts
    if level == 0:
        threshold = case.optimizer.threshold_kb
        if threshold != OptimizerConfig.threshold_kb:
            yield WithoutEffect(
                f"threshold_kb={threshold:g}",
                "level 0 cuts nothing",
                "Raise level, or leave it out",
            )
        return
    if not case.replicas:
        yield WithoutEffect(_level_settings(case.optimizer), case.no_replicas, ADD_DATA)
    elif facts.compiled and facts.not_spread and not facts.spread:
        path, reason = next(iter(facts.not_spread.items()))
        why = f"all {len(facts.not_spread)} parameters stay whole; {path!r}: {reason}"
        instead = "Lower threshold_kb, or see the plan's table of optimizer parallelism"
        if case.optimizer.state_on == "host":
            instead = "Level 3 cuts parameters; or leave level out"
        yield WithoutEffect(f"level={level}", why, instead, "where parameters are kept and updated")


def _level_settings(config: OptimizerConfig) -> str:
    given = [f"level={config.level}"]
    for name in ("gradient_accumulation_shard", "keep_gathered"):
        if getattr(config, name):
            given.append(f"{name}=True")
    if config.partition != "auto":
        given.append(f"partition={config.partition!r}")
    return ", ".join(given)


def _accumulation(case: _Case) -> Iterator[WithoutEffect]:
    wanted = case.optimizer.gradient_accumulation_shard and case.replicas
    if wanted and case.facts.compiled and (case.facts.accumulation_steps or 1) == 1:
        yield WithoutEffect(
            "gradient_accumulation_shard=True",
            "the optimizer adds up no gradients (gradient_accumulation_steps="
            f"{case.facts.accumulation_steps})",
            "Give the Keras optimizer gradient_accumulation_steps=2 or more, or leave it out",
        )


def _asked_to_spread(case: _Case) -> Iterator[WithoutEffect]:
    """`set_parallel_optimizer(..., True)` of what stays whole nevertheless."""
    by_reason: dict[str, list[str]] = {}
    for path in case.facts.asked_to_spread:
        if path in case.facts.not_spread:
            by_reason.setdefault(case.facts.not_spread[path], []).append(path)
    for reason, paths in by_reason.items():
        instead = "Leave it out, or raise OptimizerConfig(level=...)"
        if case.optimizer.level:
            instead = "Leave it out, or change what the reason says"
        yield WithoutEffect(f"kdist.set_parallel_optimizer({named(paths)}, True)", reason, instead)


def _chunks(case: _Case) -> Iterator[WithoutEffect]:
    """What needs programs in chunks, on a pipeline or where operations run one by one."""
    staged = case.config.pipeline is not None
    reason = "run_eagerly computes operation by operation" if case.facts.eager else ""
    if not case.replicas or not (staged or reason):
        return
    frees = staged and case.chunks > 1 and not case.facts.eager
    if case.optimizer.level >= 2 and not frees:
        if staged:
            reason = "a pipeline's stage of one chunk keeps both until its last backward"
        yield WithoutEffect(
            f"level={case.optimizer.level}",
            reason,
            "What a device keeps between steps is as the level says; within a step it peaks "
            "as at level 1, or higher by what is gathered",
            "when gradients and gathered parameters are freed",
        )
    if staged and case.optimizer.keep_gathered and not frees:
        yield WithoutEffect(
            "keep_gathered=True",
            "a pipeline's stage of one chunk gathers its parameters once a step and keeps them "
            "anyway",
            "Leave it out",
        )


def _fusion(case: _Case) -> Iterator[WithoutEffect]:
    """Modes and ids where nothing travels, and of tables."""
    fusion, facts = case.config.fusion, case.facts
    given = fusion.mode not in ("auto", "none") or fusion.link is not None
    if not facts.travels:
        if given or fusion.mode == "none" or not fusion.overlap:
            yield WithoutEffect(f"fusion ({fusion})", case.no_replicas, ADD_DATA)
        if facts.fusion_ids:
            setting = f"kdist.set_comm_fusion of {named(list(facts.fusion_ids))}"
            yield WithoutEffect(setting, case.no_replicas, ADD_DATA)
        return
    one_process = len({Device.parse(device).process for device in case.topology.devices}) == 1
    if fusion.algorithm != "auto" and one_process:
        yield WithoutEffect(
            f"FusionConfig(algorithm={fusion.algorithm!r})",
            "it is about sums between processes, and there is one",
            "Leave it out, or start several: see docs/processes.md",
        )
    if not fusion.overlap and (case.config.pipeline is not None or case.optimizer.level >= 2):
        reason = f"level {case.optimizer.level} frees gradients while the backward pass goes on"
        if case.config.pipeline is not None:
            reason = "a pipeline's buckets leave stage by stage"
        yield WithoutEffect("FusionConfig(overlap=False)", reason, "Leave overlap out")
    tables = [path for path in facts.tables if path in facts.fusion_ids]
    if tables:
        yield WithoutEffect(
            f"kdist.set_comm_fusion of {named(tables)}",
            "gradients of embedding tables are the rows that were looked up, and travel alone",
            "Leave the tables out: give ids to the other layers",
        )


def _recompute(case: _Case) -> Iterator[WithoutEffect]:
    """Blocks that run again where operations run one by one, or have nothing to communicate."""
    if case.facts.repeated and case.facts.eager:
        yield WithoutEffect(
            f"recompute of {named(case.facts.repeated)}",
            "run_eagerly computes operation by operation, and a tape keeps what it needs",
            "Compile without run_eagerly, or leave it out",
        )
    mesh = case.topology.describe_axes()
    if case.facts.keep_communication and case.topology.inner_size == 1:
        yield WithoutEffect(
            f"mp_comm_recompute=False of {named(case.facts.keep_communication)}",
            f"it is about collectives of inner axes, and the mesh {mesh} has none above 1",
            "Add an axis such as model=2, or leave it out",
        )
    if case.facts.asked_to_gather:
        yield WithoutEffect(
            f"parallel_optimizer_comm_recompute of {named(case.facts.asked_to_gather)}",
            f"none of these weights is gathered before use on the mesh {mesh}",
            "Cut them over the replicas with OptimizerConfig(level=3) or a layout with the data "
            "axis, or leave it out",
        )


def _others(case: _Case) -> Iterator[WithoutEffect]:
    """Settings that need an axis of the mesh."""
    mesh = case.topology.describe_axes()
    asked = case.facts.asked_tables
    uncut = case.topology.inner_size == 1 and case.config.batch_semantics == "replica"
    if case.config.enable_alltoall and uncut and not asked:
        yield WithoutEffect(
            "enable_alltoall=True",
            f"only inner axes cut the tensors of layers, and the mesh {mesh} has none above 1; "
            "nor is a table split by hand",
            "Add an axis such as model=2, or leave it out",
        )
    if case.config.sequence_parallel and case.topology.inner_size == 1:
        yield WithoutEffect(
            "sequence_parallel=True",
            f"only inner axes cut the tensors of layers, and the mesh {mesh} has none above 1",
            "Add an axis such as model=2, or leave it out",
        )
    if case.config.compression is not None and not case.replicas:
        yield WithoutEffect("compression", case.no_replicas, ADD_DATA)
    if case.config.pipeline is None and case.facts.staged_layers:
        yield WithoutEffect(
            f"kdist.set_stage of {named(case.facts.staged_layers)}",
            "ParallelConfig names no pipeline",
            "Give ParallelConfig a mesh with an axis 'pipe' and pipeline=kdist.PipelineConfig(...)",
        )


def _user_steps(case: _Case) -> Iterator[WithoutEffect]:
    """What is about when gradients and parameters come and go, in a step of the user's own."""
    if not (case.facts.user_steps and case.replicas):
        return
    fusion, level = case.config.fusion, case.optimizer.level
    settings = []
    if fusion.mode != "auto" or fusion.link is not None or fusion.algorithm != "auto":
        settings.append(f"fusion ({fusion})")
    if case.facts.fusion_ids:
        settings.append(f"kdist.set_comm_fusion of {named(list(case.facts.fusion_ids))}")
    for setting in settings:
        yield WithoutEffect(
            setting,
            "a step of one's own sums them weight by weight, as its tapes ask for them",
            "New values travel by it; leave it out where that does not matter",
            "the sums of gradients",
        )
    if level >= 2:
        yield WithoutEffect(
            f"level={level}",
            "a step of one's own has them whole, from when its calls and tapes make them",
            "What a device keeps between steps is as the level says",
            "when gradients and gathered parameters are freed",
        )


RULES = (
    _level,
    _accumulation,
    _asked_to_spread,
    _chunks,
    _fusion,
    _recompute,
    _others,
    _user_steps,
)


def named(names: Sequence[str]) -> str:
    """Up to three names in quotes, and how many more there are."""
    more = len(names) - SHOWN_NAMES
    shown = ", ".join(map(repr, names[:SHOWN_NAMES]))
    return f"{shown} and {more} more" if more > 0 else shown
