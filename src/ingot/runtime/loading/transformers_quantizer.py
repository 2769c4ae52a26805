"""Let ``from_pretrained`` and ``save_pretrained`` of transformers handle folders that Ingot opens (``ingot.hf``).

Registering a quantizer is not enough: transformers looks for safetensors files before it calls a quantizer. So the two
methods are wrapped. The wrappers handle Ingot's folders and packed layers and pass everything else to the originals.

Importing this module needs torch and transformers; only ``ingot.hf`` imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import wraps
from inspect import signature
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    AutoHfQuantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from ingot.artifacts.open import detect, find
from ingot.artifacts.save import save
from ingot.artifacts.unsupported_packers import packer_of_config
from ingot.errors import IngotError, UnsupportedError, UsageError
from ingot.formats.detect import detect_folder, listing
from ingot.formats.packed_folders.base import PACKING_KEYS
from ingot.formats.safetensors.format import SafetensorsFormat
from ingot.model.stacks import STACK_SELECTORS
from ingot.model.tensor import Tensor
from ingot.naming.config import CONFIG, stored_config
from ingot.runtime.layers.packed_linear import PackedLinear, PackedWeight, put_layer
from ingot.runtime.loading.options import LoadOptions
from ingot.runtime.loading.preparers import preparer_for
from ingot.runtime.loading.transformers import ModelOverrides, load
from ingot.runtime.loading.transformers_weights import PACKED
from ingot.stores.location import Location

_LOGGER = logging.get_logger(__name__)
METHOD = "ingot"
_FILE = "model.zt"
# Arguments of from_pretrained that select a download from the Hub, or have no effect on a folder.
_HUB = ("cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "resume_download")
_WITHOUT_EFFECT = (
    "adapter_kwargs",
    "adapter_name",
    "low_cpu_mem_usage",
    "tqdm_class",
    "use_safetensors",
    "weights_only",
)
_IGNORED = frozenset(
    (*_HUB, *_WITHOUT_EFFECT, "token", "trust_remote_code", "_commit_hash", "_from_auto", "_from_pipeline")
)
# Flags whose value False equals the default. For other options, such as use_cache, False is a setting.
_FLAGS = frozenset(
    ("allow_all_kernels", "ignore_mismatched_sizes", "load_in_4bit", "load_in_8bit", "offload_buffers", "use_kernels")
)
# transformers applies these to weights from Ingot too.
_FORWARDED = frozenset(("attn_implementation", "experts_implementation", "output_loading_info"))
# Arguments of save_pretrained that have no effect on the files that Ingot writes.
_IGNORED_ON_SAVE = frozenset(
    ("self", "kwargs", "save_directory", "is_main_process", "safe_serialization", "max_shard_size")
)
_IGNORED_ON_SAVE |= {"save_peft_format", "save_original_format"}


class IngotConfig(QuantizationConfigMixin):  # type: ignore[misc, unused-ignore]
    """Settings for ``from_pretrained`` to load a folder with Ingot, even if transformers could load it itself.

    Parameters
    ----------
    keep_packed : bool, optional
        Whether to compute from the packed weights, or to decode them; by default true. For a ``.squizd`` file, the
        stack that runs it decides by default.
    strict : bool
        Refuse tensors for which the architecture has no parameter.
    verify : bool
        Check digests.
    max_ram : int or str, optional
        Limit for the memory of decoded weights, such as ``"2GiB"``.
    """

    def __init__(
        self,
        keep_packed: bool | None = None,
        strict: bool = True,
        verify: bool = True,
        max_ram: int | str | None = None,
        **unknown: Any,
    ) -> None:
        unknown.pop("quant_method", None)
        if unknown:
            raise UnsupportedError(
                f"expected keep_packed, strict, verify or max_ram, found {', '.join(map(str, sorted(unknown)))}",
                rule="model.option",
            )
        self.quant_method: Any = METHOD
        self.keep_packed = keep_packed
        self.strict = strict
        self.verify = verify
        self.max_ram = max_ram


class IngotQuantizer(HfQuantizer):  # type: ignore[misc, unused-ignore]
    """The quantizer that transformers finds on a model with packed layers."""

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Raise ``UnsupportedError``: transformers calls this to quantize, or for folders of other packages."""
        raise UnsupportedError(
            f"expected a folder that Ingot opens, but quant_method {METHOD!r} was set for another: create such a "
            "folder with ingot convert",
            rule="model.quantized",
        )

    def is_serializable(self) -> bool:
        """Return True: ``save_pretrained`` writes packed layers."""
        return True

    @property
    def is_trainable(self) -> bool:
        """False: packed weights have no gradient."""
        return False

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        for name, module in list(model.named_modules()):
            if isinstance(module, PackedWeight):
                put_layer(model, name, _decoded(module, dtype))
        _allow_saving(model)
        return model


