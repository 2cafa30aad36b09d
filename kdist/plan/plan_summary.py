"""The plan as text: tables and notes that are whole at any width of the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kdist.config.compression import Classes
from kdist.display.tables import Column, number, print_prose, readable, table
from kdist.plan.inside_layers import InsideTraffic

from rich.console import Console, RenderableType

if TYPE_CHECKING:
    from kdist.plan.device_memory import DeviceMemory
    from kdist.plan.plan import DevicePlan, Plan

NOT_LOWERED = "known once a step is lowered, by training or by model.plan(batch_size=...)"


def print_plan(plan: Plan, console: Console) -> None:
    """Prints a plan.

    Args:
        plan: The plan.
        console: Where to; its width decides how wide tables are.
    """
    width = console.width
    console.print(f"[bold]Plan[/bold]  {plan.topology.describe_axes()}", highlight=False)
    if any(not w.is_whole and not w.fetched for w in plan.weights):
        console.print(_weights(plan, width), "")
    else:
        near = sum(not w.fetched for w in plan.weights)
        print_prose(console, f"weights: {near}, all of them whole on every device")
    console.print(_devices(plan, width), "")
    if plan.memory and plan.memory[0].rows is not None:
        console.print(_step_memory(plan, width), "")
    console.print(_traffic(plan, width), "")
    if plan.inside is None:
        print_prose(console, f"communication inside layers: {NOT_LOWERED}")
    elif plan.inside:
        console.print(_inside_layers(plan.inside, width), "")
    if plan.boundaries:
        console.print(_between_stages(plan, width), "")
    if (crossing := plan.between_processes()) is not None:
        print_prose(console, str(crossing))
    if plan.tables():
        console.print(_tables(plan, width), "")
    if plan.host_tables():
        console.print(_host_tables(plan, width), "")
    if plan.split_tables():
        console.print(_split_tables(plan, width), "")
    if any(d.how != "whole" for d in plan.decisions):
        console.print(_spread(plan, width), "")
    if plan.classes is not None:
        console.print(_classes(plan.classes, width), "")
    for note in plan.notes:
        print_prose(console, f"note: {note}")


def _weights(plan: Plan, width: int) -> RenderableType:
    cut = [w for w in plan.weights if not w.is_whole and not w.fetched]
    near = sum(not w.fetched for w in plan.weights)
    whole = near - len(cut)
    title = f"weights: {near}, {whole} of them whole on every device"
    columns = [Column(name) for name in ("cut weight", "shape", "layout", "per device")]
    rows = [(w.path, str(w.shape), str(w.layout.dims), str(w.shards[0].shape)) for w in cut]
    return table(title, columns, rows, width)


def _devices(plan: Plan, width: int) -> RenderableType:
    """What each device keeps and updates; its stage too, if there are several."""
    staged = plan.topology.num_stages > 1
    columns = [Column("device"), *[number("stage")] * staged, number("replica")]
    columns += map(number, ("weights", "updates", "bytes updated"))
    columns += [number("optimizer state")] * bool(plan.memory)
    rows, plans = [], iter(plan.devices())
    for one in plan.topology.slices:
        for _ in one.devices:
            p = next(plans)
            where = [str(one.stage)] * staged + [str(one.index)]
            rows.append([p.device, *where, *_sizes(p)])
    for p in plans:
        rows.append([p.device, *["-"] * staged, "host", *_sizes(p)])
    return table("devices", columns, rows, width)


def _sizes(device: DevicePlan) -> list[str]:
    """What one keeps and updates."""
    state = [] if device.state_bytes is None else [readable(device.state_bytes)]
    sizes = [readable(device.parameter_bytes), str(device.updates)]
    return [*sizes, readable(device.updated_bytes), *state]


def _step_memory(plan: Plan, width: int) -> RenderableType:
    """What a step has on each device beside weights and state, at most."""
    columns = [Column("device"), *map(number, ("gradients", "gathered", "activations", "step"))]
    rows = [
        [one.device, *("-" if n is None else readable(n) for n in _of_step(one))]
        for one in plan.memory
    ]
    title = f"memory of a step with {plan.memory[0].rows} rows, at most"
    return table(title, columns, rows, width)


def _of_step(memory: DeviceMemory) -> tuple[int | None, ...]:
    return memory.gradients, memory.gathered, memory.activations, memory.live


def _traffic(plan: Plan, width: int) -> RenderableType:
    columns = [Column("what"), Column("axis")]
    columns += map(number, ("collectives", "messages", "bytes"))
    rows = [
        (t.what, t.axis, str(t.collectives), str(t.messages), readable(t.nbytes))
        for t in plan.traffic()
    ]
    return table("communication outside of layers, per step", columns, rows, width)


def _inside_layers(inside: Sequence[InsideTraffic], width: int) -> RenderableType:
    """What layers communicate over inner axes; bytes depend on the batch."""
    columns = [Column("what"), Column("axis"), Column("phase"), number("collectives")]
    columns.append(Column("bytes of results", prose=True))
    rows = [(t.kind, " x ".join(t.axis), t.phase, str(t.collectives), str(t)) for t in inside]
    return table("communication inside layers, per step", columns, rows, width)


def _between_stages(plan: Plan, width: int) -> RenderableType:
    """What stages send to each other; bytes depend on the batch."""
    columns = [Column("stages"), Column("tensors", prose=True), number("messages")]
    columns.append(Column("bytes", prose=True))
    rows = [
        (f"{t.source} > {t.target}", ", ".join(x.name for x in t.tensors), str(t.messages), str(t))
        for t in plan.between_stages()
    ]
    return table("activations and gradients between stages, per step", columns, rows, width)


def _tables(plan: Plan, width: int) -> RenderableType:
    """What is sent of embedding tables as rows, so that bytes depend on the batch."""
    columns = [Column("table"), number("messages"), Column("bytes", prose=True)]
    rows = [(t.path, str(t.messages), str(t)) for t in plan.tables()]
    return table(
        "rows of embedding tables, gradients and new values, per step",
        columns,
        rows,
        width,
    )


def _host_tables(plan: Plan, width: int) -> RenderableType:
    """What goes between the host and the devices, of tables that are there."""
    columns = [Column("table"), number("size"), number("messages"), Column("bytes", prose=True)]
    rows = [(t.path, readable(t.nbytes), str(t.messages), str(t)) for t in plan.host_tables()]
    return table("rows of tables on the host, per step", columns, rows, width)


def _split_tables(plan: Plan, width: int) -> RenderableType:
    """Tables that are split by hand, what look-ups in them send, and what others would."""
    columns = [Column("table"), Column("axis"), Column("parts"), Column("way"), number("messages")]
    columns.extend([Column("bytes", prose=True), Column("other ways", prose=True)])
    rows = [
        (t.path, t.axis, str(t.sizes), t.used.way, str(t.messages), str(t.used), t.compared())
        for t in plan.split_tables()
    ]
    return table("look-ups in tables split by hand, per step", columns, rows, width)


def _spread(plan: Plan, width: int) -> RenderableType:
    """Which parameters optimizer parallelism spreads, and why others stay whole."""
    columns = [Column("parameter"), Column("how"), Column("why", prose=True)]
    rows = [(d.path, d.how, d.reason) for d in plan.decisions]
    return table("optimizer parallelism", columns, rows, width)


def _classes(classes: Classes, width: int) -> RenderableType:
    """How gradients travel, and why."""
    ratio = classes.full_bytes / max(classes.nbytes, 1)
    columns = [Column("parameter"), Column("travels as"), number("bytes"), number("of")]
    columns.append(Column("why", prose=True))
    rows = [
        (e.path, str(e.compressor), readable(e.nbytes), readable(e.full_bytes), e.why)
        for e in classes.entries
    ]
    return table(f"gradients on the wire: {ratio:.1f} x fewer bytes", columns, rows, width)
