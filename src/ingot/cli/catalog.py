"""The commands that list what is installed: ``ingot formats``, ``codecs``, ``recipes`` and ``doctor``."""

from __future__ import annotations

import sys
from typing import Annotated

from click.exceptions import Exit

from ingot.cli.declare import declare
from ingot.cli.output import Json, render
from ingot.core.about import About


@declare("formats", "Examples:\n\n  ingot formats")
def formats(json: Json = False) -> None:
    """List the formats, their suffixes, and the codecs that each format can store."""
    from ingot.inspect.catalog import formats_report

    render(formats_report(), json=json)


@declare("codecs", "Examples:\n\n  ingot codecs")
def codecs(json: Json = False) -> None:
    """List the codecs, whether they are lossless, and the formats that can store them."""
    from ingot.inspect.catalog import codecs_report

    render(codecs_report(), json=json)


@declare("recipes", "Examples:\n\n  ingot recipes --for vllm\n\n  ingot recipes int4")
def recipes(
    name: Annotated[
        str | None, About("Print this preset's TOML, to start a recipe of your own.", argument=True)
    ] = None,
    runtime: Annotated[
        str | None, About("List the presets that this program runs, its defaults first.", ("--for",), metavar="RUNTIME")
    ] = None,
    json: Json = False,
) -> None:
    """List the preset recipes, or print one as TOML."""
    from ingot.inspect.catalog import recipes_report
    from ingot.recipes.load import preset_text

    if name is not None:
        print(preset_text(name), end="")
        return
    render(recipes_report(runtime), json=json)


@declare("doctor", "Examples:\n\n  ingot doctor\n\n  ingot doctor --for llama.cpp")
def doctor(
    runtime: Annotated[
        str | None,
        About("Show what this program, and writing for it, need, and what is missing.", ("--for",), metavar="RUNTIME"),
    ] = None,
    json: Json = False,
) -> None:
    """Check this installation: show its optional parts, and how to install the missing ones.

    Exit code 1: a part is broken, or one that the program of --for needs is missing.
    """
    from ingot.inspect.doctor import checks_report, examine, examine_runtime

    checks = examine() if runtime is None else examine_runtime(runtime)
    render(checks_report(checks), json=json)
    sys.stdout.flush()
    raise Exit(1 if any(item.state in ("bad", "missing") for item in checks) else 0)
