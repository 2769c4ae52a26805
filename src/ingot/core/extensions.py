"""The entries of the extensions that ship with Ingot: a copy of ``[project.entry-points]`` in ``pyproject.toml``.

Extensions use the groups that plugins use. This copy serves a source tree whose installed metadata is older, and it
spares programs that need no plugin the search for metadata. A test compares it with ``pyproject.toml``.
"""

from __future__ import annotations

EXTENSIONS: dict[str, dict[str, str]] = {
    "ingot.commands": {
        "cache": "ingot.cli.cache:command",
        "int4": "ingot.cli.int4:command",
        "kernel": "ingot.cli.kernel:command",
        "lut": "ingot.cli.lut:command",
        "plan": "ingot.cli.plan:command",
    },
    "ingot.draft_decoders": {
        "eagle3": "ingot.adapters.speculate:EagleDecoding",
    },
    "ingot.inspectors": {
        "anek": "ingot.cli.program:KernelInspector",
        "hwx": "ingot.cli.program:ProgramInspector",
    },
    "ingot.kv_caches": {
        "packed": "ingot.adapters.kv_cache:PackedCaching",
    },
    "ingot.mlx_functions": {
        "load_compressed_model": "ingot.adapters.compressed:load_compressed_mlx",
    },
    "ingot.model_preparers": {
        "squish": "ingot.ops.squish.preparer:TierPreparer",
    },
    "ingot.report_sections": {
        "chips": "ingot.ops.ane.report_section:ChipSection",
    },
    "ingot.stack_selectors": {
        "squizd": "ingot.targets.dispatch:SquizdStacks",
    },
}
"""Group to names to ``"module:attribute"``."""
