"""The commands ``ingot archive`` and ``ingot restore``."""

from __future__ import annotations

from dataclasses import replace

from click.exceptions import Exit

from ingot.archives.options import ArchiveOptions, RestoreOptions
from ingot.cli.declare import declare
from ingot.cli.output import Json, Quiet, progress_bar, render

EPILOG = (
    "Examples:\n\n"
    "  ingot archive ./Llama-3-8B -o llama.zt\n\n"
    "  ingot archive model-Q4_K_M.gguf -o model.zt\n\n"
    "  ingot verify llama.zt\n\n"
    "  ingot restore llama.zt -o ./Llama-3-8B"
)


@declare("archive", EPILOG)
def command(options: ArchiveOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Put a file, or a folder with all of its files, into one .zt that restores them byte for byte.

    Equal tensors are stored once, in any file and under any name. Before the archive appears, all files are restored
    from it and compared. The archive can be opened like the model in it.
    """
    from ingot.archives.archive import archive

    with progress_bar("archiving", quiet=quiet or json) as progress:
        archived = archive(replace(options, progress=progress))
    render(archived.report(), json=json, quiet=quiet)


RESTORE_EPILOG = (
    "Examples:\n\n"
    "  ingot restore llama.zt -o ./Llama-3-8B\n\n"
    "  ingot restore llama.zt -o ./tokenizer --only 'tokenizer*' --only config.json\n\n"
    "  ingot restore https://host/llama.zt -o ./Llama-3-8B"
)


@declare("restore", RESTORE_EPILOG)
def restore(options: RestoreOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Restore the files of an archive; each must have the SHA-256 of the original.

    If the archive is damaged or was cut off, the complete files are restored, the others are listed, and the exit
    code is 1.
    """
    from ingot.archives.restore import restore as restore_files

    with progress_bar("restoring", quiet=quiet or json) as progress:
        restored = restore_files(replace(options, progress=progress))
    render(restored.report(), json=json, quiet=quiet)
    if restored.damaged:
        raise Exit(1)
