"""The keys of ``quantization_config`` in folders of compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping

from ingot.formats.packed_folders.config_keys import ANY, Key, Table, irrelevant, refused, repeated, used

_OBSERVER = repeated(irrelevant("how scales were chosen"), "observer observer_kwargs")
_TYPES = repeated(irrelevant("the type of the scales or zero points; the entries show it"), "scale_dtype zp_dtype")

WEIGHTS: Table = {
    **_OBSERVER,
    **_TYPES,
    "num_bits": used("bits of a code"),
    "type": used("integers or floats"),
    "symmetric": used("whether there are zero points; the entries show it"),
    "strategy": used("what shares a scale; shapes show it"),
    "group_size": used("columns of a group"),
    "block_structure": used("rows and columns of a block"),
    "actorder": used("whether groups are runs of columns; weight_g_idx shows it"),
    "dynamic": refused("scales of weights are computed while the model runs"),
}
"""Keys of ``weights`` in a group: the package's ``QuantizationArgs``."""

ACTIVATIONS: Table = {
    **_OBSERVER,
    **_TYPES,
    **repeated(
        used("how inputs or outputs are quantized"),
        "num_bits type symmetric strategy group_size block_structure actorder dynamic",
    ),
}
"""Keys of ``input_activations``, ``output_activations`` and ``kv_cache_scheme``; dropped settings are shown in
reports."""

GROUP: Table = {
    "targets": used("layers of the group, if they are named"),
    "weights": used("how weights are packed", WEIGHTS),
    "input_activations": used("how inputs are quantized", ACTIVATIONS),
    "output_activations": used("how outputs are quantized", ACTIVATIONS),
    "format": used("how weights are packed"),
}
"""Keys of a group: the package's ``QuantizationScheme``."""

KEYS: Mapping[str, Key] = {
    "quant_method": used("the dialect"),
    "format": used("how weights are packed"),
    "config_groups": used("groups of layers", {ANY: used("one group", GROUP)}),
    "kv_cache_scheme": used("how keys and values are quantized", ACTIVATIONS),
    "ignore": used("layers that are dense; kept in the result"),
    "quantization_status": irrelevant("whether weights are packed; the entries show it"),
    "global_compression_ratio": irrelevant("a figure"),
    "version": irrelevant("the version of the writing program"),
    "provider": irrelevant("the writing program"),
    "run_compressed": irrelevant("a setting of the program that loads the folder"),
    "dequantize": irrelevant("a setting of the program that loads the folder"),
    "use_optimized_inference": irrelevant("a setting of the program that loads the folder"),
    "sparsity_config": used(
        "whether zeros are left out",
        {
            "format": refused("zeros of the weights are left out", "dense"),
            "registry_requires_subclass": irrelevant("a detail of the package"),
            **repeated(
                irrelevant("how sparse the weights are; the values show it"),
                "targets ignore global_sparsity sparsity_structure",
            ),
        },
    ),
    "transform_config": refused("inputs of layers are multiplied by a rotation or transform while the model runs"),
    "moe_sparsity_config": refused("experts are left out or replaced by constants"),
}
"""Keys of the package's ``QuantizationConfig`` in this and earlier releases."""
