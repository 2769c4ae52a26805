"""``ingot formats``, ``ingot codecs`` and ``ingot recipes``: what there is, and what carries what."""

from __future__ import annotations

from typing import Annotated

from ingot.cli.declare import declare
from ingot.cli.output import Json, render
from ingot.core.options import About


@declare("formats")
def formats(json: Json = False) -> None:
    """List the formats, their suffixes, and the codecs that each carries."""
    from ingot.inspect.catalog import formats_report

    render(formats_report(), json=json)


@declare("codecs")
def codecs(json: Json = False) -> None:
    """List the codecs, whether they are lossless, and the formats that carry them."""
    from ingot.inspect.catalog import codecs_report

    render(codecs_report(), json=json)


@declare("recipes")
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
