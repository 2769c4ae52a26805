"""The commands ``ingot verify`` and ``ingot seal``."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from click.exceptions import Exit

from ingot.cli.declare import declare
from ingot.cli.output import Json, Quiet, line, progress_bar, render
from ingot.core.about import About
from ingot.inspect.options import SealOptions, VerifyOptions

EPILOG = (
    "Examples:\n\n"
    "  ingot verify model.zt\n\n"
    "  ingot verify ./Llama-3-8B --json\n\n"
    "  ingot verify ./Llama-3-8B-w4 --for vllm\n\n"
    "  ingot verify ./my-lora --base ./Llama-3-8B\n\n"
    "  ingot verify model.squizd --strict\n\n"
    "  ingot verify ./Llama-3-8B --signature model.sig --public-key author.pub\n\n"
    "  ingot verify s3://bucket/model --engine ray"
)


@declare("verify", EPILOG)
def command(
    options: VerifyOptions,
    quiet: Annotated[bool, About("No progress bar; print errors only.", ("--quiet", "-q"))] = False,
    json: Json = False,
) -> None:
    """Check that a checkpoint is complete and well-formed: structure, digests, every tensor decodes.

    With --for, also check that a program would load it. Exit code 1 if a check fails.
    """
    from ingot.inspect.findings import finding_text, verify_report
    from ingot.inspect.verify import verify

    with progress_bar("verifying", quiet=quiet or json) as progress:
        findings = verify(replace(options, progress=progress))
    errors = [item for item in findings if item.level == "error"]
    if quiet and not json:
        for item in errors:
            line(finding_text(item))
    else:
        render(verify_report(options.path, findings), json=json)
    raise Exit(1 if errors else 0)


SEAL_EPILOG = (
    "Examples:\n\n"
    "  ingot seal model.safetensors\n\n"
    "  ingot seal ./Llama-3-8B --sign author.key\n\n"
    "  ingot verify --repair --from https://host/model.safetensors model.safetensors"
)


@declare("seal", SEAL_EPILOG)
def seal(options: SealOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Write digests of a checkpoint's files to X.ingot.json next to each file, for containers without digests.

    Ingot compares each chunk that it reads from a remote store with them. `ingot verify` checks all chunks, and
    `ingot verify --repair` replaces damaged ones. With --sign, also sign all files, as other tools for OpenSSF's
    model signatures verify it.
    """
    from ingot.inspect.seal import seal as write_digests
    from ingot.inspect.seal import sealed_report

    with progress_bar("sealing", quiet=quiet or json) as progress:
        written = write_digests(replace(options, progress=progress))
    render(sealed_report(written), json=json, quiet=quiet)
