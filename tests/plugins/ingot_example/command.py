"""The command ``ingot largest``: the largest tensors of a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

import ingot


def register(app: typer.Typer) -> None:
    """Add the command to Ingot's command line."""
    app.command("largest", epilog="Examples:\n\n  ingot largest model.safetensors --count 3")(largest)


def largest(
    path: Annotated[str, typer.Argument(help="Checkpoint: a file, a folder or an address.")],
    count: Annotated[int, typer.Option(min=1, help="Number of tensors to print.")] = 5,
) -> None:
    """Print the largest tensors of a checkpoint: stored bytes, codec and name."""
    with ingot.open(path) as checkpoint:
        rows = sorted(((tensor.occupies, tensor.codec, name) for name, tensor in checkpoint.items()), reverse=True)
    for nbytes, codec, name in rows[:count]:
        print(f"{nbytes:>14,} {codec:<12} {name}")