def register() -> None:
    """Make transformers open Ingot's folders in this process. Later calls do nothing."""
    if METHOD in AUTO_QUANTIZER_MAPPING or METHOD in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return
    register_quantization_config(METHOD)(IngotConfig)
    register_quantizer(METHOD)(IngotQuantizer)
    PreTrainedModel.from_pretrained = classmethod(_wrap_from_pretrained(PreTrainedModel.from_pretrained.__func__))  # type: ignore[assignment, attr-defined, unused-ignore]
    PreTrainedModel.save_pretrained = _wrap_save_pretrained(PreTrainedModel.save_pretrained)  # type: ignore[method-assign, assignment, unused-ignore]


def _wrap_from_pretrained(usual: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(usual)
    def from_pretrained(model_cls: Any, path: Any = None, *args: Any, **options: Any) -> Any:
        quantization = options.get("quantization_config")
        location = _location(path, options)
        if location is None or args or not _uses_ingot(location, quantization, options):
            return usual(model_cls, path, *args, **options)
        return _load(model_cls, location, options)

    return from_pretrained


def _wrap_save_pretrained(usual: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(usual)
    def save_pretrained(model: Any, save_directory: Any, *args: Any, **options: Any) -> Any:
        if any(isinstance(module, PackedWeight) for module in model.modules()):
            return _save(
                model, save_directory, signature(usual).bind(model, save_directory, *args, **options).arguments
            )
        return usual(model, save_directory, *args, **options)

    return save_pretrained


def _location(path: Any, options: Mapping[str, Any]) -> Location | None:
    """Return the location of a model's folder, with the option ``subfolder``; None if ``path`` is no valid location."""
    try:
        location = Location.parse(path)
    except UsageError:
        return None
    subfolder = options.get("subfolder")
    return location.child(subfolder) if subfolder else location


def _uses_ingot(location: Location, quantization: Any, options: Mapping[str, Any]) -> bool:
    """Return whether Ingot loads the folder.

    True if the caller passed an ``IngotConfig``, or if a local folder has weights that transformers cannot load.
    """
    if isinstance(quantization, IngotConfig):
        return True
    if quantization is not None or options.get("gguf_file") or options.get("state_dict") is not None:
        return False
    try:
        store, name = location.find()
        if name:
            return False
        if preparer_for(store) is not None:
            return True
        format, _ = detect_folder(listing(store), store)
        config = stored_config(store, "model.config")
    except IngotError:
        return False
    # transformers loads safetensors itself, unless config.json declares a packing that it does not support.
    is_other_format = not isinstance(format, SafetensorsFormat) or format.name != SafetensorsFormat.name
    return is_other_format and (packer_of_config(config, CONFIG) is None or _transformers_cannot_load(location, config))


def _transformers_cannot_load(location: Location, config: Mapping[str, Any]) -> bool:
    """Return whether transformers has no usable quantizer for the packing in ``config.json``; then log a warning.

    A quantizer is unusable if a package or a GPU is missing. Errors that only a load reveals are left to transformers.
    """
    declared: Any = config.get("quantization_config")
    is_supported: Callable[[Any], bool] = AutoHfQuantizer.supports_quant_method
    try:
        if is_supported(declared):
            AutoHfQuantizer.from_config(declared, pre_quantized=True).validate_environment(device_map=None)
            return False
        reason = "it has no quantizer for this"
    except (ImportError, RuntimeError) as error:
        reason = str(error)
    except Exception:
        return False
    _LOGGER.warning("Ingot loads %s, because transformers cannot load it here: %s", location, reason)
    return True


def _load(model_cls: Any, location: Location, options: dict[str, Any]) -> Any:
    quantization = options.pop("quantization_config", None) or IngotConfig()
    _require_no_revision(location, options.pop("revision", None))
    dtype = options.pop("dtype", None)
    old = options.pop("torch_dtype", None)
    device = _device(options.pop("device_map", None))
    config = options.pop("config", None)
    forwarded = {key: options.pop(key) for key in _FORWARDED & set(options)}
    options_set = {
        key for key, value in options.items() if value is not None and not (value is False and key in _FLAGS)
    }
    unsupported = options_set - _IGNORED - {"subfolder"}
    if unsupported:
        raise UnsupportedError(
            f"expected options of from_pretrained that apply to Ingot's folders, found "
            f"{', '.join(sorted(unsupported))}; leave them out, or decode the folder with ingot convert",
            rule="model.option",
        )
    config = copy(config)  # the caller's config must not change
    for key in PACKING_KEYS:
        if config is not None and hasattr(config, key):
            delattr(config, key)
    keep_packed = quantization.keep_packed
    if keep_packed is None and not _has_stacks(location):
        keep_packed = True
    load_options = LoadOptions(
        location,
        device=device,
        dtype=old if dtype is None else dtype,
        keep_packed=keep_packed,
        strict=quantization.strict,
        verify=quantization.verify,
        max_ram=quantization.max_ram,
        coreml=False,
    )
    model = load(load_options, ModelOverrides(model_cls, config, forwarded))
    if any(isinstance(module, PackedWeight) for module in model.modules()):
        model.is_quantized = True
        model.quantization_method = METHOD
        model.hf_quantizer = IngotQuantizer(quantization)
    _allow_saving(model)
    return model


def _has_stacks(location: Location) -> bool:
    """Return whether the format of the model has a stack selector, which decides on the weights that stay packed."""
    return detect(*find(location))[0].name in STACK_SELECTORS


def _require_no_revision(location: Location, revision: Any) -> None:
    """Raise if a revision of a Hub model is passed as an option; it belongs in the address. Local folders have none."""
    if revision in (None, "main"):
        return
    try:
        location.find()
    except IngotError:
        raise UnsupportedError(
            f"expected the revision in the address, hf://org/name@revision, found option {str(revision)[:80]!r}",
            rule="model.option",
        ) from None


def _device(device_map: Any) -> Any:
    """Return the device of a ``device_map``. Raises ``UnsupportedError`` ``model.option`` if it names several."""
    if device_map is None:
        return "cpu"
    if device_map == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device_map, Mapping):
        devices = set(device_map.values())
        if len(devices) != 1 or devices & {"disk"}:
            raise UnsupportedError(
                f"expected one device for the whole model, found {str(device_map)[:200]}", rule="model.option"
            )
        (device_map,) = devices
    return device_map


def _allow_saving(model: Any) -> None:
    """Remove the refusals to save that packed layers set: ``_save`` can save models of this module."""
    for module in model.modules():
        module.__dict__.pop("save_pretrained", None)


def _save(model: Any, folder: Any, options: Mapping[str, Any]) -> None:
    """Write a folder: ``model.zt`` with packed layers unchanged and all other tensors dense, and the configs.

    Raises ``UnsupportedError`` ``model.option``, ``model.packed``, and the errors of ``ingot.save``.
    """
    arguments = {**options, **options.get("kwargs", {})}
    if not arguments.get("is_main_process", True):
        return
    unsupported = {key for key, value in arguments.items() if value} - _IGNORED_ON_SAVE
    if unsupported:
        raise UnsupportedError(
            f"expected no options of save_pretrained about writing safetensors, found {sorted(unsupported)}",
            rule="model.option",
        )
    tensors = _tensors_of(model)
    dtype = next((value.dtype for value in model.parameters() if value.is_floating_point()), None)
    if dtype is not None:
        model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    save(Location.parse(folder).child(_FILE), tensors)


def _tensors_of(model: Any) -> dict[str, Any]:
    """Return the tensors to save for a model, by the names that they have in a checkpoint.

    Tied tensors are included once.
    """
    layers = {path: module for path, module in model.named_modules() if isinstance(module, PackedWeight)}
    parts = {f"{path}.{key}" for path, module in layers.items() for key in module._buffers}
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    state = {key: value for key, value in model.state_dict().items() if key not in parts | ignored}
    for path, module in layers.items():
        state[f"{path}.weight"] = _placeholder(f"{path}.weight", module)
    for name, source in dict(getattr(model, "all_tied_weights_keys", None) or {}).items():
        if name in state and source in state and _memory(state[name]) == _memory(state[source]):
            del state[name]
    return {name: _stored(name, value) for name, value in revert_weight_conversion(model, state).items()}


def _placeholder(name: str, layer: PackedWeight) -> Any:
    parameter = torch.nn.Parameter(torch.empty(layer.shape, dtype=layer.dtype, device="meta"), requires_grad=False)
    matrix = layer.to("cpu").matrix if not layer.packed.is_cpu else layer.matrix
    setattr(parameter, PACKED, Tensor.from_parts(matrix.params, matrix.parts(), matrix.shape, name))
    return parameter


def _memory(value: Any) -> int:
    tensor = getattr(value, PACKED, None)
    if tensor is None:
        return int(value.data_ptr())
    return int(next(iter(tensor.parts.values())).array().ctypes.data)


def _stored(name: str, value: Any) -> Any:
    tensor = getattr(value, PACKED, None)
    if tensor is None and value.is_meta:
        raise UnsupportedError(
            "expected a packed layer that transformers stores under its own name, found one that it joins with others: "
            "save a model that was loaded with keep_packed=False",
            rule="model.packed",
            where=name,
        )
    return value.detach().contiguous() if tensor is None else tensor


def _decoded(layer: PackedWeight, dtype: Any) -> Any:
    """Return the torch layer with the decoded weights of a packed layer."""
    weight = torch.nn.Parameter(layer.decode(slice(None), dtype or layer.dtype), requires_grad=False)
    with torch.device("meta"):
        if isinstance(layer, PackedLinear):
            layer_of_torch: Any = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
            layer_of_torch.bias = layer.bias
        else:
            layer_of_torch = torch.nn.Embedding(*layer.shape, padding_idx=getattr(layer, "padding_idx", None))
    layer_of_torch.weight = weight
    return layer_of_torch.train(layer.training)
