"""Where the weights of one model are: resolved layouts, local variables, what the plan says."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from kdist._compat import keras_models
from kdist.api import mirrored_scope
from kdist.api.plain_models import tell_plain_models
from kdist.api.sharded_optimizer import config_for
from kdist.api.spreading import spread_for
from kdist.config.compression import Classes
from kdist.config.fusion import FusionConfig
from kdist.config.optimizer import OptimizerConfig
from kdist.config.parallel import ParallelConfig
from kdist.config.recompute_blocks import Blocks, Choice, blocks_of
from kdist.config.whole_batch import GLOBAL, SYNCHRONIZED, WholeBatch
from kdist.dtensor.model_layouts import ModelLayouts, place_weights, placements
from kdist.optimizer.compressed import KnownStates
from kdist.optimizer.early import needs_all
from kdist.optimizer.update import DistributedUpdate
from kdist.plan.partition import Spread
from kdist.program.fixed_batch import refuse_fixed_batch, refuse_row_state
from kdist.program.model_state import frozen_weights
from kdist.runtime.chunking import Chunking
from kdist.runtime.loss_terms import LossTerm, whole_loss, whole_loss_note
from kdist.sharding.placement import Placement, shape_of
from kdist.stages.stages import StagedModel
from kdist.storage.sparse import looked_up
from kdist.storage.variables import Stored, replace, stored

import keras


class PlacedModel:
    """A model's weights over the mesh.

    Attributes:
        model: The Keras model.
        config: What `parallelize` was given.
        topology: The mesh.
        entries: Local variables behind each weight, by identity of the weight.
        layouts: The resolved layouts, once the model is built.
        fallbacks: Why some function runs on gathered weights, if one does.
        level: Of optimizer parallelism, that weights are placed for; None: by another model too.
        update: The distributed optimizer, once trained.
        low_rank: What low-rank compression keeps between steps, and from one `update` to the next.
        user_steps: Whether steps of the user's own have called its layers.
        whole_batch: Why layers compute over the whole batch, if they do.
        compute: The mesh as steps see it; see `Topology.with_data_inside`.
        staged: How the model is cut into stages, once it is built, if it is a pipeline.
        example_input: Spec of the model's input, once a batch was seen.
        loss_terms: What is known about the compiled losses, once a batch with labels was seen.
        moves_seen: `retired.moves()` when a step last looked where weights are.
    """

    def __init__(self, model: keras.Model, config: ParallelConfig) -> None:
        refuse_row_state(model)
        self.model = model
        self.config = config
        self.topology = config.topology
        self.entries: dict[int, Stored] = {}
        self.layouts: ModelLayouts | None = None
        self.fallbacks: list[str] = []
        self.whole_batch: WholeBatch | None = None
        self.compute = config.topology
        self.level: int | None = 0
        self.choices: dict[str, Choice] = {}
        self.update: DistributedUpdate | None = None
        self.low_rank: KnownStates = {}
        self.user_steps = False
        self.staged: StagedModel | None = None
        self.example_input: Any = None
        self.loss_terms: tuple[LossTerm, ...] | None = None
        self.moves_seen = 0

    def place(self) -> None:
        """Resolves the layouts and moves the weights to their devices.

        Once, and again when the model has gained or lost weights since. What another model has
        moved since is taken from there.
        """
        if self.layouts is not None:
            self.entries = {k: stored(one.variable) or one for k, one in self.entries.items()}
            if self.gained_and_lost() != ([], []):
                self._place_again()
            return
        mirrored_scope.refuse_scope()
        self.whole_batch = self._whole_batch()
        self.layouts = self._resolved()
        self.topology, self.compute = self.layouts.topology, self.layouts.compute
        self._refuse_batches()
        self._refuse_fetched()
        # Check the patterns of compression and of recompute before anything moves.
        self.classes()
        blocks_of(self.model, self.config.recompute)
        self._cut_into_stages()
        placed = self._placements()
        self.entries = place_weights(placed, self.topology)
        if any(self.entries[id(v)].placement != placement for v, placement in placed):
            self.level = None  # of another model, which has the same weights
        tell_plain_models(self.model)

    def gained_and_lost(self) -> tuple[list[str], list[str]]:
        """Paths of weights that the model has, and has no more, since they were placed.

        LoRA, quantization and new layers change a model's weights.
        """
        weights = self.model.weights
        now = {id(v) for v in weights}
        gained = [v.path for v in weights if id(v) not in self.entries]
        return gained, [e.variable.path for key, e in self.entries.items() if key not in now]

    def _place_again(self) -> None:
        """Places new weights, and old ones that stages now lie elsewhere for."""
        if self.whole_batch is None and (found := self._whole_batch()) is not None:
            raise ValueError(
                f"{found.cause} computes over the whole batch, which moves the data axis inside "
                "DTensor; that is decided when a model is parallelized. Build the model with that "
                f"layer first, or use {found.instead}. Received: model={self.model.name!r} with a "
                "layer that was added after kdist.parallelize"
            )
        self._refuse_batches()
        self.layouts = self._resolved()
        if self.layouts.topology != self.topology:
            raise ValueError(
                "Weights or layers that the model gained cut a dim by several axes together, which "
                "is decided when a model is parallelized. Build the model with them first. "
                f"Received: {self.layouts.topology.merged}, before {self.topology.merged}"
            )
        self._cut_into_stages()
        self.level = 0
        placed, before = self._placements(), self.entries
        new = [(v, placement) for v, placement in placed if id(v) not in before]
        self.entries = place_weights(new, self.topology)
        for variable, placement in placed:
            if id(variable) in before:
                self.entries[id(variable)] = replace(before[id(variable)], placement)
        tell_plain_models(self.model)

    def _resolved(self) -> ModelLayouts:
        inside, again = self.whole_batch is not None, self.layouts is not None
        return ModelLayouts(self.model, self.config, self.topology, inside, again)

    def _refuse_batches(self) -> None:
        """Refuses a model that replicas and micro-batches would give other batches than it has."""
        refuse_row_state(self.model)
        pipeline = self.config.pipeline
        micro_batches = 1 if pipeline is None else pipeline.micro_batches
        refuse_fixed_batch(self.model, self.compute.data_size, micro_batches)

    def _refuse_fetched(self) -> None:
        """Refuses tables on the host, or split by hand, where rows of one slice are not its own."""
        assert self.layouts is not None
        names = [layer.path or layer.name for layer in self.layouts.fetched_layers]
        if names and self.whole_batch is not None:
            raise ValueError(
                "Rows of a table on the host, or split by hand, are fetched for each replica, and "
                "layers that compute over the whole batch have none. Use "
                "batch_semantics='replica' and no synchronized layers, or leave the table whole on "
                f"the device. Received: {self.whole_batch.cause}, with such tables of {names}"
            )

    def _cut_into_stages(self) -> None:
        if self.config.pipeline is not None:
            self.staged = StagedModel.of(
                self.model,
                self.config.pipeline,
                self.topology,
                self.example_input,
                self.staged,
                self.whole_loss,
            )

    def schedule_stages(self) -> None:
        """Gives the stages the schedule that the model's loss, known by now, allows.

        Raises:
            ValueError: It does not allow the one that was asked for.
        """
        if self.staged is not None and self.config.pipeline is not None:
            self.staged = self.staged.scheduled(self.config.pipeline, self.whole_loss)

    def _placements(self) -> list[tuple[keras.Variable, Placement]]:
        """Where the layouts and the stages alone put each weight."""
        assert self.layouts is not None
        groups = None if self.staged is None else self.staged.groups(self.model, self.topology)
        return placements(self.model, self.layouts, self.topology, groups)

    def classes(self) -> Classes | None:
        """How the gradient of each trainable variable travels; None without compression.

        A gradient that inner axes cut travels, and is judged, part by part.
        """
        if self.config.compression is None or self.topology.data_size == 1:
            return None
        assert self.layouts is not None
        variables = self.trained
        placed = placements(self.model, self.layouts, self.topology)
        by_layout = {id(v): placement for v, placement in placed}
        parts = []
        for v in variables:
            shape = shape_of(by_layout[id(v)].inner_index(0))
            parts.append(SimpleNamespace(path=v.path, shape=shape, dtype=v.dtype))
            parts[-1].overwrite_with_gradient = v.overwrite_with_gradient
        return self.config.compression.classes(parts, self._tables(variables))

    def _tables(self, variables: Sequence[keras.Variable]) -> frozenset[int]:
        """Positions of the variables that are tables of embeddings."""
        tables = {id(v) for v in looked_up(self.model)}
        return frozenset(i for i, v in enumerate(variables) if id(v) in tables)

    @property
    def trained(self) -> Sequence[keras.Variable]:
        """The variables that training changes."""
        return self.model.trainable_variables

    @property
    def frozen(self) -> Sequence[keras.Variable]:
        """Those that it does not; see `kdist.program.model_state.frozen_weights`."""
        trained = {id(v) for v in self.trained}
        return [v for v in frozen_weights(self.model) if id(v) not in trained]

    @property
    def frozen_here(self) -> Sequence[keras.Variable]:
        """Those of `frozen` that no other model decides about; the weights are placed."""
        return [v for v in self.frozen if self.entries[id(v)].placed_for() in (None, self)]

    @property
    def params(self) -> list[keras.Variable]:
        """What steps take as parameters; see `ModelState.params`. The weights are placed."""
        frozen = [v for v in self.frozen if self.entries[id(v)].placement.gathered]
        return [*self.trained, *frozen]

    def spread(self) -> Spread:
        """How optimizer parallelism spreads the trainable parameters; the weights are placed."""
        optimizer = self.model.optimizer if self.model.compiled else None
        placed, config = self._placed_by_layout(self.trained), self.optimizer_config
        if config.level == 3 and self.level != 3:  # there is no optimizer to store weights for
            config = config.uncut()
        return self._spread(optimizer, self.trained, placed, config, self.classes())

    def spread_frozen(self) -> Spread:
        """Where optimizer parallelism stores `frozen_here`, and what of it is gathered together.

        Nothing updates them; level 3 stores them like what trains.
        """
        frozen, fusion = self.frozen_here, self.config.fusion
        if fusion.index:  # counts what trains
            fusion = dataclasses.replace(fusion, mode="none", index=())
        placed = self._placed_by_layout(frozen)
        return self._spread(None, frozen, placed, self.optimizer_config, None, fusion)

    def _placed_by_layout(self, variables: Sequence[keras.Variable]) -> list[Placement]:
        """Where layouts and stages alone put some weights."""
        by_layout = {id(v): placement for v, placement in self._placements()}
        return [by_layout[id(v)] for v in variables]

    def spread_where_stored(self, optimizer: Any, variables: Sequence[keras.Variable]) -> Spread:
        """How updates of an optimizer beside the compiled one are spread over those who store.

        Raises:
            ValueError: It asks for weights that are stored cut, and they are not.
        """
        config = config_for(optimizer, self.config.optimizer)
        if config.level == 3 and self.level != 3:
            raise ValueError(
                "Level 3 stores weights cut, which is decided before a step applies an optimizer. "
                "Say ParallelConfig(optimizer=kdist.OptimizerConfig(level=3)), or use level 2. "
                f"Received: {type(optimizer).__name__} with level=3, weights placed at level "
                f"{self.level}"
            )
        if config.level == 3:  # what is stored cut is updated where it is
            config = config.uncut()
        placed = [self.entries[id(v)].placement for v in variables]
        return self._spread(optimizer, variables, placed, config, None)

    def _spread(
        self,
        optimizer: Any,
        variables: Sequence[keras.Variable],
        placed: Sequence[Placement],
        config: OptimizerConfig,
        classes: Classes | None,
        fusion: FusionConfig | None = None,
    ) -> Spread:
        given = fusion or self.config.fusion, self.topology, self._tables(variables), classes
        return spread_for(optimizer, variables, placed, config, *given)

    @property
    def optimizer_config(self) -> OptimizerConfig:
        """The settings of optimizer parallelism, from the configuration or the optimizer."""
        optimizer = self.model.optimizer if self.model.compiled else None
        return config_for(optimizer, self.config.optimizer)

    @property
    def blocks(self) -> Blocks:
        """Layers that run again in the backward pass."""
        found = blocks_of(self.model, self.config.recompute)
        return dataclasses.replace(found, choices=self.choices)

    @property
    def chunking(self) -> Chunking | None:
        """How programs are cut into chunks, between which gradients leave and parameters come.

        None where nothing travels, or operations run one by one.
        """
        config, blocks = self.optimizer_config, self.blocks
        travels = config.level >= 2 or self.config.fusion.overlap
        wanted = blocks or (travels and self.topology.data_size > 1)
        if not wanted or self.model.run_eagerly:
            return None
        gathers = any(self.entries[id(v)].placement.gathered for v in self.params)
        return Chunking(
            forward=gathers or self.steps_together > 1,
            free=config.level >= 2,
            early=self.updates_early,
            keep=self.kept_gathered(),
            blocks=blocks,
        )

    @property
    def steps_together(self) -> int:
        """How many steps of `fit` have no barrier between them."""
        return min(self.model.unrolled_steps_per_execution, self.model.steps_per_execution)

    @property
    def updates_early(self) -> bool:
        """Whether sums of gradients wait for the updates before them, to save memory."""
        if self.optimizer_config.level < 2 or not self.model.compiled:
            return False
        return not needs_all(self.model.optimizer, self.trained)

    def kept_gathered(self) -> frozenset[int]:
        """Positions of the parameters that, once gathered, stay for the backward pass."""
        freed, otherwise = self.blocks.freed, not self.optimizer_config.keep_gathered
        params = self.params
        return frozenset(i for i, v in enumerate(params) if not freed.get(id(v), otherwise))

    def spread_parameters(self, compiled: bool = False, takes: bool = True) -> None:
        """Moves parameters to where the compiled optimizer's level wants them.

        Of models that share a weight, the last to train it decides where it is; where none does,
        the first whose level stores it cut.

        Args:
            compiled: Whether the user's step has an optimizer; the model may have one.
            takes: Whether to train: those too that another model decides about.
        """
        config = self.optimizer_config
        if self.layouts is None or not (compiled or self.model.compiled):
            return
        moved, self.level = config.level > 0 or self.level != 0, config.level
        undecided = () if config.level == 3 else {id(v) for v in self.frozen}
        for variable, placement in self.wanted_placements():
            before = self.entries[id(variable)]
            if not takes and before.placed_for() not in (None, self):
                self.level = self.level if before.placement == placement else None  # the other's
                continue
            self.entries[id(variable)] = after = replace(before, placement)
            moved |= after is not before
            if id(variable) not in undecided:
                after.placed_for = weakref.ref(self)
        if moved:
            tell_plain_models(self.model)

    def wanted_placements(self) -> Iterator[tuple[keras.Variable, Placement]]:
        """Where optimizer parallelism has weights that this model decides about."""
        yield from zip(self.trained, self.spread().placements, strict=True)
        yield from zip(self.frozen_here, self.spread_frozen().placements, strict=True)

    @property
    def whole_loss(self) -> str:
        """Why the loss is computed over the whole batch, by one device; "" if part by part.

        A pipeline splits batches even where there is one replica.
        """
        parts = self.compute.data_size if self.config.pipeline is None else 2
        return whole_loss(self.model, self.loss_terms or (), parts)

    @property
    def whole_loss_note(self) -> str:
        """One line about that, for the user."""
        return whole_loss_note(self.whole_loss, self.topology.num_stages, self.config.pipeline)

    def _whole_batch(self) -> WholeBatch | None:
        """Why `data` must be inside DTensor, None if replicas compute apart."""
        if self.topology.data_size == 1:
            return None
        if self.config.batch_semantics == "global":
            return GLOBAL
        return SYNCHRONIZED if keras_models.synchronizes(self.model) else None

    def entries_of(self, variables: Sequence[keras.Variable]) -> list[Stored]:
        """Local variables behind some weights."""
        return [self.entries[id(v)] for v in variables]
