"""``ingot verify``."""

from __future__ import annotations

from typing import Annotated

import typer

from ingot.cli.output import Json, print_json, progress_bar, reader_may_leave
from ingot.cli.tables import line

EPILOG = (
    "Examples:\n\n  ingot verify model.zt\n\n  ingot verify ./Llama-3-8B --json\n\n  ingot verify model.squizd --strict"
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify", epilog=EPILOG)(command)


def command(
    path: Annotated[str, typer.Argument(help="File or folder.")],
    strict: Annotated[
        bool, typer.Option("--strict", help="Treat what is allowed but not canonical as an error.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar; print errors only.")] = False,
    json: Json = False,
) -> None:
    """Check that a checkpoint is whole and well-formed: structure, digests, every tensor decodes.

    Exit code 1 if it is not.
    """
    from ingot.ops.check.verify import verify

    with progress_bar("verifying", quiet=quiet or json) as progress:
        findings = verify(path, strict, progress=progress)
    errors = [item for item in findings if item.level == "error"]
    with reader_may_leave():  # the exit code is an answer of its own
        if json:
            print_json({"path": str(path), "ok": not errors, "findings": findings})
        else:
            for item in errors if quiet else findings:
                line(f"{item.level}: {item.where}: {item.message} [{item.rule}]")
            if not quiet:
                verdict = "ok" if not errors else f"{len(errors)} error(s)"
                line(
                    f"{path}: {verdict}"
                    + (f", {len(findings) - len(errors)} note(s)" if len(findings) > len(errors) else "")
                )
    raise typer.Exit(1 if errors else 0)
