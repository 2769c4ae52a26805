"""KV caches of transformers with packed keys and values, and their installation in models (``spec/kv-cache.md``).

Importing this module needs torch and transformers (``core.border.require`` names the extra).
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ingot.errors import UnsupportedError, UsageError
from ingot.ext.serving.kv_attention import NAME, register
from ingot.ext.serving.kv_layer import PackedLayer
from ingot.runtime.loading.kv_options import KvCache, KvUse
from ingot.runtime.loading.kv_options import kv_cache as read_settings

_SETTINGS = "ingot_kv_cache"


class PackedCache(DynamicCache):
    """A KV cache for a model with ``config``; its layers for attention store packed blocks.

    Layers of other types (states) are transformers' layers, and so are sliding windows that are too short for blocks.

    Raises
    ------
    UnsupportedError
        ``kv.model``: no layer can be packed.
    """

    def __init__(self, config: Any, settings: KvCache) -> None:
        super().__init__(config=config)
        self.settings = settings
        self.layers = [_layer(layer, settings, f"layer {index}") for index, layer in enumerate(self.layers)]
        if not any(isinstance(layer, PackedLayer) for layer in self.layers):
            raise UnsupportedError(
                "the model has no attention layers whose keys and values can be packed: use an unpacked KV cache",
                rule="kv.model",
            )

    @property
    def nbytes(self) -> int:
        """The number of bytes of all layers."""
        return sum(_nbytes(layer) for layer in self.layers)

    def use(self) -> KvUse:
        """Return the memory of the cache for all sequences, compared with an unpacked cache."""
        full = sum(layer.full_nbytes if isinstance(layer, PackedLayer) else _nbytes(layer) for layer in self.layers)
        first = next(layer for layer in self.layers if isinstance(layer, PackedLayer))
        tokens = first.get_seq_length()
        count = max(1, tokens * (len(first.keys) if first.is_initialized else 1))
        return KvUse(self.settings.text(), tokens, self.nbytes, full, self.nbytes / count, full / count)


def _layer(layer: Any, settings: KvCache, location: str) -> Any:
    if type(layer) is DynamicLayer:
        return PackedLayer(settings, location)
    if type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= settings.latest + 2 * settings.tokens:
        return PackedLayer(settings, location, layer.sliding_window)
    return layer


def _nbytes(layer: Any) -> int:
    if isinstance(layer, PackedLayer):
        return layer.nbytes
    tensors: list[Any] = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    for states in (value for value in vars(layer).values() if isinstance(value, dict)):
        tensors += [value for value in states.values() if isinstance(value, torch.Tensor)]
    return sum(int(states.nbytes) for states in tensors)


def make_cache(model: Any, settings: KvCache) -> PackedCache:
    """Return an empty packed cache for ``model``."""
    return PackedCache(model.config.get_text_config(decoder=True), settings)


def install(model: Any, settings: KvCache) -> None:
    """Make ``model`` use packed caches by default, with attention that reads their blocks directly.

    Raises
    ------
    UnsupportedError
        ``kv.model``: the model has no cache, has an encoder or is not on the CPU; ``kv.evict``: its attention cannot
        choose the tokens to keep.
    """
    if not model.can_generate() or getattr(model.config, "is_encoder_decoder", False) or model.device.type != "cpu":
        raise UnsupportedError(
            f"packed KV caches need a decoder-only model that generates text, on the CPU; "
            f"found {type(model).__name__} on {model.device}",
            rule="kv.model",
        )
    make_cache(model, settings)  # raises if the model has nothing to pack
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation == "sdpa":
        register()
        config._attn_implementation = NAME
    elif settings.evict is not None and config._attn_implementation != NAME:
        raise UnsupportedError(
            f"evicting tokens from the cache needs torch's attention (sdpa), but the model uses "
            f"{config._attn_implementation}: use a cache without evict",
            rule="kv.evict",
        )
    if settings_of(model) is None:
        model.register_forward_pre_hook(_supply, with_kwargs=True)
    setattr(model, _SETTINGS, settings)
    model._prepare_cache_for_generation = MethodType(_prepare, model)


def use_kv_cache(model: Any, kv_cache: Any = "int4") -> Any:
    """Make a model of transformers cache keys and values in packed blocks; return it.

    Parameters
    ----------
    model : PreTrainedModel
        A language model on the CPU; its weights may be packed.
    kv_cache : str, mapping or KvCache
        Settings, as in ``ingot.load_model``.

    Raises
    ------
    UsageError
        ``kv.option``.
    UnsupportedError
        ``kv.model``, ``kv.evict``.
    """
    settings = read_settings(kv_cache)
    if settings is None:
        raise UsageError("expected a kind of KV cache, found None", rule="kv.option")
    install(model, settings)
    return model


def settings_of(model: Any) -> KvCache | None:
    """Return the settings of the packed caches that ``model`` creates; None if it creates transformers' caches."""
    settings: KvCache | None = getattr(model, _SETTINGS, None)
    return settings


def _prepare(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Create a packed cache for a generation, unless the caller chose another cache.

    This function replaces a method of transformers' models.
    """
    is_default = generation_config.cache_implementation in (None, "dynamic")
    if is_default and generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
        model_kwargs["past_key_values"] = make_cache(self, getattr(self, _SETTINGS))
        return None
    return type(self)._prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs)


def _supply(model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a forward pass with a new packed cache; None to leave the arguments unchanged.

    They are left unchanged if the pass has a cache already, if it uses none, or in training.
    """
    uses_cache = kwargs.get("use_cache")
    uses_cache = getattr(model.config, "use_cache", True) if uses_cache is None else uses_cache
    if len(args) > 1 or not uses_cache or model.training or kwargs.get("past_key_values") is not None:
        return None
    return args, kwargs | {"past_key_values": make_cache(model, getattr(model, _SETTINGS))}


def read_in_steps(model: Any, batch: Any) -> tuple[Any, PackedCache]:
    """Return logits for tokens [sequences, tokens], equal to reading one token at a time, and the cache.

    The model reads a few tokens at a time, and packs at most one block after each step. So each token attends to the
    same packed blocks as if tokens were read one at a time.
    """
    settings = settings_of(model)
    assert settings is not None
    cache = make_cache(model, settings)
    starts = [*([0] if settings.sinks else []), *range(settings.sinks, batch.shape[1], settings.step)]
    logits = [
        model(input_ids=batch[:, start:stop], past_key_values=cache, use_cache=True).logits
        for start, stop in zip(starts, [*starts[1:], batch.shape[1]], strict=True)
    ]
    return torch.cat(logits, dim=1), cache


class PackedCaching:
    """The packed KV caches of this module, registered in the group ``ingot.kv_caches``."""

    install = staticmethod(install)
    use_kv_cache = staticmethod(use_kv_cache)
    settings_of = staticmethod(settings_of)
    read_in_steps = staticmethod(read_in_steps)
