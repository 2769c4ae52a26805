"""``ingot verify``."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from click.exceptions import Exit

from ingot.cli.declare import declare
from ingot.cli.output import Json, line, progress_bar, render
from ingot.core.options import About
from ingot.inspect.options import VerifyOptions

EPILOG = (
    "Examples:\n\n"
    "  ingot verify model.zt\n\n"
    "  ingot verify ./Llama-3-8B --json\n\n"
    "  ingot verify ./Llama-3-8B-w4 --for vllm\n\n"
    "  ingot verify model.squizd --strict\n\n"
    "  ingot verify s3://bucket/model --engine ray"
)


@declare("verify", EPILOG)
def command(
    options: VerifyOptions,
    quiet: Annotated[bool, About("No progress bar; print errors only.", ("--quiet", "-q"))] = False,
    json: Json = False,
) -> None:
    """Check that a checkpoint is whole and well-formed: structure, digests, every tensor decodes.

    With --for, check also that a program would load it. Exit code 1 if it is not, or would not.
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
