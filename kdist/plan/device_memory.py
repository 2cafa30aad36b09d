"""How much memory a device of a mesh takes, by what it is for."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device.

    `gradients` and what follows are None where the step was not analysed. They are the most that
    any order of execution can have alive; of what is inside programs only `activations` knows.

    Attributes:
        device: TensorFlow device string.
        parameters: Weights, trainable or not, masters of whole-tensor optimizers included.
        slots: Optimizer state, sums of accumulated gradients included.
        compression: What low-rank compression keeps from step to step.
        gradients: Gradients of parameters, from where they are made to where they are used.
        gathered: Parameters that come from other devices: gathered before use, or updated there.
        both: Gradients and gathered parameters that may be there at the same time.
        activations: What the model's programs make beside these, temporaries included, and keep for
            the backward pass, or make again in it.
        live: All tensors of the step that may be, activations that wait for the backward pass
            included.
        rows: Of the global batch of the step that was analysed.
    """

    device: str
    parameters: int
    slots: int
    compression: int = 0
    gradients: int | None = None
    gathered: int | None = None
    both: int | None = None
    activations: int | None = None
    live: int | None = None
    rows: int | None = None
