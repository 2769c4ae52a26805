"""``ingot formats``, ``ingot codecs`` and ``ingot recipes``: what there is, and what carries what."""

from __future__ import annotations

from typing import Annotated

import typer

from ingot.cli.output import Json, print_json
from ingot.cli.tables import table


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("formats")(formats)
    app.command("codecs")(codecs)
    app.command("recipes")(recipes)


def formats(json: Json = False) -> None:
    """List the formats, their suffixes, and the codecs that each carries."""
    from ingot.ops.catalog import formats as known

    rows = known()
    if json:
        print_json(rows)
        return
    table(
        ("format", "suffixes", "carries", "what it is"),
        [(item.name, " ".join(item.suffixes), ", ".join(item.codecs), item.summary) for item in rows],
        left=4,
    )


def codecs(json: Json = False) -> None:
    """List the codecs, whether they are lossless, and the formats that carry them."""
    from ingot.ops.catalog import codecs as known

    rows = known()
    if json:
        print_json(rows)
        return
    table(
        ("codec", "lossless", "carried by", "what it is"),
        [(item.name, "yes" if item.lossless else "no", ", ".join(item.formats), item.summary) for item in rows],
        left=4,
    )


def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this preset's TOML, to start a recipe of your own.")] = None,
    json: Json = False,
) -> None:
    """List the preset recipes, or print one as TOML."""
    from ingot.recipes.load import PRESETS, load_recipe, preset_text

    if name is not None:
        print(preset_text(name), end="")
        return
    rows = [(preset, " ".join(load_recipe(preset).description.split())) for preset in PRESETS]
    if json:
        print_json([{"name": preset, "description": text} for preset, text in rows])
        return
    table(("recipe", "what it does"), rows, left=2)
