"""The entries of the extensions that ship with Ingot: a copy of ``[project.entry-points]`` in ``pyproject.toml``.

Extensions use the same groups as plugins. This copy is valid even if the installed metadata is older than the source
tree, and programs that use no plugin need not search for metadata. A test compares it with ``pyproject.toml``.
"""

from __future__ import annotations

EXTENSIONS: dict[str, dict[str, str]] = {
    "ingot.commands": {
        "cache": "ingot.ext.squish.cli.cache:command",
        "int4": "ingot.ext.squish.cli.int4:command",
        "kernel": "ingot.ext.ane.cli.kernel:command",
        "lut": "ingot.ext.ane.cli.lut:command",
        "plan": "ingot.ext.ane.cli.plan:command",
    },
    "ingot.draft_decoders": {
        "eagle3": "ingot.ext.serving.speculate:EagleDecoding",
    },
    "ingot.format_signs": {
        "anek": "ingot.ext.signs:ANEK",
        "npy": "ingot.ext.signs:NPY",
        "npydir": "ingot.ext.signs:NPYDIR",
        "npz": "ingot.ext.signs:NPZ",
        "squizd": "ingot.ext.signs:SQUIZD",
    },
    "ingot.formats": {
        "anek": "ingot.ext.ane.kernel_units.format:AnekFormat",
        "npy": "ingot.ext.squish.npydir.finalized:NpyFormat",
        "npydir": "ingot.ext.squish.npydir.format:NpydirFormat",
        "npz": "ingot.ext.squish.npydir.npz:NpzFormat",
        "squizd": "ingot.ext.squizd.format:SquizdFormat",
    },
    "ingot.inspectors": {
        "anek": "ingot.ext.ane.cli.program:KernelInspector",
        "hwx": "ingot.ext.ane.cli.program:ProgramInspector",
    },
    "ingot.kv_caches": {
        "packed": "ingot.ext.serving.kv_cache:PackedCaching",
    },
    "ingot.mlx_functions": {
        "load_compressed_model": "ingot.ext.squish.compressed:load_compressed_mlx",
    },
    "ingot.model_preparers": {
        "squish": "ingot.ext.squish.tiers.prepare:TierPreparer",
    },
    "ingot.report_sections": {
        "chips": "ingot.ext.ane.report_section:ChipSection",
    },
    "ingot.stack_selectors": {
        "squizd": "ingot.ext.squizd.dispatch:SquizdStacks",
    },
}
"""Maps each group to its entries: names and ``"module:attribute"``."""
