"""The command ``ingot largest``: the largest tensors of a checkpoint."""

from __future__ import annotations

import click

import ingot


@click.command(epilog="\b\nExample:\n  ingot largest model.safetensors --count 3")
@click.argument("checkpoint")
@click.option("--count", type=click.IntRange(min=1), default=5, show_default=True, help="Number of tensors to print.")
def largest(checkpoint: str, count: int) -> None:
    """Print the largest tensors of a checkpoint: stored bytes, codec and name.

    CHECKPOINT is a file, a folder or an address.
    """
    with ingot.open(checkpoint) as tensors:
        rows = sorted(((tensor.occupies, tensor.codec, name) for name, tensor in tensors.items()), reverse=True)
    for nbytes, codec, name in rows[:count]:
        print(f"{nbytes:>14,} {codec:<12} {name}")
