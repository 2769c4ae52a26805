"""Options that several commands share. What a value may be stands in the help, so that no column of it is cut."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

Digest = Annotated[
    Literal["crc32c", "sha256", "none"],
    typer.Option(metavar="NAME", help="Digest written per part where the format has digests: crc32c, sha256 or none."),
]
Threads = Annotated[int | None, typer.Option(min=1, metavar="N", help="Threads; default: all processors.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a file, or a folder that holds a checkpoint and nothing else.")
]
MaxDecompressed = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        rich_help_panel="Limits",
        help="The most bytes that one compressed part of a file may become, such as 2GiB; default: "
        "INGOT_MAX_DECOMPRESSED.",
    ),
]
