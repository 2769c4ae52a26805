"""transformers' own ``from_pretrained`` and ``save_pretrained`` over what Ingot opens (``ingot.hf``).

A quantizer alone would not do: transformers looks for safetensors before it asks one. So its two methods are replaced
by ones that look whose folder, or whose layers, it is, and leave everything else to the methods that were there.

This module needs torch and transformers to be imported; only ``ingot.hf`` imports it.
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
from ingot.artifacts.unread_dialects import of_config
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
from ingot.runtime.loading.transformers import Given, load
from ingot.runtime.loading.transformers_weights import PACKED
from ingot.stores.location import Location

_LOGGER = logging.get_logger(__name__)
METHOD = "ingot"
_FILE = "model.zt"
# Of from_pretrained: what says where a model of the Hub is got from, or nothing that matters to a folder.
_HUB = ("cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "resume_download")
_IDLE = ("adapter_kwargs", "adapter_name", "low_cpu_mem_usage", "tqdm_class", "use_safetensors", "weights_only")
_PASSED_OVER = frozenset((*_HUB, *_IDLE, "token", "trust_remote_code", "_commit_hash", "_from_auto", "_from_pipeline"))
# What is as good as left out where it is False; of other options, such as use_cache of a config, False is a wish too.
_FLAGS = frozenset(
    ("allow_all_kernels", "ignore_mismatched_sizes", "load_in_4bit", "load_in_8bit", "offload_buffers", "use_kernels")
)
# What transformers' own method does with these is done with our weights too.
_PASSED_ON = frozenset(("attn_implementation", "experts_implementation", "output_loading_info"))
# Arguments of save_pretrained that change nothing in what is written here.
_SAVED_ALIKE = frozenset(
    ("self", "kwargs", "save_directory", "is_main_process", "safe_serialization", "max_shard_size")
)
_SAVED_ALIKE |= {"save_peft_format", "save_original_format"}


class IngotConfig(QuantizationConfigMixin):  # type: ignore[misc, unused-ignore]
    """How ``from_pretrained`` is to take a folder that Ingot opens; any, also one that transformers would open itself.

    Parameters
    ----------
    keep_packed : bool, optional
        Compute from the packed weights (the default), or decode them; of a ``.squizd`` its stack decides.
    strict : bool
        Refuse tensors that the architecture has no place for.
    verify : bool
        Check digests.
    max_ram : int or str, optional
        Memory that weights may be decoded into.
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
        self.keep_packed, self.strict, self.verify, self.max_ram = keep_packed, strict, verify, max_ram


class IngotQuantizer(HfQuantizer):  # type: ignore[misc, unused-ignore]
    """What a model with packed layers says of itself to transformers."""

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to quantize, or to load what no folder of Ingot's is: ``from_pretrained`` comes here for these."""
        raise UnsupportedError(
            f"expected a folder that Ingot opens, found quant_method {METHOD!r} for something else: make such a folder "
            "with ingot convert",
            rule="model.quantized",
        )

    def is_serializable(self) -> bool:
        """``save_pretrained`` writes packed layers."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Packed weights take no gradient."""
        return False

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        for name, module in list(model.named_modules()):
            if isinstance(module, PackedWeight):
                put_layer(model, name, _decoded(module, dtype))
        _let_save(model)
        return model


def register() -> None:
    """Make transformers open folders of Ingot's in this process; once."""
    if METHOD in AUTO_QUANTIZER_MAPPING or METHOD in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return
    register_quantization_config(METHOD)(IngotConfig)
    register_quantizer(METHOD)(IngotQuantizer)
    PreTrainedModel.from_pretrained = classmethod(_loading(PreTrainedModel.from_pretrained.__func__))  # type: ignore[assignment, attr-defined, unused-ignore]
    PreTrainedModel.save_pretrained = _saving(PreTrainedModel.save_pretrained)  # type: ignore[method-assign, assignment, unused-ignore]


