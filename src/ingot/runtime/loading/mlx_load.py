"""Running models of mlx_lm from any checkpoint that Ingot opens (``spec/mlx.md``, "Loading")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from os import fspath
from typing import Any

import numpy as np

from ingot.artifacts.open import find
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
"""The extra that installs mlx and mlx-lm."""
_MLX_DTYPES = frozenset({"f32", "f16", "bf16", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "bool"})
"""Dtypes that ``mx.load`` reads without conversion."""


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
    """Return a model of mlx_lm in evaluation mode and its tokenizer, as ``mlx_lm.load`` does.

    Folders that mlx_lm can open, and safetensors files, load as fast and as lazily as without Ingot. For any other
    checkpoint Ingot passes the weights to mlx_lm. Layers whose integers MLX can compute with stay packed; other weights
    are decoded.

    Parameters
    ----------
    path : path
        Any path that ``ingot.open`` accepts; config.json and the tokenizer are in its folder.
    cache : bool
        Whether faster stored variants next to the path may be used and created.
    lazy : bool
        Whether weights of safetensors files stay unread until first use.
    max_ram : int or str, optional
        Memory limit for the weights; by default the free memory of the machine. Larger weights are refused.
    model_dir : path, optional
        The folder of config.json and the tokenizer, if it is not the folder of the weights.
    report : callable, optional
        Called once with a ``LoadReport``; ``decoded`` counts all bytes of weights in MLX's memory that are not packed.

    Raises
    ------
    FormatError
        ``model.config``, ``model.config-missing``, ``model.tokenizer``; ``mlx.weights``: the architecture has no
        parameter for some tensors, or lacks tensors.
    UnsupportedError
        ``model.architecture``: mlx_lm does not have the model type.
    ResourceError
        ``ram.guard``: the weights that MLX copies into its memory do not fit; unread weights are not counted.
    IngotError
        The errors of ``ingot.open`` and ``Tensor.numpy``; ``MissingExtraError``: mlx or mlx-lm is not installed.

    Examples
    --------
    >>> model, tokenizer = ingot.mlx.load_model("model")
    >>> type(model).__name__
    'Model'
    """
    meter = Meter()
    with meter.importing():
        mx, utils = require("mlx.core", EXTRA), require("mlx_lm.utils", EXTRA)
    source = resolve(path, "mlx", True, cache, model_dir=model_dir)
    with source.checkpoint as checkpoint:
        native_folder = _opened_by_mlx(source) if model_dir is None else None
        folder = source.folder if native_folder is None else native_folder
        config = read_json(folder, CONFIG, "model.config", "model.config-missing")
        with meter.importing():  # the module of the architecture
            _require_architecture(utils, config, folder)
        model = _load(mx, utils, source, native_folder, lazy, max_ram)
        figures, tokenizer = _figures(checkpoint), _tokenizer(utils, folder)
    if not lazy:
        mx.eval(model.parameters())
    if report is not None:
        figures |= {"tier": source.tier, "why": source.why, "model": type(model).__name__, "device": "mlx"}
        report(LoadReport(Location.parse(path).display, **figures, **meter.measured()))
    return model, tokenizer


def _load(
    mx: Any, utils: Any, source: ModelSource, native_folder: Store | None, lazy: bool, max_ram: int | str | None
) -> Any:
    """Return the model, which mlx_lm loads from ``native_folder``, or builds with weights from Ingot if that is None.

    Raises ``mlx.weights`` if mlx_lm refuses them.
    """
    folder = source.folder if native_folder is None else native_folder
    try:
        if native_folder is not None:
            return _load_with_mlx(utils, native_folder, source.checkpoint, lazy, max_ram)
        return _build(utils, folder, _weights(mx, source, lazy, max_ram))
    except IngotError:
        raise
    except (ValueError, KeyError, TypeError) as error:  # errors of mlx_lm for a config or weights that do not fit
        raise FormatError(
            "mlx.weights", f"mlx_lm refuses the weights: {one_line(error)}", where=folder.location
        ) from error


def _figures(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the fields of the report about a checkpoint's weights: format, dtype, and packed and decoded bytes."""
    layouts = {name: packed_layout(tensor) for name, tensor in checkpoint.items()}
    floats = (tensor.dtype for tensor in checkpoint.values() if tensor.dtype in SCALE_DTYPES)
    return {
        "format": checkpoint.format,
        "dtype": next(floats, ""),
        "mapped": 0,
        "decoded": sum(_nbytes(tensor, None) for name, tensor in checkpoint.items() if layouts[name] is None),
        "packed": sum(tensor.nbytes for name, tensor in checkpoint.items() if layouts[name] is not None),
    }


def _opened_by_mlx(source: ModelSource) -> Store | None:
    """Return the local folder of a model if mlx_lm can open it without Ingot; else None."""
    folder, file = find(source.location)
    if file or source.checkpoint.format not in ("mlx", "safetensors") or folder.local_path() is None:
        return None
    names = folder.list().files
    weights = any(name.startswith("model") and name.endswith(".safetensors") for name in names)
    return folder if weights and CONFIG in names else None


def _require_architecture(utils: Any, config: Mapping[str, Any], folder: Store) -> None:
    model_type = config.get("model_type")
    refusal = UnsupportedError(
        f"expected a model_type that mlx_lm has, found {str(model_type)[:80]!r}",
        rule="model.architecture",
        where=folder.location_of(CONFIG),
    )
    if not isinstance(model_type, str) or not model_type.isidentifier():
        raise refusal
    try:
        utils._get_classes(dict(config))
    except ValueError as error:
        raise refusal from error


