"""``ingot push`` and ``ingot pull``."""

from __future__ import annotations

from dataclasses import replace

from ingot.cli.declare import declare
from ingot.cli.output import Json, Quiet, line, progress_bar, render
from ingot.publishing.options import PullOptions, PushOptions

EPILOG = (
    "Examples:\n\n"
    "  ingot push ./Llama-3-8B-Q4 oci://registry.example.com/models/llama:q4\n\n"
    "  ingot push model.gguf oci://localhost:5000/llama:q4\n\n"
    "  ingot push ./Llama-3-8B-Q4 hf://me/Llama-3-8B-Q4 --dry-run"
)


@declare("push", EPILOG)
def command(options: PushOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Copy a model to a registry of OCI artifacts (oci://), or to the Hugging Face Hub (hf://).

    A registry gets a ModelPack artifact with a layer per file; what it has already is not sent again. The Hub gets one
    commit, with a model card if the model has none. Log in with `docker login` or `hf auth login`.
    """
    from ingot.publishing.push import push

    with progress_bar("pushing", quiet=quiet or json) as progress:
        pushed = push(replace(options, progress=progress))
    render(pushed.report(), json=json, quiet=quiet)
    if options.dry_run and pushed.card and not json and not quiet:
        for text in ("README.md:", *pushed.card.splitlines()):
            line(text, wrap=False)


PULL_EPILOG = (
    "Examples:\n\n"
    "  ingot pull oci://registry.example.com/models/llama:q4 -o ./llama\n\n"
    "  ingot pull oci://localhost:5000/llama@sha256:... -o ./llama --resume\n\n"
    "  ingot inspect oci://localhost:5000/llama:q4"
)


@declare("pull", PULL_EPILOG)
def pull(options: PullOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Copy the files of an artifact in a registry into a folder, and compare each with its SHA-256.

    The folder appears when all files are complete. Other commands read oci:// addresses without a copy.
    """
    from ingot.publishing.pull import pull as pull_files

    with progress_bar("pulling", quiet=quiet or json) as progress:
        pulled = pull_files(replace(options, progress=progress))
    render(pulled.report(), json=json, quiet=quiet)
