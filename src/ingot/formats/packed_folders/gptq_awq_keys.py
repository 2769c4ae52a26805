"""The keys of ``quantization_config`` in folders of GPTQ, AWQ and AutoRound."""

from __future__ import annotations

from ingot.formats.packed_folders.config_keys import ANY, Key, irrelevant, refused, repeated, used

CALIBRATION = repeated(
    irrelevant("a setting of the run that quantized the model"),
    "act_group_aware amp auto_forward_data_parallel awq_gemm_checkpoint batch_size cache_block_outputs "
    "calibration_data_device compute_device_filter damp_auto_increment damp_percent dataset dense_vram_strategy "
    "dense_vram_strategy_devices device enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input fallback "
    "foem gc_mode gptaq gradient_accumulate_steps hessian iters low_gpu_mem_usage lr minmax_lr mock_quantization moe "
    "moe_vram_strategy moe_vram_strategy_devices mse nsamples offload_to_disk offload_to_disk_path _offload_temp_dir "
    "pack_impl pad_token_id preprocessors scale_search_chunked_activations seqlen smooth smoother static_groups "
    "super_bits super_group_size supported_types tokenizer true_sequential wait_for_submodule_finalizers",
)
LOADING = repeated(
    irrelevant("a setting of the program that loads the folder"),
    "disable_exllama do_fuse exllama_config fuse_max_seq_len max_input_length model_file_base_name model_name_or_path "
    "model_seqlen modules_to_fuse use_cuda_fp16 use_exllama use_marlin",
)
WHICH_LAYERS = repeated(
    irrelevant("which layers are packed; the entries of the files show it"),
    "block_name_to_quantize lm_head module_name_preceding_first_block modules_in_block_to_quantize "
    "modules_to_not_convert quant_block_list to_quant_block_names",
)
META = irrelevant("names of the writing programs and settings of their run")
ROTATION = refused("inputs of layers are multiplied by a rotation, which Ingot does not apply")

_PER_LAYER = {
    "bits": used("bits of the layers that the pattern matches; shapes of the entries show it too"),
    "group_size": used("columns of a group in the layers that the pattern matches"),
    "sym": used("whether zero points of the layers that the pattern matches equal the middle code"),
    "desc_act": used("whether groups of the layers that the pattern matches are runs of columns; g_idx shows it"),
    "adapter": refused("a LoRA adapter is added to the layer"),
    "rotation": ROTATION,
    **CALIBRATION,
}
"""Keys of a rule in ``dynamic``."""

_COMMON: dict[str, Key] = {
    **CALIBRATION,
    **LOADING,
    **WHICH_LAYERS,
    "quant_method": used("the dialect"),
    "bits": used("bits of a code"),
    "group_size": used("columns of a group"),
    "desc_act": used("whether groups are runs of columns; g_idx shows it"),
    "dynamic": used("layers that differ", {ANY: used("one rule", _PER_LAYER)}),
    "pack_dtype": refused("codes are packed in integers of another size", "int32"),
    "adapter": refused("a LoRA adapter is added to the layers"),
    "rotation": ROTATION,
    "meta": META,
    "autoround_version": irrelevant("the version of the writing program"),
    "data_type": refused("codes are of another type", "int"),
    "model_free": irrelevant("a setting of the run that quantized the model"),
}

_AWQ_KERNELS = (
    *("auto", "auto_trainable", "autoawq", "exllama", "exllama_v1", "exllama_v2", "gemm", "gemm_triton", "gemv"),
    *("ipex", "machete", "marlin", "torch_awq", "torch_fused_awq"),
)
"""Values of ``backend`` that only name a kernel of the loading program."""

GPTQ_KEYS: dict[str, Key] = {
    **_COMMON,
    "sym": used("whether all zero points equal the middle code"),
    "method": refused("another algorithm's layout", "gptq"),
    "format": used("the layout; GPTQModel reads it before checkpoint_format"),
    "checkpoint_format": used("the layout, if format does not state it"),
    "is_marlin_format": refused("codes are packed for the Marlin kernel"),
    "backend": irrelevant("the kernel that the loading program uses"),
}

AWQ_KEYS: dict[str, Key] = {
    **_COMMON,
    "w_bit": used("bits of a code"),
    "q_group_size": used("columns of a group"),
    "method": refused("another algorithm's layout", "awq"),
    "version": used("the layout"),
    "format": used("the layout, by its newer name"),
    "checkpoint_format": used("the layout, as GPTQModel states it"),
    "zero_point": used("whether zero points differ from the middle code"),
    "sym": used("whether all zero points equal the middle code"),
    "backend": refused("codes are packed by llm-awq", *_AWQ_KERNELS),
}

_ACTIVATIONS = repeated(
    used("how inputs of layers are quantized"), "act_bits act_group_size act_sym act_data_type act_dynamic"
)
_SCHEME: dict[str, Key] = {
    **_ACTIVATIONS,
    "bits": used("bits of the layers that the name or pattern matches"),
    "group_size": used("columns of a group in the layers that the name or pattern matches"),
    "sym": used("whether zero points of the layers that the name or pattern matches equal the middle code"),
    "data_type": refused("codes of these layers are of another type", "int", "float", "mx_fp", "nv_fp", "fp"),
    "super_bits": irrelevant("a setting of GGUF exports"),
    "super_group_size": irrelevant("a setting of GGUF exports"),
    "rotation_config": ROTATION,
    "fixed_by_user": irrelevant("a setting of the run that quantized the model"),
    "scale_dtype": irrelevant("the type of the scales; the entries show it"),
    "in_blocks": irrelevant("which layers are packed; the entries of the files show it"),
}
"""Keys of a layer in ``extra_config``: AutoRound's ``QuantizationScheme``."""

AUTOROUND_KEYS: dict[str, Key] = {
    **_COMMON,
    **_ACTIVATIONS,
    "sym": used("whether all zero points equal the middle code"),
    "data_type": used("what codes are: integers, or floats with fewer bits"),
    "packing_format": used("whose layout the layers have"),
    "format": refused("another program's layout"),
    "backend": used("the layout in files of old versions; else the kernel of the loading program"),
    "vllm_backend": irrelevant("the kernel that the loading program uses"),
    "extra_config": used("layers that differ", {ANY: used("one layer or pattern", _SCHEME)}),
    "regex_config": used("layers that differ", {ANY: used("one pattern", _SCHEME)}),
    "fmt": refused("floats of another type", "e4m3", "e5m2"),
    "activation_scheme": used("how inputs of layers are quantized"),
    "scale_dtype": irrelevant("the type of the scales; the entries show it"),
    "rotation_config": ROTATION,
    "rotation_configs": ROTATION,
    "spinquant_config": ROTATION,
    **repeated(
        used("how keys, values and attention are quantized"),
        "static_kv_dtype static_kv_granularity static_attention_dtype static_attention_granularity",
    ),
}
