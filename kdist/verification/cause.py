"""The likely cause of differences, from where they begin. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kdist.verification.study import Study
from kdist.verification.tolerance import Difference


def likely_cause(differences: Sequence[Difference], study: Study, own_step: str = "") -> str:
    """Says what probably makes a mesh differ from one device.

    A step goes from layers to outputs, loss, gradients and update: what comes first is the cause of
    what comes after it.

    Args:
        differences: What differs, worst first.
        study: What the layers give for each replica's rows alone, random layers and
            BatchNormalization left out.
        own_step: The `train_step` that the model overrides, for the user; "" if it has Keras's.
    """
    if not differences:
        return ""
    if study.layer is not None:
        if study.random:
            return (
                f"layer {study.layer!r} ({study.text}) draws random numbers in inference too, in a "
                "way that a comparison can neither switch off nor make equal."
            )
        return (
            f"rows of the batch meet in layer {study.layer!r} ({study.text}): a replica sees its "
            "own rows only."
        )
    worst = {kind: [d for d in differences if d.kind == kind] for kind in _ORDER}
    if found := worst["output"]:
        return (
            f"output {found[0].name!r} differs, and no layer does on the rows of each replica: it "
            "arises in the parallel execution (layouts, gathers, stages)."
        )
    if found := worst["training_output"]:
        return (
            f"output {found[0].name!r} agrees in inference and not in training mode, and no layer "
            "differs on the rows of each replica: it arises in the parallel execution of what "
            "layers do in training."
        )
    if own_step:
        first = next(d for kind in _OF_STEPS for d in worst[kind])
        return (
            f"{first.kind} {first.name!r} of {own_step} differs; outputs agree, and so does every "
            "layer on the rows of each replica. What the step itself computes is not looked into: "
            "compare its parts, or the calls of a layer that it calls several times, by returning "
            "them from it."
        )
    if found := sorted(worst["loss"], key=lambda d: d.name == "loss"):  # parts before their sum
        if study.added:
            return (
                f"add_loss of layer {', '.join(map(repr, study.added))} is no mean over rows. If "
                "it is a sum over rows, set loss_from_layers='sum'."
            )
        return (
            f"the outputs agree and the loss term {found[0].name!r} does not: it couples rows, or "
            "is combined over the replicas by other weights than on one device."
        )
    if found := worst["gradient"]:
        paths = ", ".join(repr(d.name) for d in found[:3])
        return (
            f"outputs and loss agree and the gradient of {paths} does not: it is lost, or not "
            "summed over all devices, in the parallel execution."
        )
    return _late_cause(worst)


_ORDER = ("output", "training_output", "loss", "gradient", "metric", "state", "weight", "slot")
_OF_STEPS = ("loss", "metric", "gradient", "weight", "slot", "state")


def _late_cause(worst: dict[str, list[Difference]]) -> str:
    """Where outputs, loss and gradients agree."""
    if found := worst["weight"] or worst["slot"]:
        return (
            f"the gradients agree and {found[0].name!r} after the update does not: it arises in "
            "the optimizer's update over the mesh, or where gradients are sent to it."
        )
    if found := worst["metric"]:
        return (
            f"metric {found[0].name!r} depends on how many parts the batch comes in: it is no sum "
            "or mean over rows, or counts its updates."
        )
    found = worst["state"]
    return (
        f"the state {found[0].name!r} of a layer is not a mean or a sum over the replicas that "
        "kdist knows how to combine."
    )
