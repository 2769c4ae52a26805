"""MLX: a running model of mlx_lm from any checkpoint that Ingot opens (``spec/mlx.md``, "Loading")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from os import fspath
from typing import Any

import numpy as np

from ingot.codecs.affine.codec import AffineCodec
from ingot.codecs.affine.words import WordsCodec
from ingot.codecs.base import Repacked
from ingot.core.border import bordered, require
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.runtime.memory import require_ram
from ingot.errors import FormatError, IngotError, UnsupportedError
from ingot.formats.packed_folders import mlx as mlx_layers
from ingot.formats.packed_folders.base import WEIGHT
from ingot.formats.packed_folders.mlx import BIASES, SCALES
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.affine import SCALE_DTYPES, AffineLayout
from ingot.model.layouts.alternatives import family_alternatives
from ingot.model.spec import TensorSpec
from ingot.model.store import Store
from ingot.model.tensor import Tensor
from ingot.naming.config import CONFIG
from ingot.runtime.arrays.mlx import from_numpy
from ingot.runtime.loading.load_report import LoadReport, Meter
from ingot.runtime.loading.model_source import ModelSource, resolve
from ingot.runtime.loading.transformers_config import one_line, read_json
from ingot.runtime.loading.transformers_tokenizer import require_vocabulary, same_tokens, tokenizer_in
from ingot.stores.location import AnyPath, Location

EXTRA = "mlx"
"""Installs mlx and mlx-lm."""
_LOADED = frozenset({"f32", "f16", "bf16", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "bool"})
"""Element types that ``mx.load`` reads as they are."""


@bordered
def load_model(
    path: AnyPath,
    *,
    cache: bool = True,
    lazy: bool = False,
    max_ram: int | str | None = None,
    model_dir: AnyPath | None = None,
    report: Callable[[LoadReport], object] | None = None,
) -> tuple[Any, Any]:
    """Return a model of mlx_lm in evaluation mode, and its tokenizer: what ``mlx_lm.load`` returns.

    What mlx_lm opens itself, and safetensors files, it loads as fast and as lazily as without Ingot. From any other
    checkpoint the weights are handed over: layers whose integers MLX can compute with stay packed, others are decoded.

    Parameters
    ----------
    path : path
        Anything that ``ingot.open`` takes; config.json and tokenizer lie in the folder, or beside the file.
    cache : bool
        Whether faster stored forms beside the path may be used and made.
    lazy : bool
        Leave weights of safetensors files unread until they are used.
    max_ram : int or str, optional
        A size that replaces what the machine says is free; weights that take more are refused.
    model_dir : path, optional
        The folder of config.json and the tokenizer, where it is another than that of the weights.
    report : callable, optional
        Called once with a ``LoadReport``; ``decoded`` are all bytes that MLX holds of weights that are not packed.

    Raises
    ------
    FormatError
        ``model.config``, ``model.config-missing``, ``model.tokenizer``; ``mlx.weights``: the architecture has no place
        for these tensors, or misses some.
    UnsupportedError
        ``model.architecture``: mlx_lm has no such model type.
    ResourceError
        ``ram.guard``: MLX's weights lie in memory of their own, except unread ones.
    IngotError
        As ``ingot.open`` and ``Tensor.numpy``; mlx or mlx-lm is not installed.
    """
    meter = Meter()
    with meter.importing():
        mx, utils = require("mlx.core", EXTRA), require("mlx_lm.utils", EXTRA)
    source = resolve(path, "mlx", True, cache, model_dir=model_dir)
    with source.checkpoint as checkpoint:
        own = _opened_by_mlx(source) if model_dir is None else None
        folder = source.folder if own is None else own
        config = read_json(folder, CONFIG, "model.config", "model.config-missing")
        with meter.importing():  # of the architecture's module
            _require_architecture(utils, config, folder)
        model = _loaded(mx, utils, source, own, lazy, max_ram)
        figures, tokenizer = _figures(checkpoint), _tokenizer(utils, folder)
    if not lazy:
        mx.eval(model.parameters())
    if report is not None:
        figures |= {"tier": source.tier, "why": source.why, "model": type(model).__name__, "device": "mlx"}
        report(LoadReport(Location.parse(path).display, **figures, **meter.taken()))
    return model, tokenizer


def _loaded(mx: Any, utils: Any, source: ModelSource, own: Store | None, lazy: bool, max_ram: int | str | None) -> Any:
    """Have mlx_lm open the folder, or give it the weights; ``mlx.weights`` where it does not take them."""
    folder = source.folder if own is None else own
    try:
        if own is not None:
            return _opened(utils, own, source.checkpoint, lazy, max_ram)
        return _build(utils, folder, _weights(mx, source, lazy, max_ram))
    except IngotError:
        raise
    except (ValueError, KeyError, TypeError) as error:  # what mlx_lm raises of a config or weights that do not fit
        raise FormatError(
            "mlx.weights", f"expected weights that mlx_lm takes: {one_line(error)}", where=folder.location
        ) from error


def _figures(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a report says of the weights: their format and type, and the bytes of what is packed and is not."""
    forms = {name: packed_form(tensor) for name, tensor in checkpoint.items()}
    floats = (tensor.dtype for tensor in checkpoint.values() if tensor.dtype in SCALE_DTYPES)
    return {
        "format": checkpoint.format,
        "dtype": next(floats, ""),
        "mapped": 0,
        "decoded": sum(_nbytes(tensor, None) for name, tensor in checkpoint.items() if forms[name] is None),
        "packed": sum(tensor.nbytes for name, tensor in checkpoint.items() if forms[name] is not None),
    }