def _loading(usual: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(usual)
    def from_pretrained(kind: Any, path: Any = None, *args: Any, **options: Any) -> Any:
        asked = options.get("quantization_config")
        location = _location(path, options)
        if location is None or args or not _is_ours(location, asked, options):
            return usual(kind, path, *args, **options)
        return _load(kind, location, options)

    return from_pretrained


def _saving(usual: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(usual)
    def save_pretrained(model: Any, save_directory: Any, *args: Any, **options: Any) -> Any:
        if any(isinstance(module, PackedWeight) for module in model.modules()):
            return _save(
                model, save_directory, signature(usual).bind(model, save_directory, *args, **options).arguments
            )
        return usual(model, save_directory, *args, **options)

    return save_pretrained


def _location(path: Any, options: Mapping[str, Any]) -> Location | None:
    """Return the folder of a model; None if the caller named none."""
    try:
        location = Location.parse(path)
    except UsageError:
        return None
    subfolder = options.get("subfolder")
    return location.child(subfolder) if subfolder else location


def _is_ours(location: Location, asked: Any, options: Mapping[str, Any]) -> bool:
    """Whether Ingot is to load: by the caller's wish, or a local folder that transformers finds no weights in, or that
    it cannot load here, which is told."""
    if isinstance(asked, IngotConfig):
        return True
    if asked is not None or options.get("gguf_file") or options.get("state_dict") is not None:
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
    # Safetensors are transformers' own, unless config.json says of their packing what transformers does not know.
    mine = not isinstance(format, SafetensorsFormat) or format.name != SafetensorsFormat.name
    return mine and (of_config(config, CONFIG) is None or _cannot(location, config))


def _cannot(location: Location, config: Mapping[str, Any]) -> bool:
    """Whether transformers has no quantizer for what a ``config.json`` says is packed, or that one refuses, for want of
    a package or a GPU; tells so. What only the attempt shows is left to transformers."""
    stated: Any = config.get("quantization_config")
    known: Callable[[Any], bool] = AutoHfQuantizer.supports_quant_method
    try:
        if known(stated):
            AutoHfQuantizer.from_config(stated, pre_quantized=True).validate_environment(device_map=None)
            return False
        reason = "it has no quantizer for this"
    except (ImportError, RuntimeError) as error:
        reason = str(error)
    except Exception:
        return False
    _LOGGER.warning("Ingot loads %s, as transformers cannot here: %s", location, reason)
    return True


def _load(kind: Any, location: Location, options: dict[str, Any]) -> Any:
    asked = options.pop("quantization_config", None) or IngotConfig()
    _require_no_revision(location, options.pop("revision", None))
    dtype, old = options.pop("dtype", None), options.pop("torch_dtype", None)
    device = _device(options.pop("device_map", None))
    config = options.pop("config", None)
    passed = {key: options.pop(key) for key in _PASSED_ON & set(options)}
    wishes = {key for key, value in options.items() if value is not None and not (value is False and key in _FLAGS)}
    left = wishes - _PASSED_OVER - {"subfolder"}
    if left:
        raise UnsupportedError(
            f"expected options of from_pretrained that Ingot's folders can be loaded with, found "
            f"{', '.join(sorted(left))}; leave them out, or decode the folder with ingot convert",
            rule="model.option",
        )
    config = copy(config)  # the caller's stays as it is
    for key in PACKING_KEYS:
        if config is not None and hasattr(config, key):
            delattr(config, key)
    keep = asked.keep_packed
    if keep is None and not _has_stacks(location):
        keep = True
    wanted = LoadOptions(
        location,
        device=device,
        dtype=old if dtype is None else dtype,
        keep_packed=keep,
        strict=asked.strict,
        verify=asked.verify,
        max_ram=asked.max_ram,
        coreml=False,
    )
    model = load(wanted, Given(kind, config, passed))
    if any(isinstance(module, PackedWeight) for module in model.modules()):
        model.is_quantized, model.quantization_method = True, METHOD
        model.hf_quantizer = IngotQuantizer(asked)
    _let_save(model)
    return model


def _has_stacks(location: Location) -> bool:
    """Return whether a stack selector decides which weights stay packed."""
    return detect(*find(location))[0].name in STACK_SELECTORS


def _require_no_revision(location: Location, revision: Any) -> None:
    """Refuse a revision beside a model of the Hub, which is part of its address; of a folder here there is none."""
    if revision in (None, "main"):
        return
    try:
        location.find()
    except IngotError:
        raise UnsupportedError(
            f"expected the revision in the address, hf://org/name@revision, found {str(revision)[:80]!r} beside it",
            rule="model.option",
        ) from None


def _device(device_map: Any) -> Any:
    """Return the one device that a ``device_map`` names; ``UnsupportedError`` ``model.option`` where there are more."""
    if device_map is None:
        return "cpu"
    if device_map == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device_map, Mapping):
        places = set(device_map.values())
        if len(places) != 1 or places & {"disk"}:
            raise UnsupportedError(
                f"expected one device for the whole model, found {str(device_map)[:200]}", rule="model.option"
            )
        (device_map,) = places
    return device_map


def _let_save(model: Any) -> None:
    """Take back the refusals to save that packed layers set: models of this module are saved by ``_save``."""
    for module in model.modules():
        module.__dict__.pop("save_pretrained", None)


def _save(model: Any, folder: Any, options: Mapping[str, Any]) -> None:
    """Write a folder: packed layers as they lie and everything else dense in ``model.zt``, and the configs.

    Raises ``UnsupportedError`` ``model.option``, ``model.packed``, and what ``ingot.save`` raises.
    """
    given = {**options, **options.get("kwargs", {})}
    if not given.get("is_main_process", True):
        return
    left = {key for key, value in given.items() if value} - _SAVED_ALIKE
    if left:
        raise UnsupportedError(
            f"expected no options of save_pretrained that say how safetensors are written, found {sorted(left)}",
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
    """Return what a checkpoint of the model holds, by the checkpoint's names."""
    layers = {path: module for path, module in model.named_modules() if isinstance(module, PackedWeight)}
    parts = {f"{path}.{key}" for path, module in layers.items() for key in module._buffers}
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    state = {key: value for key, value in model.state_dict().items() if key not in parts | ignored}
    for path, module in layers.items():
        state[f"{path}.weight"] = _stand_in(f"{path}.weight", module)
    for name, source in dict(getattr(model, "all_tied_weights_keys", None) or {}).items():
        if name in state and source in state and _memory(state[name]) == _memory(state[source]):
            del state[name]
    return {name: _stored(name, value) for name, value in revert_weight_conversion(model, state).items()}


def _stand_in(name: str, layer: PackedWeight) -> Any:
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
            "expected packed layers under names of their own, found one that transformers joins with others: save a "
            "model that was loaded with keep_packed=False",
            rule="model.packed",
            where=name,
        )
    return value.detach().contiguous() if tensor is None else tensor


def _decoded(layer: PackedWeight, dtype: Any) -> Any:
    """Return the layer of torch that a packed one stands for."""
    weight = torch.nn.Parameter(layer.decode(slice(None), dtype or layer.dtype), requires_grad=False)
    with torch.device("meta"):
        if isinstance(layer, PackedLinear):
            made: Any = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
            made.bias = layer.bias
        else:
            made = torch.nn.Embedding(*layer.shape, padding_idx=getattr(layer, "padding_idx", None))
    made.weight = weight
    return made.train(layer.training)
