"""`python -m kdist.checkpoint inspect | verify | consolidate DIRECTORY`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kdist.checkpoint import directory as directories
from kdist.checkpoint.codes import CODES
from kdist.checkpoint.manifest import CheckpointError, SavedArray
from kdist.checkpoint.one_file import consolidate
from kdist.checkpoint.snapshot import check
from kdist.checkpoint.store import dtype_of
from kdist.display.tables import print_prose

from rich.console import Console
from rich.filesize import decimal
from rich.progress import track
from rich.table import Table
from rich.text import Text


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kdist.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in (
        ("inspect", "print what is in the newest checkpoint, and which others there are"),
        ("verify", "read all of every checkpoint, and name what is damaged"),
        ("consolidate", "make one file: .keras, .weights.h5 or .safetensors"),
    ):
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("directory", type=Path, help="of checkpoints, or one checkpoint")
        if name == "consolidate":
            command.add_argument("out", type=Path, help="the file to write")
    given = parser.parse_args(arguments)
    console = Console()
    try:
        if given.command == "consolidate":
            made = consolidate(given.directory, given.out)
            print_prose(console, f"{made}: {decimal(made.stat().st_size)}")
            return 0
        found = _folders(given.directory)
        return (_inspect if given.command == "inspect" else _verify)(found, console)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1


def _folders(directory: Path) -> list[Path]:
    if (directory / directories.MANIFEST).exists():
        return [directory]
    if found := directories.folders(directory):
        return found
    raise CheckpointError(f"There is no whole checkpoint here. Received: {directory}")


def _inspect(found: Sequence[Path], console: Console) -> int:
    manifest = directories.load(found[-1])
    print_prose(console, f"{found[-1]}: step {manifest.step}, kdist {manifest.made_by}")
    if "epoch" in manifest.progress:
        epoch, batch = manifest.progress["epoch"], manifest.progress["batch"]
        console.print(f"training goes on in epoch {epoch + 1}, after {batch} batches of it")
    table = Table("group", "array", "dtype", "shape", "parts", "bytes")
    for group, array in manifest.arrays:
        shape = " x ".join(map(str, array.shape)) or "scalar"
        parts, size = str(len(array.parts)), decimal(_bytes(array))
        row = group, array.path, array.codes or array.dtype, shape, parts, size
        table.add_row(*map(Text, row))
    console.print(table)
    total = sum(_bytes(array) for _, array in manifest.arrays)
    console.print(f"{len(manifest.arrays)} arrays, {decimal(total)}")
    if others := [one.name for one in found[:-1]]:
        console.print(f"older: {', '.join(others)}")
    return 0


def _verify(found: Sequence[Path], console: Console) -> int:
    bad = 0
    for folder in track(found, "reading", console=console, transient=True):
        try:
            check(folder, directories.load(folder))
            print_prose(console, f"{folder}: whole")
        except CheckpointError as error:
            bad += 1
            console.print(Text.assemble(f"{folder}: ", ("damaged", "red"), f": {error}"))
    return 1 if bad else 0


def _bytes(array: SavedArray) -> int:
    return array.elements * (CODES if array.codes else dtype_of(array.dtype)).itemsize


if __name__ == "__main__":
    sys.exit(main())
