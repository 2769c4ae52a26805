"""The command ``ingot store``."""

from __future__ import annotations

from dataclasses import replace

from click.exceptions import Exit

from ingot.cli.declare import declare
from ingot.cli.help import Group
from ingot.cli.output import Json, Quiet, progress_bar, render
from ingot.library.options import (
    AddOptions,
    CheckOptions,
    CollectOptions,
    GetOptions,
    ListOptions,
    RemoveOptions,
)

EPILOG = (
    "Examples:\n\n"
    "  ingot store add ./library ./base --name org/base\n\n"
    "  ingot store add ./library ./finetune --name org/finetune\n\n"
    "  ingot store ls ./library\n\n"
    "  ingot store get ./library org/finetune ./copy\n\n"
    "  ingot store get ./library org/lora ./merged --merge\n\n"
    "  ingot inspect library:./library!org/finetune\n\n"
    "  ingot store rm ./library org/base\n\n"
    "  ingot store gc ./library --dry-run"
)


@declare("add")
def add(options: AddOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Add a folder or file with its full contents; tensors that the library already contains are not stored again.

    A new tensor is compressed, or stored as a difference to the nearest artifact's tensor if that is smaller. Before
    the artifact is listed, all files are rebuilt from the library and compared.
    """
    from ingot.library.add import add as add_to

    with progress_bar("adding", quiet=quiet or json) as progress:
        added = add_to(replace(options, progress=progress))
    render(added.report(), json=json, quiet=quiet)


@declare("get")
def get(options: GetOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Write an artifact bit for bit as it was added, or convert it to another container.

    With --merge, an adapter is merged into its base.
    """
    from ingot.library.get import get as get_from

    with progress_bar("writing", quiet=quiet or json) as progress:
        got = get_from(replace(options, progress=progress))
    render(got.report(), json=json, quiet=quiet)


@declare("ls")
def ls(options: ListOptions, json: Json = False) -> None:
    """List the artifacts: the size of their files, the bytes stored for them, and the shared part of these bytes."""
    from ingot.library.keep import ls as list_all

    render(list_all(options).report(), json=json)


@declare("rm")
def rm(options: RemoveOptions) -> None:
    """Remove an artifact from the list; `ingot store gc` then deletes the objects that no other artifact needs."""
    from ingot.library.keep import rm as remove

    remove(options)


@declare("gc")
def gc(options: CollectOptions, json: Json = False) -> None:
    """Delete unused objects and remains of interrupted additions; refuse if another process uses the library."""
    from ingot.library.keep import gc as collect

    render(collect(options).report(), json=json)


@declare("verify")
def verify(options: CheckOptions, quiet: Quiet = False, json: Json = False) -> None:
    """Check that all objects of the artifacts exist and match their digests; exit code 1 if anything is damaged."""
    from ingot.inspect.findings import verify_report
    from ingot.library.keep import verify as check

    with progress_bar("verifying", quiet=quiet or json) as progress:
        findings = check(replace(options, progress=progress))
    render(verify_report(options.library, findings), json=json, quiet=quiet)
    if any(item.level == "error" for item in findings):
        raise Exit(1)


command = Group(
    "store",
    commands=[add, get, ls, rm, gc, verify],
    help="Many models in one folder or bucket: each tensor once, fine-tunes as exact differences.",
    no_args_is_help=True,
    epilog=EPILOG,
)