def _opened_by_mlx(source: ModelSource) -> Store | None:
    """Return the folder that a checkpoint is, where mlx_lm opens it itself."""
    folder, file = source.location.find_model()
    if file or source.checkpoint.format not in ("mlx", "safetensors") or folder.local_path() is None:
        return None
    names = folder.list().files
    weights = any(name.startswith("model") and name.endswith(".safetensors") for name in names)
    return folder if weights and CONFIG in names else None


def _require_architecture(utils: Any, config: Mapping[str, Any], folder: Store) -> None:
    kind = config.get("model_type")
    refusal = UnsupportedError(
        f"expected a model_type that mlx_lm has, found {str(kind)[:80]!r}",
        rule="model.architecture",
        where=folder.location_of(CONFIG),
    )
    if not isinstance(kind, str) or not kind.isidentifier():
        raise refusal
    try:
        utils._get_classes(dict(config))
    except ValueError as error:
        raise refusal from error


def _opened(utils: Any, folder: Store, checkpoint: Checkpoint, lazy: bool, max_ram: int | str | None) -> Any:
    """Let mlx_lm open a folder."""
    if not lazy:
        _require_room(sum(tensor.nbytes for tensor in checkpoint.values()), checkpoint, max_ram)
    return utils.load_model(_local(folder), lazy=lazy)[0]


def _local(folder: Store) -> Any:
    return folder.require_path("", "loading a model with mlx_lm")


def _weights(mx: Any, source: ModelSource, lazy: bool, max_ram: int | str | None) -> dict[str, Any]:
    """Return a checkpoint's weights as mlx arrays: those of one safetensors file unread, others in memory."""
    checkpoint = source.checkpoint
    store, name = source.location.find_model()
    path = store.local_path(name) if name else None
    dtypes = {tensor.dtype for tensor in checkpoint.values()}
    if checkpoint.format == "safetensors" and path is not None and dtypes <= _LOADED:
        if not lazy:
            _require_room(sum(tensor.nbytes for tensor in checkpoint.values()), checkpoint, max_ram)
        arrays: dict[str, Any] = mx.load(fspath(path), format="safetensors")
        return arrays
    forms = {name: packed_form(tensor) for name, tensor in checkpoint.items()}
    needed = sum(_nbytes(tensor, forms[name]) for name, tensor in checkpoint.items())
    _require_room(needed, checkpoint, max_ram)
    weights: dict[str, Any] = {}
    for name, tensor in checkpoint.items():
        weights.update(_arrays(tensor, forms[name]))
    return weights