def _load_with_mlx(utils: Any, folder: Store, checkpoint: Checkpoint, lazy: bool, max_ram: int | str | None) -> Any:
    """Return the model that mlx_lm loads from ``folder``."""
    if not lazy:
        _require_room(sum(tensor.nbytes for tensor in checkpoint.values()), checkpoint, max_ram)
    return utils.load_model(_local(folder), lazy=lazy)[0]


def _local(folder: Store) -> Any:
    return folder.require_path("", "loading a model with mlx_lm")


def _weights(mx: Any, source: ModelSource, lazy: bool, max_ram: int | str | None) -> dict[str, Any]:
    """Return the weights of a checkpoint as mlx arrays.

    With ``lazy``, mlx reads the weights of a safetensors file at their first use.
    """
    checkpoint = source.checkpoint
    store, name = find(source.location)
    path = store.local_path(name) if name else None
    dtypes = {tensor.dtype for tensor in checkpoint.values()}
    if checkpoint.format == "safetensors" and path is not None and dtypes <= _MLX_DTYPES:
        if not lazy:
            _require_room(sum(tensor.nbytes for tensor in checkpoint.values()), checkpoint, max_ram)
        arrays: dict[str, Any] = mx.load(fspath(path), format="safetensors")
        return arrays
    layouts = {name: packed_layout(tensor) for name, tensor in checkpoint.items()}
    needed = sum(_nbytes(tensor, layouts[name]) for name, tensor in checkpoint.items())
    _require_room(needed, checkpoint, max_ram)
    weights: dict[str, Any] = {}
    for name, tensor in checkpoint.items():
        weights.update(_arrays(tensor, layouts[name]))
    return weights


def _nbytes(tensor: Tensor, layout: Repacked | None) -> int:
    row = DTYPES.get(tensor.dtype)
    return tensor.nbytes if layout is not None or row is None else row.nbytes(tensor.size)


def _require_room(nbytes: int, checkpoint: Checkpoint, max_ram: int | str | None) -> None:
    advice = "take a tier or a recipe with fewer bits, close other programs, or set max_ram if this figure is wrong"
    require_ram(nbytes, "weights in MLX's memory", advice, max_ram, checkpoint.location)


def _build(utils: Any, folder: Store, weights: dict[str, Any]) -> Any:
    """Return a model of mlx_lm for the config.json of ``folder``, with ``weights``."""
    nn = require("mlx.nn", EXTRA)
    config = utils.load_config(_local(folder))
    for key in mlx_layers.KEYS:  # the config may describe the packing of other files
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
    """Return a tensor as mlx arrays: one array, or three arrays of a packed layer in the layout ``repack``."""
    if repack is None:
        return {tensor.name: from_numpy(tensor.numpy())}
    reader = repack.reader()
    parts = reader.read(repack.rows)
    reader.finish()
    stem = tensor.name.removesuffix(WEIGHT)
    lead = tensor.shape[:-1]
    words = parts["packed_weight"].reshape(-1).view(np.uint32).reshape(*lead, -1)
    return {
        tensor.name: from_numpy(words),
        stem + SCALES: from_numpy(parts["scales"].reshape(*lead, -1)),
        stem + BIASES: from_numpy(parts["zeros"].reshape(*lead, -1)),
    }


def packed_layout(tensor: Tensor) -> Repacked | None:
    """Return the layout in which MLX can compute with a tensor's integers.

    Returns None if no such layout represents the values of the tensor exactly.
    """
    codec = tensor.decoder
    if not isinstance(codec, AffineCodec | WordsCodec) or tensor.dtype not in DTYPES or not tensor.size:
        return None
    codec.check(tensor)
    for layout in family_alternatives(tensor.layout, tensor):
        if not isinstance(layout, AffineLayout):
            continue
        loaded = replace(layout, dtype=layout.scales)  # MLX computes in the dtype of the scales
        parts = layout.part_specs(tensor.shape)
        params = loaded.attributes()
        spec = TensorSpec(tensor.name, tensor.shape, loaded.dtype, layout.codec, parts, params)
        if mlx_layers.why_integers_unsupported(spec) is None and (repacked := codec.repack(tensor, layout)).exact:
            return repacked
    return None


def _tokenizer(utils: Any, folder: Store) -> Any:
    """Return mlx_lm's tokenizer of the folder.

    If its loader fails or its tokens differ from tokenizer.json, the result wraps the tokenizer of ``tokenizer_in``.
    """
    config = utils.load_config(_local(folder))
    try:
        tokenizer = utils.load_tokenizer(_local(folder), eos_token_ids=config.get("eos_token_id"))
    except Exception:  # dozens of tokenizer classes; tokenizer_in below reports what is wrong
        tokenizer = None
    if tokenizer is not None:
        require_vocabulary(tokenizer._tokenizer, folder)
    tokenizer_of_folder = tokenizer_in(folder)
    if tokenizer is not None and same_tokens(tokenizer._tokenizer, tokenizer_of_folder):
        return tokenizer
    wrapper = require("mlx_lm.tokenizer_utils", EXTRA).TokenizerWrapper
    end = config.get("eos_token_id")
    return wrapper(tokenizer_of_folder, eos_token_ids=end if isinstance(end, list) or end is None else [end])
