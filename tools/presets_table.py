"""Write ``src/ingot/recipes/runs_in.toml``, the programs that run each preset: ``python tools/presets_table.py``.

``tests/unit/conversion/test_preset_fit.py`` compares the file with what the profiles of programs accept.
"""

from __future__ import annotations

import json
from pathlib import Path

FILE = Path(__file__).resolve().parent.parent / "src/ingot/recipes/runs_in.toml"
_HEAD = """\
# The programs that run each preset, from the profiles of programs: written by tools/presets_table.py.
"""


def render() -> str:
    """Return the text of the file."""
    from ingot.conversion.preset_fit import plan_presets_of
    from ingot.recipes.load import ALL_PRESETS
    from ingot.runtimes.table import BUILT_IN, RUNTIMES

    programs = [RUNTIMES[name] for name in BUILT_IN]
    lines = [_HEAD]
    for preset in ALL_PRESETS:
        titles = [profile.title for profile in programs if preset in plan_presets_of(profile)]
        if titles:
            lines.append(f"{preset} = {json.dumps(titles)}\n")
    return "".join(lines)


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
