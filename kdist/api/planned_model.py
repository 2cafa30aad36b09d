"""What the step of a placed model will do, and what is said of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from kdist.api.changed_weights import follow_to_plan
from kdist.api.dealt_tables import dealt_notes
from kdist.api.inside_layers import refuse_batch_size
from kdist.api.placed_model import PlacedModel
from kdist.api.sharded_optimizer import parallel_optimizer
from kdist.api.table_optimizers import table_notes
from kdist.config.effect_in_part import (
    ELSEWHERE,
    WeightEffect,
    compression_in_part,
    levels_in_part,
)
from kdist.config.fusion import comm_fusion
from kdist.config.idle_layouts import no_moves
from kdist.config.parallel import ParallelConfig
from kdist.config.without_effect import ModelFacts, WithoutEffect, without_effect
from kdist.display.tables import readable
from kdist.display.warn import warn
from kdist.dtensor.lowered import Collective
from kdist.graphs.chunks import parameter_chunks
from kdist.optimizer.gather import gather_groups
from kdist.optimizer.wrappers import optimizer_groups, row_updates, sums_rows
from kdist.pipeline.instructions import Gather
from kdist.pipeline.work import WeightUse, Work, chunk_schedule, work_of
from kdist.plan.between_processes import crossed_axes
from kdist.plan.device_memory import DeviceMemory
from kdist.plan.inside_layers import InsideTraffic, counted_per
from kdist.plan.partition import Decision
from kdist.plan.plan import Plan, make_plan
from kdist.report import memory as device_memory
from kdist.runtime.keras_contract import is_built
from kdist.runtime.metrics import overrides
from kdist.stages.stages import stages_given
from kdist.storage import nccl
from kdist.storage.sparse import LookUp, gradients_of_rows, looked_up

import keras

if TYPE_CHECKING:
    from kdist.api.parallelize import Parallel


class PlannedModel(PlacedModel):
    """A placed model and its plan; see `PlacedModel` for arguments and more attributes.

    Attributes:
        memory: What each device has, with a step as `kdist.inspect` read it last.
    """

    def __init__(self, model: keras.Model, config: ParallelConfig) -> None:
        super().__init__(model, config)
        self._told: set[str] = set()
        self.memory: tuple[DeviceMemory, ...] = ()

    def look_ups(self) -> Mapping[int, LookUp]:
        """The trainable weights whose gradients are rows of a table, and how they are looked up.

        Before the step is traced, the tables of untied embeddings.
        """
        rows = {id(v) for v in gradients_of_rows(self.model)}
        trainable = self.trained
        return {i: LookUp() for i, v in enumerate(trainable) if id(v) in rows}

    def _look_ups_of_stages(self) -> Mapping[int, LookUp]:
        """`look_ups`, with how many virtual stages make them."""
        if self.staged is None:
            return self.look_ups()
        users, variables = self.staged.users(), self.trained
        return {
            v: dataclasses.replace(one, users=max(1, len(users.get(id(variables[v]), ()))))
            for v, one in self.look_ups().items()
        }

    def bucket_keys(self) -> list[Hashable | None]:
        """Of each of `params`, the key of its bucket; None where it travels alone."""
        keys = list(self.spread().keys)
        frozen = dict(zip(map(id, self.frozen_here), self.spread_frozen().keys))
        found = [frozen.get(id(v)) for v in self.params[len(keys) :]]
        return [*keys, *(None if key is None else ("frozen", key) for key in found)]

    def works(self) -> list[Work]:
        """What is done in each pass of a training step; the weights are placed.

        Before the step is traced, weights come in the model's order, and a backward pass looks at
        all weights of its chunk but tables, which it does not look at.
        """
        config, params, trained = self.optimizer_config, self.params, len(self.trained)
        placed, keys = [self.entries[id(v)].placement for v in params], self.bucket_keys()
        gathered = {i for i, one in enumerate(placed) if one.gathered}

        def together(weights: Sequence[int]) -> list[tuple[int, ...]]:
            return gather_groups(weights, keys, placed)

        when: dict[str, Any] = {
            "kept": gathered & self.kept_gathered(),
            "free": config.level >= 2,
            "early": self.updates_early,
        }
        if self.staged is not None:
            uses = self.staged.weight_uses(params, trained, gathered, not self.whole_loss)
            return [work_of(self.staged.schedule, uses, together, **when)]
        if self.chunking is None:
            use = WeightUse({"F": sorted(gathered)}, tuple(range(trained)))
            return [work_of(chunk_schedule(1), [use])]
        numbers = parameter_chunks(range(len(placed)), [one.nbytes for one in placed])
        tables, uses = self._tables(params), []
        for n in range(max(numbers, default=0) + 1):
            mine = [i for i, number in enumerate(numbers) if number == n]
            looks = [i for i in mine if i in gathered]
            back = [i for i in looks if i not in tables]
            uses.append(WeightUse({"F": looks, "B": back}, tuple(i for i in mine if i < trained)))
        return [work_of(chunk_schedule(len(uses)), uses, together, **when)]

    def without_effect(self) -> list[WithoutEffect]:
        """Settings without effect on this model and mesh; the weights are placed."""
        config, decisions = self.optimizer_config, self.spread().decisions
        variables, blocks = self.trained, self.blocks.blocks
        whole = {d.path: d.reason for d in decisions if d.how == "whole"}
        asked = parallel_optimizer.of(variables)
        frozen = self.spread_frozen().decisions if config.level == 3 else ()
        spread = [d.path for d in (*decisions, *frozen) if d.how != "whole"]
        optimizer = self.model.optimizer if self.model.compiled else None
        steps = [
            leaf.gradient_accumulation_steps or 1
            for leaf, _ in optimizer_groups(optimizer, variables)
        ]
        facts = ModelFacts(
            compiled=optimizer is not None,
            accumulation_steps=max(steps, default=1),
            eager=bool(self.model.run_eagerly),
            staged_layers=tuple(layer.name for layer, _ in stages_given(self.model)),
            not_spread=whole,
            asked_to_spread=tuple(v.path for v, wanted in zip(variables, asked) if wanted),
            spread=len(spread),
            fusion_ids={v.path: n for v, n in zip(variables, comm_fusion.of(variables)) if n},
            tables=tuple(v.path for v in looked_up(self.model)),
            asked_tables=self._asked_tables(),
            gathered=tuple(spread) if config.level == 3 else (),
            repeated=tuple(one.name for one in blocks),
            keep_communication=tuple(
                one.name for one in blocks if not one.setting.mp_comm_recompute
            ),
            asked_to_gather=self._asked_to_gather(spread if config.level == 3 else ()),
            travels=any(len(p.slices) > 1 for _, p in self._placements()),
            user_steps=self._has_user_steps,
        )
        found = without_effect(self.config, config, self.topology, facts)
        return [*found, *self._effects_in_part()]

    def _effects_in_part(self) -> list[WithoutEffect]:
        """Settings that save less than one would think."""
        variables, decisions = [*self.trained], [*self.spread().decisions]
        config = self.optimizer_config
        if config.level == 3:
            here = {id(v) for v in self.frozen_here}
            others = [v for v in self.frozen if id(v) not in here]
            variables += [*self.frozen_here, *others]
            decisions += [*self.spread_frozen().decisions, *map(self._elsewhere, others)]
        by_layout = {id(v): one for v, one in self._placements()}
        opted = parallel_optimizer.of(variables)
        parts = []
        for variable, decision, wanted in zip(variables, decisions, opted, strict=True):
            one = by_layout[id(variable)]
            # A table that is split by hand over an inner axis is the same on every replica.
            repeated = not one.on_host and any(len(part.holders) > 1 for part in one.shards)
            placed = (one.fetched and not repeated) or one.data_dim is not None
            asked = wanted is False or placed
            parts.append(WeightEffect(one.path, one.nbytes, decision.how, decision.reason, asked))
        replicas = self.topology.data_size
        levels = levels_in_part(config, replicas, parts) if self.model.compiled else ()
        return [*levels, *compression_in_part(self.classes())]

    def _elsewhere(self, variable: keras.Variable) -> Decision:
        """What another model, which decides about a weight, does with it."""
        cut = self.entries[id(variable)].placement.gathered
        return Decision(variable.path, "slice" if cut else "whole", ELSEWHERE)

    def _asked_tables(self) -> tuple[str, ...]:
        """See `ModelFacts`."""
        split = [(one.path, one.split) for _, one in self._placements() if one.split is not None]
        return tuple(path for path, how in split if not (how.local_columns or how.dim))

    def _idle(self) -> list[WithoutEffect]:
        """What programs show to be without effect, as far as they are traced and lowered."""
        if self.layouts is None:
            return []
        found, apart = list(self.layouts.idle), self.model.run_eagerly or self.fallbacks
        if self.config.enable_alltoall and self.layouts.compute.inner_size > 1 and not apart:
            inside = self.inside_layers(None)
            moves = inside is None or any(one.kind == "all-to-all" for one in inside)
            gathered = self.layouts.moves_gathered  # it was told then
            if not moves and not gathered and not self._asked_tables():
                found.append(no_moves())
        return found

    def _asked_to_gather(self, spread: Collection[str]) -> tuple[str, ...]:
        """See `ModelFacts`; `spread` are paths of what level 3 gathers."""
        freed = self.blocks.freed
        asked = [v for v in (*self.trained, *self.frozen_here) if id(v) in freed]
        gathered = {p.path for _, p in self._placements() if p.gathered} | set(spread)
        return () if gathered & {v.path for v in asked} else tuple(v.path for v in asked)

    def warn_without_effect(self) -> None:
        """Warns of settings without effect, and of stages without work, of each once."""
        for note in self.without_effect():
            self.warn_once(str(note))
        if self.staged is not None and (idle := self.staged.idle_stages()):
            self.warn_once(idle)

    def warn_idle(self) -> None:
        """Warns of what programs show to be without effect, of each once; they are lowered."""
        for note in self._idle():
            self.warn_once(str(note))

    def warn_once(self, note: str) -> None:
        """Warns of something about the model, unless it was said before."""
        if note not in self._told:
            self._told.add(note)
            warn(f"{self.model.name}: {note}")

    def tell_barriers(self, where: str) -> None:
        """Warns that steps of one execution wait for each other, if they were to go without."""
        if self.steps_together > 1:
            self.warn_once(
                "unrolled_steps_per_execution has no effect where "
                f"{where}: each step waits for all of the one before. Received: "
                f"unrolled_steps_per_execution={self.model.unrolled_steps_per_execution}"
            )

    def tell_crossed(self, collectives: Sequence[Collective]) -> None:
        """Warns, once, of inner axes over which layers send between processes.

        Args:
            collectives: Those of a training step, per slice; in a pipeline, of a micro-batch.
        """
        axes = crossed_axes(self.topology)
        sent = [one for one in collectives if set(one.axis) & set(axes)]
        if not sent:
            return
        names, nbytes = ", ".join(map(repr, axes)), readable(sum(one.bytes for one in sent))
        per = counted_per(getattr(self.config.pipeline, "micro_batches", 1))
        self.warn_once(
            f"inner axes that cross processes: {names}. Layers wait for the network there "
            f"(collectives: {len(sent)}, of {nbytes}, {per}). Let 'data' or 'pipe' "
            "cross processes: put them first in the mesh, and keep inner axes within those of one."
        )

    def plan(self, batch_size: int | None = None) -> Plan:
        """What a step will do; `model.plan().summary()` prints it.

        Args:
            batch_size: Rows of a batch for which `plan.inside`, the communication inside layers,
                is to tell bytes; a program for it is lowered if there is none, and nothing is run:
                weights of a `kdist.scope` need no values for it.
                By default it tells what is lowered: nothing before the first step, bytes for any
                number of rows after batches of two sizes.

        Raises:
            ValueError: The model is not built, so that its weights are not known; or `batch_size`
                is no positive integer, or none that a program can be lowered for.
        """
        refuse_batch_size(batch_size)
        if self.layouts is None:
            if not is_built(self.model):
                raise ValueError(
                    "A plan needs the model's weights. Build the model, or train a batch, first. "
                    f"Received: model={self.model.name!r}"
                )
            self.place()
        follow_to_plan(cast("Parallel", self))
        weights = [self.entries[id(v)].placement for v in self.model.weights]
        position = {id(v): i for i, v in enumerate(self.model.weights)}
        trainable = [position[id(v)] for v in self.trained]
        frozen = [position[id(v)] for v in self.params[len(trainable) :]]
        spread = self.spread()
        optimizer = self.model.optimizer if self.model.compiled else None
        jobs = None if self.update is None else self.update.jobs
        works, pipeline = self.works(), self.config.pipeline
        plan = make_plan(
            self.topology,
            weights,
            trainable,
            spread.units,
            frozen=frozen,
            buckets=spread.buckets if jobs is None else jobs.buckets,
            notes=self._notes(),
            decisions=spread.decisions,
            exchanges=spread.exchanges if jobs is None else jobs.exchanges,
            classes=self.classes(),
            gathers=[one for work in works for one in work if isinstance(one, Gather)],
            look_ups=self._look_ups_of_stages(),
            micro_batches=1 if pipeline is None else pipeline.micro_batches,
            row_updates=row_updates(optimizer, self.trained),
            works=works,
            summed_rows=sums_rows(optimizer, self.trained),
            ahead=self._looked_up_ahead(),
            boundaries=() if self.staged is None else self.staged.boundaries(),
            inside=self.inside_layers(batch_size),
            memory=self._memory(batch_size),
        )
        return dataclasses.replace(plan, frozen_look_ups=self._frozen_look_ups(position))

    def _frozen_look_ups(self, position: Mapping[int, int]) -> tuple[tuple[int, LookUp], ...]:
        """By position of a table that is fetched and does not train, how rows are looked up."""
        if self.layouts is None:
            return ()
        trained, program = {id(v) for v in self.trained}, getattr(self, "program", None)
        known = {} if program is None else program.tables.frozen
        tables = [id(one.embeddings) for one in self.layouts.fetched_layers]
        found = {position[v]: known.get(v, LookUp()) for v in tables if v not in trained}
        return tuple(sorted(found.items()))

    def _memory(self, batch_size: int | None) -> tuple[DeviceMemory, ...]:
        """What each device has: of a step what was read, if that had as many rows."""
        if not device_memory.updates_of(self):
            return ()
        if self.memory and batch_size in (None, self.memory[0].rows):
            return self.memory
        return device_memory.measure(self, None)

    def inside_layers(self, batch_size: int | None) -> Sequence[InsideTraffic] | None:
        """What layers communicate over inner axes; see `plan`."""
        return ()

    def _looked_up_ahead(self) -> frozenset[int]:
        """Positions of trainable variables whose rows `fit` looks up a step ahead."""
        ahead = {id(one.embeddings) for one in self.layouts.prefetched} if self.layouts else set()
        return frozenset(n for n, v in enumerate(self.trained) if id(v) in ahead)

    def _notes(self) -> list[str]:
        """What the plan says beside its tables."""
        notes = list(self.fallbacks)
        if self.whole_loss and self.whole_loss_note not in notes:
            notes.append(self.whole_loss_note)
        if self._has_user_steps:
            notes.append(
                "of steps of one's own (a train_step, kdist.function) nothing is listed: what is "
                "listed of a step is that of the compiled loss"
            )
        if self.staged is not None:
            notes += filter(None, [self.staged.describe(), self.staged.idle_stages()])
        notes += [*map(str, self.without_effect()), *self.travel_notes()]
        if self.optimizer_config.level == 3 and self.level != 3:
            notes.append(
                "level=3 stores weights from compile() with an optimizer on, or a first step of "
                "one's own: what is listed is a step with weights as they are stored now"
            )
        if self.layouts is not None:
            frozen = [one for one in self.layouts.fetched_layers if not one.embeddings.trainable]
            notes += [
                f"table {one.path!r} does not train: rows that are looked up travel, no gradients"
                for one in frozen
            ]
            ahead = [layer.path or layer.name for layer in self.layouts.prefetched]
            notes += [f"table {name!r} is looked up a step ahead in fit" for name in ahead]
            notes += [*self.layouts.left_whole, *map(str, self.layouts.uncut + self._idle())]
            notes += filter(None, [self.layouts.island_note()])
        if self.whole_batch is not None:
            notes.append(self.whole_batch.note(self.config.pipeline))
        if self.blocks:
            notes.append(self.blocks.describe())
        if self.uses_host:
            notes.append(self._host_note())
        notes += filter(None, [nccl.note([d for one in self.topology.slices for d in one.devices])])
        chosen = {} if self.layouts is None else self.layouts.chosen
        notes += [*table_notes(self.model), *dealt_notes(self.model, chosen)]
        return notes

    @property
    def _has_user_steps(self) -> bool:
        """Whether its layers are called by steps of the user's own."""
        return self.user_steps or overrides(self.model, "train_step")

    @property
    def uses_host(self) -> bool:
        """Whether something is stored, or updated, on the host."""
        tables = any(entry.placement.on_host for entry in self.entries.values())
        return tables or self.optimizer_config.state_on == "host"

    def _host_note(self) -> str:
        """Which device is the host."""
        host = self.topology.host
        if self.topology.host_is_apart:
            return f"the host is {host}, which is not in the mesh"
        return (
            f"the host is {host}, which is a device of the mesh too, since no CPU is "
            "left: memory is not told apart. kdist.init(cpu_devices=...) with one more gives one."
        )

    def travel_notes(self) -> list[str]:
        """What the plan says of when gradients travel, beside the settings."""
        return []
