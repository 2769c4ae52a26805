"""Load models of transformers from any checkpoint that Ingot opens (``spec/loading.md``).

A kernel stack is an implementation that can run a file's weights (``ingot.model.stacks``). For a ``.squizd`` file, a
stack selector chooses the stack. If it is a Core ML package, the result is a Core ML model. For every other stack, the
result is a model of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ingot.core.border import require
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.core.options import takes
from ingot.core.runtime.device import resolve_device
from ingot.core.runtime.memory import require_ram
from ingot.errors import IngotError, UnsupportedError, UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.stacks import STACK_SELECTORS, Dispatch, Flags, StackRequest
from ingot.runtime.loading.load_report import LoadReport, Meter
from ingot.runtime.loading.model_source import ModelSource, resolve
from ingot.runtime.loading.options import INT8, LoadOptions
from ingot.runtime.loading.serving import KV_CACHES, PACKED
from ingot.runtime.loading.transformers_build import build
from ingot.runtime.loading.transformers_config import EXTRA, model_class, read_config, read_generation_config
from ingot.runtime.loading.transformers_packed import packable, put_packed, repacked_bytes
from ingot.runtime.loading.transformers_weights import (
    DECODED_TOO_LARGE_HINT,
    STREAMED_TOO_LARGE_HINT,
    Loading,
    copied_bytes,
    is_mapped,
    loading_order,
    merged_names,
    streamable,
    weights_of,
)
from ingot.stores.location import Location


@dataclass(frozen=True, slots=True)
class ModelOverrides:
    """A model class, a config and options from the caller; by default they are derived from the model's folder.

    Parameters
    ----------
    model_cls : type, optional
        The class of the model.
    config : optional
        The config of the model.
    options : mapping
        Further arguments of ``from_pretrained``.
    """

    model_cls: Any = None
    config: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)


@takes(LoadOptions, "model")
def load_model(options: LoadOptions) -> Any:
    """Return a model of transformers with the weights of a checkpoint, in evaluation mode.

    ``adapters`` run beside the layers: they add to the outputs of layers and do not change weights. Later calls of
    ``ingot.hf.use_adapters`` replace them.

    Weights stored in the requested dtype stay in the mapped file. Other weights are decoded once, unless they stay
    packed. Tied weights stay tied.

    With ``stream``, decoded weights may be larger than memory: while one layer computes, the next layer is decoded, so
    that memory holds two layers. A streamed model runs one pass at a time and cannot be saved.

    A ``.squizd`` file declares kernel stacks, which are implementations that can run its weights. The first declared
    stack that this machine supports and Ingot can run is used. On a Mac this may be the Core ML package in the file.
    Then the model is a ``coremltools.models.MLModel``. The package is not used if ``device`` is not the CPU or
    ``coreml`` is false. It is also not used if ``dtype``, ``keep_packed``, ``stream`` or ``kv_cache`` is set.

    Returns
    -------
    model

    Raises
    ------
    FormatError
        ``model.*``: config.json is missing or invalid, or disagrees with the weights (``spec/loading.md``).
    UnsupportedError
        ``model.architecture``, ``model.quantized``, ``model.dtype``, ``model.unchecked``, ``kv.model``, ``kv.evict``.
    ResourceError
        ``ram.guard``.
    UsageError
        ``model.device``, ``model.option``, ``kv.option``.
    MissingExtraError
        torch or transformers is not installed.
    IngotError
        The errors of ``ingot.open`` and ``Tensor.numpy``.

    Examples
    --------
    >>> model = ingot.load_model("model")
    >>> type(model).__name__
    'LlamaForCausalLM'
    """
    return load(options, ModelOverrides())


def load(options: LoadOptions, overrides: ModelOverrides) -> Any:
    """Return the model of ``load_model`` with the class, config and options in ``overrides``.

    Raises the errors of ``load_model``.
    """
    meter = Meter()
    if isinstance(options.dtype, str) and options.dtype == "auto":
        options = replace(options, dtype=None)
    if options.compute == INT8:
        options = replace(options, keep_packed=True)
    if options.arithmetic is not None:
        if options.keep_packed:
            raise UsageError("expected decoded weights with arithmetic, found keep_packed", rule="model.arithmetic")
        options = replace(options, keep_packed=False, dtype="f32")
    source = resolve(
        options.path,
        "torch",
        bool(options.keep_packed),
        options.cache,
        verify=options.verify,
        dtype=options.dtype,
        model_dir=options.model_dir,
    )
    with ExitStack() as stack:
        checkpoint = stack.enter_context(source.checkpoint)
        try:
            model, facts = _run(source, options, meter, overrides)
        except IngotError as error:
            raise (
                error if checkpoint.location in (error.where or "") else error.add_location(checkpoint.location)
            ) from None
        if facts.get("streamed"):
            stack.pop_all()  # the model keeps reading; its files are closed when it is deleted
    if options.adapters:
        require("ingot.runtime.layers.adapters", EXTRA).use_adapters(model, options.adapters)
    if options.report is not None:
        options.report(LoadReport(Location.parse(options.path).display, **{**facts, **meter.measured()}))
    return model


def _stack_request(options: LoadOptions) -> StackRequest:
    """Return the request by which a stack selector chooses a kernel stack for ``options``."""
    device_type = str(options.device).partition(":")[0]
    requests = [
        text
        for text, requested in (
            (f"device {device_type}", device_type != "cpu"),
            ("a dtype", options.dtype is not None),
            ("packed or decoded weights", options.keep_packed is not None),
            ("a model of transformers", not options.coreml),
            ("streamed weights", options.stream),
            ("a packed KV cache", options.kv_cache is not None),
        )
        if requested
    ]
    return StackRequest(
        device_type, options.keep_packed, f"the caller asks for {', '.join(requests)}" if requests else ""
    )


def _run(
    source: ModelSource, options: LoadOptions, meter: Meter, overrides: ModelOverrides
) -> tuple[Any, dict[str, Any]]:
    """Return a model that runs on the first possible kernel stack, and fields of its ``LoadReport``."""
    checkpoint = source.checkpoint
    choice = None
    if checkpoint.features is not None and checkpoint.format in STACK_SELECTORS:
        selector = STACK_SELECTORS[checkpoint.format]
        request = _stack_request(options)
        choice = selector.select(checkpoint.features, request)
        if choice.stack == Flags.ANE_COREML.name:
            try:
                return _package(source, choice)
            except UnsupportedError as error:
                choice = selector.select(checkpoint.features, replace(request, refused=str(error)))
    packed = _packed(checkpoint, options.keep_packed, choice)
    if not options.stream:
        checkpoint.read_ahead(loading_order(checkpoint, packed))  # prefetch weights while torch is imported
    with meter.importing():
        torch = require("torch", EXTRA)
        require("transformers", EXTRA)
    plan = _Plan(replace(options, device=resolve_device(options.device)), overrides, packed)
    model, facts = _load(torch, source, plan, meter)
    if choice is not None:
        facts |= {"why": f"{facts['why']}; {choice.describe()}", "dispatch": choice}
    return model, facts


def _package(source: ModelSource, choice: Dispatch) -> tuple[Any, dict[str, Any]]:
    part = source.checkpoint.attachments.coreml
    if part is None:  # the reader refuses files whose stack names a missing package
        raise UnsupportedError("the file has no Core ML package", rule="model.coreml")
    model = require("ingot.runtime.arrays.coreml", EXTRA).load_package(part)
    return model, {
        "format": source.checkpoint.format,
        "tier": "Core ML package",
        "why": choice.describe(),
        "model": type(model).__name__,
        "dtype": "",
        "device": "as Core ML chooses",
        "mapped": 0,
        "decoded": 0,
        "packed": part.nbytes,
        "dispatch": choice,
    }


@dataclass(frozen=True, slots=True)
class _Plan:
    """The inputs of ``_load``.

    ``options`` are the caller's options, with ``device`` as a ``torch.device``. ``overrides`` are the caller's model
    class, config and arguments. ``packed`` contains the names of the tensors that stay packed.
    """

    options: LoadOptions
    overrides: ModelOverrides
    packed: set[str]


def _load(torch: Any, source: ModelSource, plan: _Plan, meter: Meter) -> tuple[Any, dict[str, Any]]:
    """Build the model; return it, and fields of its ``LoadReport``."""
    options, overrides = plan.options, plan.overrides
    checkpoint, device = source.checkpoint, options.device
    with meter.importing():  # the modules of the architecture
        config = read_config(
            source.folder, len(checkpoint), checkpoint.format
        )  # checks the folder's config in any case
        config = config if overrides.config is None else overrides.config
        model_cls = overrides.model_cls or model_class(config, source.folder.location)
    target = _target(torch, options.dtype, config, checkpoint)
    dtype = getattr(torch, str(DTYPES[target].torch))
    packed = plan.packed
    merged = merged_names(config, checkpoint)
    streamed = streamable(checkpoint, target, packed, merged) if options.stream else frozenset()
    resident = copied_bytes(checkpoint, target, packed | streamed, merged) + repacked_bytes(checkpoint, packed - merged)
    require_room = partial(_require_room, device, options.max_ram, checkpoint.location, streaming=options.stream)
    require_room(resident)

    def attempt(undecoded: set[str]) -> Any:
        loading = Loading(device, undecoded)
        weights = weights_of(checkpoint, loading)
        arguments = {**overrides.options, "dtype": dtype}
        return build(
            model_cls, config, weights, loading, arguments, strict=options.strict, location=checkpoint.location
        )

    built = put_packed(attempt, packed, dtype, device, streamed)
    model = built.model
    generation = read_generation_config(source.folder)
    if generation is not None and model.can_generate():
        model.generation_config = generation
    model.config.name_or_path = source.name
    stream = None
    if built.streamed:
        stream = require("ingot.runtime.loading.transformers_stream", EXTRA).Stream(
            built.streamed, device, checkpoint.require_unchanged
        )
        require_room(resident + stream.window)
    if device.type != "cpu":
        model._apply(lambda values: values if values.is_meta else values.to(device))
    if stream is not None:
        stream.install(model)
    if options.compute == INT8:
        _use_int8(model, device, checkpoint.location)
    if options.arithmetic is not None:
        require("ingot.runtime.layers.program_arithmetic", EXTRA).use_arithmetic(
            model, options.arithmetic, checkpoint, checkpoint.format
        )
    if options.kv_cache is not None:
        KV_CACHES[PACKED].install(model, options.kv_cache)
    stored = (tensor for name, tensor in checkpoint.items() if name not in merged)
    mapped = sum(tensor.nbytes for tensor in stored if is_mapped(tensor, target))
    not_decoded = built.packed | {site.tensor.name for site in built.streamed}
    return model, {
        "format": checkpoint.format,
        "tier": source.tier,
        "why": source.why,
        "model": model_cls.__name__,
        "dtype": target,
        "device": str(device),
        "mapped": mapped,
        "decoded": copied_bytes(checkpoint, target, not_decoded, merged),
        "packed": sum(checkpoint[name].nbytes for name in built.packed),
        "streamed": 0 if stream is None else stream.nbytes,
        "window": 0 if stream is None else stream.window,
    }


def _require_room(device: Any, max_ram: str | int | None, location: str, nbytes: int, *, streaming: bool) -> None:
    """Raise ``ResourceError`` ``ram.guard`` if ``nbytes`` of decoded weights do not fit into the memory of
    ``device``.
    """
    if device.type == "cpu":
        require_ram(
            nbytes,
            "decoded weights",
            STREAMED_TOO_LARGE_HINT if streaming else DECODED_TOO_LARGE_HINT,
            max_ram,
            location,
        )


def _packed(checkpoint: Checkpoint, keep_packed: bool | None, choice: Dispatch | None) -> set[str]:
    """Return the names of the tensors that stay packed.

    If ``keep_packed`` is true, these are all tensors that can stay packed; if it is false, none. If it is None, these
    are the tensors that the chosen kernel stack multiplies by in packed form; none without a chosen stack.
    """
    if keep_packed is not None:
        return packable(checkpoint) if keep_packed else set()
    computes = choice is not None and choice.computes
    return packable(checkpoint, direct=True) if computes else set()


def _use_int8(model: Any, device: Any, location: str) -> None:
    """Make packed linear layers multiply inputs that are rounded to 8 bits.

    Raises ``UnsupportedError`` ``model.compute`` if the device is not the CPU or the model has no such layers.
    """
    if device.type != "cpu":
        raise UnsupportedError(
            f"expected a CPU to compute in int8 on, found {device}", rule="model.compute", where=location
        )
    if not require("ingot.runtime.layers.rounded_inputs", "torch").round_inputs(model):
        raise UnsupportedError(
            "expected packed linear layers to compute in int8, but the model has none of codec affine with 2, 3, 4 or "
            "8 bits and groups of a multiple of 32 columns: load the model without compute",
            rule="model.compute",
            where=location,
        )
    require("ingot.runtime.layers.decoder_layers", "torch").put_layers(model)


def _target(torch: Any, dtype: Any, config: Any, checkpoint: Checkpoint) -> str:
    """Return the canonical name of the parameters' dtype: as requested, else as in config.json, else as stored."""
    requested = dtype if dtype is not None else getattr(config, "dtype", None)
    if requested is None:
        rows = (DTYPES.get(tensor.dtype) for tensor in checkpoint.values())
        requested = next((row.name for row in rows if row is not None and row.is_float and row.bits >= 16), "f32")
    try:
        row = resolve_dtype(requested)
    except UnsupportedError as error:
        raise error.add_location("dtype") from None
    if not row.is_float or row.bits < 16 or getattr(torch, row.torch or "", None) is None:
        raise UnsupportedError(
            f"expected a dtype to compute in (f32, bf16, f16 or f64), found {row.name}", rule="model.dtype"
        )
    return row.name
