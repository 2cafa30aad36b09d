"""The pure functions of a model: what every slice runs, with all state coming in and going out.

A program never reads or writes a variable. Parameters, statistics, seeds and layer-owned metrics
are arguments; updated state is returned. One Python trace serves every replica, plain devices and
DTensor meshes alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist._compat import keras_models, keras_seeds, keras_trainer
from kdist._compat.function_graphs import traced_anew
from kdist.config.recompute_blocks import Blocks
from kdist.program.blocks import named
from kdist.program.eager_look_ups import EagerLookUps
from kdist.program.fetched_tables import FetchedTables
from kdist.program.forward_scope import ForwardScope
from kdist.program.logits import attach_logits, logits_among, logits_of, with_logits
from kdist.program.look_ups import TableRows
from kdist.program.looked_up import LookedUp
from kdist.program.loss import CountedLoss, SharedLoss, TermKind, added_parts, term_kinds
from kdist.program.loss_parts import collected, penalty_name
from kdist.program.model_state import ModelState
from kdist.program.padded_batch import PaddedBatch
from kdist.program.pruning import without_effects
from kdist.program.traced import TraceFacts
from kdist.program.unlisted_writes import refuse_unlisted_writes
from kdist.storage import sparse
from kdist.storage.overwritten import refuse_added
from kdist.storage.variables import backing_of

import keras
import tensorflow as tf
from keras import ops


class Program:
    """The pure functions of one model.

    Args:
        model: A built Keras model.
        add_loss_mean: True if values given to `add_loss` are means over examples.

    Attributes:
        blocks: Layers that run again in the backward pass; None where nobody asks.
        tables: Those of which rows are fetched.
        unseeded: The generator that random operations without a seed draw from.
        padded: Pads ragged and sparse ids before a step, where it has to know sizes.
        row_studies: See `kdist.api.stepped_model.SteppedModel`; filled before a pass is traced.
    """

    def __init__(self, model: keras.Model, add_loss_mean: bool) -> None:
        self.model = model
        self.blocks: Blocks | None = None
        self.add_loss_mean = add_loss_mean
        self.row_studies: Mapping[bool, Any] = {}
        self.unseeded = keras_seeds.make_unseeded_generator()
        with keras_seeds.drawing_from(self.unseeded):
            self.state = ModelState.of(model)
        self.trained = TraceFacts()
        self.tested = TraceFacts()
        self.eager = EagerLookUps()
        self.tables = FetchedTables([], self._for_tables, [])
        self.padded = PaddedBatch(self._for_tables, self.state.written)

    def place_tables(self, layers: Sequence[keras.layers.Embedding]) -> None:
        """Notes whose tables are on the host."""
        # Those that are frozen are carried.
        every = [*self.state.params, *self.state.carried]
        known = {id(v): i for i, v in enumerate(every)}
        trainable = {id(v) for v in self.state.trainable}
        tables = [
            LookedUp(
                layer,
                known[id(layer.embeddings)],
                backing_of(layer.embeddings),
                id(layer.embeddings) in trainable,
                layer.embeddings.regularizer,
                *where,
            )
            for layer in layers
            for where in self._look_up_stages(layer)
        ]
        placed = {id(layer.embeddings) for layer in layers}
        others = [v for v in self.state.written if id(v) not in placed]
        self.tables = FetchedTables(tables, self._for_tables, others)
        self.padded = PaddedBatch(self._for_tables, others)

    def _look_up_stages(self, layer: keras.layers.Embedding) -> Sequence[tuple]:
        """Stages that look a table up, each for itself, with their virtual stages that do."""
        return [()]

    def _for_tables(self, x: Any, training: bool, tables: Any, values: Mapping[int, Any]) -> None:
        """See `FetchedTables`."""
        variables = [v for v in self.state.written if id(v) in values]
        mapping = [(v, values[id(v)]) for v in variables]
        with ForwardScope(mapping, self.state.trainable, tables, self.tables.layers):
            self._call(x, training)

    def spec(
        self,
        variable: keras.Variable,
        part: tuple[int, int] | None = None,
        virtual: int | None = None,
    ) -> tf.TensorSpec:
        """Spec of a variable as programs take it; of a fetched table, of rows.

        Args:
            variable: The variable.
            part: Replica and micro-batch that look up as many rows; None for any.
            virtual: The virtual stage that takes it.
        """
        found = self.tables.spec(variable, part, virtual)
        return found or tf.TensorSpec(variable.shape, variable.dtype)

    @functools.cached_property
    def kinds(self) -> list[TermKind]:
        """How each compiled loss combines over replicas."""
        return term_kinds(self.model)

    def traced(self, training: bool) -> TraceFacts:
        """What tracing the training, or the inference, pass taught."""
        return self.trained if training else self.tested

    def forward(
        self, params: Sequence[Any], carried: Sequence[Any], x: Any, training: bool
    ) -> tuple[Any, keras.StatelessScope]:
        """Calls the model on values instead of variables.

        Returns:
            The outputs, and the scope that holds updated state and collected losses.
        """
        scope = self.scope(params, carried)
        with scope:
            outputs = self._call(x, training)
        return outputs, scope

    def infer(self, params: Sequence[Any], carried: Sequence[Any], x: Any) -> dict[str, Any]:
        """Inference-mode `outputs` and `updated` state: layers may draw and count there too."""
        outputs, scope = self.forward(params, carried, x, training=False)
        return {"outputs": outputs, "updated": self.collect_updates(scope, self.tested)}

    def loss_and_gradients(
        self,
        params: list[Any],
        carried: list[Any],
        data: tuple[Any, Any, Any],
        shares: Any,
        rows_share: Any,
        first: Any,
        scale: Any,
        view: Callable[[Any], Any] | None = None,
    ) -> dict[str, Any]:
        """One replica's share of the loss, and its gradients.

        Args:
            params: Values of `ModelState.params`.
            carried: Values of `ModelState.carried`.
            data: (x, y, sample_weight) of this replica.
            shares: float64 (terms,): the replica's share of each compiled loss.
            rows_share: float64 scalar: the replica's share of the rows.
            first: float64 scalar: 1 on the first replica, else 0; weight penalties count once.
            scale: float32 scalar that multiplies the loss before differentiation.
            view: What the loss sees of the outputs; the outputs themselves by default.

        Returns:
            Dict of `loss` (this replica's part of the sum), `terms` (its part of each compiled
            loss), `loss_parts` (its part of the rest of the loss, see `kdist.program.loss_parts`),
            `gradients` (of the connected variables), `updated` (new values of the state that was
            written), `outputs`, `masks`.
        """
        given = (params, carried, data, shares, rows_share, first, scale)
        trained = params[: len(self.state.trainable)]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(trained)
            result = self.loss(
                params, carried, data, shares, rows_share, first, training=True, view=view
            )
            target = result["loss"] * tf.cast(scale, result["loss"].dtype)
        gradients = tape.gradient(target, trained)
        if tf.executing_eagerly() and any(map(sparse.is_sparse, gradients)):
            self.eager.learn(self, given)
        result["gradients"] = self.connected(gradients, data)
        return result

    def loss(
        self,
        params: list[Any],
        carried: list[Any],
        data: tuple[Any, Any, Any],
        shares: Any,
        rows_share: Any,
        first: Any,
        training: bool,
        view: Callable[[Any], Any] | None = None,
    ) -> dict[str, Any]:
        """The forward pass and this replica's part of the loss; see `loss_and_gradients`."""
        x, y, sample_weight = data
        scope = self.scope(params, carried)
        with scope:
            outputs = self._call(x, training)
            seen = outputs if view is None else view(outputs)
            value, terms = self.compiled_loss(seen, y, sample_weight, shares, rows_share)
            values = [] if value is None else [value]
            extra = self._extra_losses(scope, rows_share, first, training)
            values += [part for _, part in extra]
        if not values:
            raise self.no_loss()
        self.traced(training).note_counts(terms)
        total = values[0] if len(values) == 1 else ops.sum(ops.stack(values))
        return {
            "loss": total,
            "terms": [t.value for t in terms],
            "loss_parts": collected(extra),
            "updated": self.collect_updates(scope, self.traced(training)),
            "outputs": outputs,
            "masks": with_logits(self.masks_of(outputs), logits_of(outputs)),
        }

    def compiled_loss(
        self, outputs: Any, y: Any, sample_weight: Any, shares: Any, rows_share: Any
    ) -> tuple[Any, list[SharedLoss]]:
        """A part's value of what `compile` got as loss, None without one, and its terms."""
        terms = [
            SharedLoss(loss, kind, shares[k], rows_share)
            for k, (loss, kind) in enumerate(zip(self._losses(), self.kinds))
        ]
        if not terms:
            return None, []
        with keras_trainer.replaced_losses(self.model, terms):
            return keras_trainer.compiled_loss(self.model)(y, outputs, sample_weight), terms

    def no_loss(self) -> ValueError:
        """What is wrong with a model that has nothing to minimise."""
        return ValueError(
            "There is no loss to minimise. Pass `loss=` to `compile()`, or call `add_loss` in "
            f"a layer. Received: model={self.model.name!r}"
        )

    def counts(
        self,
        params: list[Any],
        carried: list[Any],
        data: tuple[Any, Any, Any],
        rows: Any,
        training: bool,
    ) -> Any:
        """What Keras divides each compiled loss by on this replica: float64 (terms,).

        Only masks survive from the forward pass in a graph. What its layers do besides (print,
        assert, call Python) they do in the pass that follows.
        """
        x, y, sample_weight = data

        def counted() -> Any:
            with self.scope(params, carried):
                outputs = self._call(x, training)
                terms = [CountedLoss(e, kind, rows) for e, kind in zip(self._losses(), self.kinds)]
                with keras_trainer.replaced_losses(self.model, terms):
                    keras_trainer.compiled_loss(self.model)(y, outputs, sample_weight)
            self.traced(training).note_counts(terms)
            return tf.stack([t.count for t in terms])

        return counted() if tf.executing_eagerly() else without_effects(counted)

    def collect(
        self, params: list[Any], carried: list[Any], x: Any, training: bool
    ) -> dict[str, Any]:
        """The forward pass with everything it collects, and no loss."""
        outputs, scope = self.forward(params, carried, x, training)
        added, traced = keras_trainer.add_loss_values(scope), self.traced(training)
        layers = keras_models.flat_layers(self.model)
        traced.adders = [keras_trainer.adder_of(layers, value) for value in added]
        return {
            "outputs": outputs,
            "masks": with_logits(self.masks_of(outputs), logits_of(outputs)),
            "added": [ops.sum(value) for value in added],
            "terms": [],
            "updated": self.collect_updates(scope, traced),
        }

    def connected(self, found: Sequence[Any], data: Any) -> list[Any]:
        """Gradients that exist; notes whose they are, and which rows depend on the batch."""
        leaves = tf.nest.flatten(data, expand_composites=True)
        sources = [t for t in leaves if t is not None]
        self.trained.connected = [i for i, g in enumerate(found) if g is not None]
        for variable, gradient in zip(self.state.trainable, found):
            refuse_added(variable, gradient)
        given, self.trained.rows = list(found), {}
        for i, g in enumerate(found):
            if g is not None and sparse.is_sparse(g):
                given[i], how = sparse.arranged(g, sources)
                self.trained.rows[i] = self.eager.known(i, how)
        for i, look_up in self.tables.look_ups.items():
            if found[i] is not None:
                self.trained.rows[i] = look_up
        return [g for g in given if g is not None]

    def scope(self, params: Sequence[Any], carried: Sequence[Any]) -> ForwardScope:
        """The scope in which the model's variables have these values."""
        mapping = [*zip(self.state.params, params), *zip(self.state.carried, carried)]
        return self.scope_of(mapping, self.state.trainable)

    def scope_of(
        self, mapping: Sequence[tuple[keras.Variable, Any]], trainable: Sequence[keras.Variable]
    ) -> ForwardScope:
        """The scope in which some variables have these values, and tables these rows."""
        if not self.tables:
            return ForwardScope(mapping, trainable)
        placed = {id(layer.embeddings) for layer in self.tables.layers}
        rows = TableRows({id(v): value for v, value in mapping if id(v) in placed})
        mapping = [(v, value) for v, value in mapping if id(v) not in placed]
        return ForwardScope(mapping, trainable, rows, self.tables.layers)

    def _call(self, x: Any, training: bool) -> Any:
        # A layer's own `tf.function` would go on with the variables, or values, of another trace.
        with named(self.blocks), keras_seeds.drawing_from(self.unseeded), traced_anew({}):
            if keras_models.takes_training(self.model):
                return self.model(x, training=training)
            return self.model(x)

    def gives_means(self, training: bool, layer: keras.Layer | None) -> bool:
        """Whether what a layer gives to `add_loss` in such a pass is averaged over replicas."""
        study = self.row_studies.get(training)
        return self.add_loss_mean and (study is None or layer not in study.row_adders)

    def _losses(self) -> list[Any]:
        return [entry.loss for entry in keras_trainer.compiled_losses(self.model)]

    def _extra_losses(
        self, scope: keras.StatelessScope, rows_share: Any, first: Any, training: bool
    ) -> list[tuple[str, Any]]:
        """`add_loss` values by the share of rows (or summed where there are), penalties once."""
        layers = keras_models.flat_layers(self.model)
        means = functools.partial(self.gives_means, training)
        extra = added_parts(scope, layers, rows_share, means)
        for variable, value in keras_trainer.regularization_losses(self.model):
            value = ops.sum(value) * ops.cast(first, value.dtype)
            extra.append((penalty_name(variable), ops.cast(value, keras.config.floatx())))
        return extra

    def collect_updates(self, scope: ForwardScope, traced: TraceFacts) -> list[Any]:
        """New values of the variables that the forward pass wrote.

        Raises:
            ValueError: It wrote a variable that the model does not list: the value would be lost,
                or each replica's.
        """
        refuse_unlisted_writes(self.model.name)
        listed = {id(v) for v in self.state.written}
        lost = [v.path for key, v in scope.written.items() if key not in listed]
        if lost:
            raise ValueError(
                "A layer writes variables that the model does not list, so what it writes would be "
                "lost. Make them weights of the layer: self.add_weight(..., trainable=False). "
                f"Received: model={self.model.name!r}, which writes {lost}"
            )
        pairs = [(scope.current(v), scope.given.get(id(v))) for v in self.state.written]
        traced.updated = [i for i, (now, given) in enumerate(pairs) if now is not given]
        return [pairs[i][0] for i in traced.updated]

    @staticmethod
    def masks_of(outputs: Any) -> list[Any]:
        """The Keras mask of each flat output that carries one, with its position implied."""
        return [keras_trainer.get_mask(o) for o in keras.tree.flatten(outputs)]


def attach_masks(outputs: Any, masks: Sequence[Any]) -> Any:
    """Puts masks and logits that a program returned back on its outputs, and returns these."""
    outputs = attach_logits(outputs, logits_among(masks))
    for leaf, mask in zip(keras.tree.flatten(outputs), masks):
        if mask is not None:
            keras_trainer.set_mask(leaf, mask)
    return outputs
