"""Stages that would change which layers see a Keras mask.

Some layers take the mask off their input tensor itself (`keras.layers.MultiHeadAttention` does).
Layers that read this tensor earlier see its mask, later ones do not. So they have to stay on the
same side of that layer as in the model's own call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from kdist.pipeline.graph import Graph


def check_mask_order(
    graph: Graph, stages: Sequence[Sequence[str]], unmasked: Mapping[str, Set[str]]
) -> None:
    """Refuses stages that run a reader of a tensor on the other side of what takes its mask off.

    Args:
        graph: Nodes in the order of the model's own call.
        stages: Node names of each virtual stage, in the order in which they run.
        unmasked: By node, the tensors that it takes the mask off.

    Raises:
        ValueError: Naming the two layers.

    Example:
    ```python
    check_mask_order(graph, partition.stages, {"attention": {"embedding"}})
    ```
    """
    own = {node.name: i for i, node in enumerate(graph.nodes)}
    stage_of = {name: stage for stage, names in enumerate(stages) for name in names}
    position = {name: i for i, name in enumerate(n for names in stages for n in names)}
    for taker, tensors in unmasked.items():
        for node in graph.nodes:
            reader = node.name
            turned = (own[reader] < own[taker]) != (position[reader] < position[taker])
            if turned and tensors & set(node.inputs):
                when = "before" if own[reader] < own[taker] else "after"
                raise ValueError(
                    f"Layer {taker!r} takes the Keras mask off its input {min(tensors)!r}. Layer "
                    f"{reader!r} reads it {when} that in the model's own call; in these stages it "
                    "is the other way round. Put both on one stage, or in the model's order. "
                    f"Received: {taker!r} on stage {stage_of[taker]}, {reader!r} on stage "
                    f"{stage_of[reader]}"
                )