def _nbytes(tensor: Tensor, form: Repacked | None) -> int:
    row = DTYPES.get(tensor.dtype)
    return tensor.nbytes if form is not None or row is None else row.nbytes(tensor.size)


def _require_room(nbytes: int, checkpoint: Checkpoint, max_ram: int | str | None) -> None:
    advice = "take a tier or a recipe with fewer bits, close other programs, or set max_ram if this figure is wrong"
    require_ram(nbytes, "weights in MLX's memory", advice, max_ram, checkpoint.location)


def _build(utils: Any, folder: Store, weights: dict[str, Any]) -> Any:
    """Make the skeleton from config.json and give it the weights."""
    nn = require("mlx.nn", EXTRA)
    config = utils.load_config(_local(folder))
    for key in mlx_layers.KEYS:  # of another folder's packing
        config.pop(key, None)
    model_class, arguments = utils._get_classes(config)
    model = model_class(arguments.from_dict(config))
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)

    def packed(path: str, module: Any) -> Any:
        if f"{path}{SCALES}" not in weights or not hasattr(module, "to_quantized"):
            return False
        return utils.infer_quant_config(path, module, weights)

    nn.quantize(model, class_predicate=packed)
    model.eval()
    model.load_weights(list(weights.items()))
    return model


def _arrays(tensor: Tensor, repack: Repacked | None) -> dict[str, Any]:
    """Return a tensor as mlx arrays: one under its name, or the three of a packed layer in the layout ``repack``."""
    if repack is None:
        return {tensor.name: from_numpy(tensor.numpy())}
    reader = repack.reader()
    parts = reader.read(repack.rows)
    reader.finish()
    stem, lead = tensor.name.removesuffix(WEIGHT), tensor.shape[:-1]
    words = parts["packed_weight"].reshape(-1).view(np.uint32).reshape(*lead, -1)
    return {
        tensor.name: from_numpy(words),
        stem + SCALES: from_numpy(parts["scales"].reshape(*lead, -1)),
        stem + BIASES: from_numpy(parts["zeros"].reshape(*lead, -1)),
    }


def packed_form(tensor: Tensor) -> Repacked | None:
    """Return the layout in which MLX computes with a tensor's integers; None where no exact one is."""
    codec = tensor.decoder
    if not isinstance(codec, AffineCodec | WordsCodec) or tensor.dtype not in DTYPES or not tensor.size:
        return None
    codec.check(tensor)
    for layout in family_alternatives(tensor.layout, tensor):
        if not isinstance(layout, AffineLayout):
            continue
        loaded = replace(layout, dtype=layout.scales)  # MLX computes in the type of the scales
        parts, params = layout.part_specs(tensor.shape), loaded.attributes()
        spec = TensorSpec(tensor.name, tensor.shape, loaded.dtype, layout.codec, parts, params)
        if mlx_layers.why_integers_unsupported(spec) is None and (found := codec.repack(tensor, layout)).exact:
            return found
    return None


def _tokenizer(utils: Any, folder: Store) -> Any:
    """Return mlx_lm's tokenizer; around the folder's own where transformers' loader does not know it, or makes another
    of it."""
    config = utils.load_config(_local(folder))
    try:
        tokenizer = utils.load_tokenizer(_local(folder), eos_token_ids=config.get("eos_token_id"))
    except Exception:  # readers of dozens of tokenizer classes; load_tokenizer below says what is wrong
        tokenizer = None
    if tokenizer is not None:
        require_vocabulary(tokenizer._tokenizer, folder)
    own = tokenizer_in(folder)
    if tokenizer is not None and same_tokens(tokenizer._tokenizer, own):
        return tokenizer
    wrapper = require("mlx_lm.tokenizer_utils", EXTRA).TokenizerWrapper
    end = config.get("eos_token_id")
    return wrapper(own, eos_token_ids=end if isinstance(end, list) or end is None else [end])
