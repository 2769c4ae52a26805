"""transformers: a running model from any checkpoint that Ingot opens (``spec/loading.md``).

A stack selector (``ingot.model.stacks``) chooses what a ``.squizd`` runs on. Every stack but a Core ML package becomes
a model of transformers.
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
from ingot.core.runtime.memory import require_ram
from ingot.errors import IngotError, UnsupportedError, UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.features import Flags
from ingot.model.stacks import STACK_SELECTORS, Dispatch, StackRequest
from ingot.runtime.loading.load_report import LoadReport, Meter
from ingot.runtime.loading.model_source import ModelSource, resolve
from ingot.runtime.loading.options import INT8, LoadOptions
from ingot.runtime.loading.serving import KV_CACHES, PACKED
from ingot.runtime.loading.transformers_build import build
from ingot.runtime.loading.transformers_config import EXTRA, model_class, read_config, read_generation_config
from ingot.runtime.loading.transformers_packed import made_bytes, packable, put_packed
from ingot.runtime.loading.transformers_weights import (
    NO_ROOM,
    STREAMED,
    Loading,
    copied_bytes,
    is_mapped,
    merged_names,
    streamable,
    taking_order,
    weights_of,
)
from ingot.stores.location import Location


@dataclass(frozen=True, slots=True)
class Given:
    """What a caller has decided already: the class and the config, where they are not the folder's own, and options of
    ``from_pretrained`` for transformers."""

    kind: Any = None
    config: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)


@takes(LoadOptions, "model")
def load_model(options: LoadOptions) -> Any:
    """Return a model of transformers with the weights of a checkpoint, in evaluation mode.

    Weights that are stored as they are wanted stay in the mapped file; the others are decoded once, into the memory
    that the model keeps. Tied weights stay tied.

    With ``stream`` a model runs whose decoded weights are larger than memory, in that of two of its layers: each pass
    decodes them anew, while the layer before computes. Such a model takes one pass at a time and cannot be saved.

    Of a ``.squizd`` the first stack is taken, in the order of its document, that the file holds, this machine has and
    Ingot can run. On a Mac this may be the Core ML package that the file carries: then the model is a
    ``coremltools.models.MLModel``, unless ``device``, ``dtype`` or ``keep_packed`` are given or ``coreml`` is false.

    Returns
    -------
    model

    Raises
    ------
    FormatError
        ``model.*``: config.json is missing or wrong, or disagrees with the weights (``spec/loading.md``).
    UnsupportedError
        ``model.architecture``, ``model.quantized``, ``model.dtype``, ``model.unchecked``, ``kv.model``, ``kv.evict``.
    ResourceError
        ``ram.guard``.
    UsageError
        ``model.device``, ``model.option``, ``kv.option``.
    MissingExtraError
        torch or transformers is not installed.
    IngotError
        As ``ingot.open`` and ``Tensor.numpy``.
    """
    return load(options, Given())


def load(options: LoadOptions, given: Given) -> Any:
    """Return the model that ``load_model`` does, of another class or config where these are given; errors as there."""
    meter = Meter()
    if isinstance(options.dtype, str) and options.dtype == "auto":
        options = replace(options, dtype=None)
    if options.compute == INT8:
        options = replace(options, keep_packed=True)
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
            model, done = _run(source, options, meter, given)
        except IngotError as error:
            raise error if checkpoint.location in (error.where or "") else error.at(checkpoint.location) from None
        if done.get("streamed"):
            stack.pop_all()  # the model goes on reading; its files are closed when it goes
    if options.report is not None:
        options.report(LoadReport(Location.parse(options.path).display, **{**done, **meter.taken()}))
    return model


def _stack_request(options: LoadOptions) -> StackRequest:
    """Return the options that decide on stacks."""
    kind = str(options.device).partition(":")[0]
    asked = [
        text
        for text, given in (
            (f"device {kind}", kind != "cpu"),
            ("a dtype", options.dtype is not None),
            ("packed or decoded weights", options.keep_packed is not None),
            ("a model of transformers", not options.coreml),
            ("streamed weights", options.stream),
            ("a packed KV cache", options.kv_cache is not None),
        )
        if given
    ]
    return StackRequest(kind, options.keep_packed, f"the caller asks for {', '.join(asked)}" if asked else "")


def _run(source: ModelSource, options: LoadOptions, meter: Meter, given: Given) -> tuple[Any, dict[str, Any]]:
    """Return what runs the first stack that can be run, with what the report says of it."""
    checkpoint, choice = source.checkpoint, None
    if checkpoint.features is not None and checkpoint.format in STACK_SELECTORS:
        selector, request = STACK_SELECTORS[checkpoint.format], _stack_request(options)
        choice = selector.select(checkpoint.features, request)
        if choice.stack == Flags.ANE_COREML.name:
            try:
                return _package(source, choice)
            except UnsupportedError as error:
                choice = selector.select(checkpoint.features, replace(request, refused=str(error)))
    packed = _packed(checkpoint, options.keep_packed, choice)
    if not options.stream:
        checkpoint.read_ahead(taking_order(checkpoint, packed))  # weights travel while torch is imported
    with meter.importing():
        torch = require("torch", EXTRA)
        require("transformers", EXTRA)
    plan = _Plan(replace(options, device=_device(torch, options.device)), given, packed)
    model, done = _load(torch, source, plan, meter)
    if choice is not None:
        done |= {"why": f"{done['why']}; {choice.describe()}", "dispatch": choice}
    return model, done


def _package(source: ModelSource, choice: Dispatch) -> tuple[Any, dict[str, Any]]:
    part = source.checkpoint.attachments.coreml
    if part is None:  # the reader has refused such a file
        raise UnsupportedError("expected a Core ML package, found none", rule="model.coreml")
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
    """How a model is built: ``options`` with a ``torch.device``, what was given, and what is to stay packed."""

    options: LoadOptions
    given: Given
    packed: set[str]


def _load(torch: Any, source: ModelSource, plan: _Plan, meter: Meter) -> tuple[Any, dict[str, Any]]:
    """Build the model; return it with what the report says of it."""
    options, given = plan.options, plan.given
    checkpoint, device = source.checkpoint, options.device
    with meter.importing():  # of the architecture's modules
        config = read_config(source.folder, len(checkpoint), checkpoint.format)  # refuses, whichever config is taken
        config = config if given.config is None else given.config
        kind = given.kind or model_class(config, source.folder.location)
    target = _target(torch, options.dtype, config, checkpoint)
    dtype = getattr(torch, str(DTYPES[target].torch))
    packed = plan.packed
    merged = merged_names(config, checkpoint)
    streamed = streamable(checkpoint, target, packed, merged) if options.stream else frozenset()
    resident = copied_bytes(checkpoint, target, packed | streamed, merged) + made_bytes(checkpoint, packed - merged)
    room = partial(_require_room, device, options.max_ram, checkpoint.location, streaming=options.stream)
    room(resident)

    def attempt(some: set[str]) -> Any:
        loading = Loading(device, some)
        weights = weights_of(checkpoint, loading)
        asked = {**given.options, "dtype": dtype}
        return build(kind, config, weights, loading, asked, strict=options.strict, where=checkpoint.location)

    placed = put_packed(attempt, packed, dtype, device, streamed)
    model = placed.model
    generation = read_generation_config(source.folder)
    if generation is not None and model.can_generate():
        model.generation_config = generation
    model.config.name_or_path = source.name
    stream = None
    if placed.streamed:
        stream = require("ingot.runtime.loading.transformers_stream", EXTRA).Stream(
            placed.streamed, device, checkpoint.require_unchanged
        )
        room(resident + stream.window)
    if device.type != "cpu":
        model._apply(lambda values: values if values.is_meta else values.to(device))
    if stream is not None:
        stream.install(model)
    if options.compute == INT8:
        _round(model, device, checkpoint.location)
    if options.kv_cache is not None:
        KV_CACHES[PACKED].install(model, options.kv_cache)
    stored = (tensor for name, tensor in checkpoint.items() if name not in merged)
    mapped = sum(tensor.nbytes for tensor in stored if is_mapped(tensor, target))
    kept = placed.packed | {site.tensor.name for site in placed.streamed}
    return model, {
        "format": checkpoint.format,
        "tier": source.tier,
        "why": source.why,
        "model": kind.__name__,
        "dtype": target,
        "device": str(device),
        "mapped": mapped,
        "decoded": copied_bytes(checkpoint, target, kept, merged),
        "packed": sum(checkpoint[name].nbytes for name in placed.packed),
        "streamed": 0 if stream is None else stream.nbytes,
        "window": 0 if stream is None else stream.window,
    }


def _require_room(device: Any, max_ram: str | int | None, where: str, nbytes: int, *, streaming: bool) -> None:
    """Refuse decoded weights that do not fit; ``ram.guard``."""
    if device.type == "cpu":
        require_ram(nbytes, "decoded weights", STREAMED if streaming else NO_ROOM, max_ram, where)


def _packed(checkpoint: Checkpoint, asked: bool | None, choice: Dispatch | None) -> set[str]:
    """Return the tensors that are to stay packed: as asked, else those from whose codes the stack multiplies."""
    if asked is not None:
        return packable(checkpoint) if asked else set()
    computes = choice is not None and choice.computes
    return packable(checkpoint, direct=True) if computes else set()


def _round(model: Any, device: Any, where: str) -> None:
    """Have packed linear layers multiply x in 8 bits; refuses a model without any."""
    if device.type != "cpu":
        raise UnsupportedError(
            f"expected a CPU to compute in int8 on, found {device}", rule="model.compute", where=where
        )
    if not require("ingot.runtime.layers.rounded_inputs", "torch").round_inputs(model):
        raise UnsupportedError(
            "expected packed linear layers to compute in int8 with, of codec affine in 2, 3, 4 or 8 bits, groups of "
            "multiples of 32 columns, found none: load the model without compute",
            rule="model.compute",
            where=where,
        )
    require("ingot.runtime.layers.decoder_layers", "torch").put_layers(model)


def _device(torch: Any, device: Any) -> Any:
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise UsageError(
            f"expected a device that this torch has, found {str(device)[:80]!r}", rule="model.device"
        ) from error
    if target.type == "meta":
        raise UsageError("expected a device that holds values, found 'meta'", rule="model.device")
    return target


def _target(torch: Any, dtype: Any, config: Any, checkpoint: Checkpoint) -> str:
    """Return the canonical name of the parameters' type: as asked, as config.json says, as stored."""
    asked = dtype if dtype is not None else getattr(config, "dtype", None)
    if asked is None:
        rows = (DTYPES.get(tensor.dtype) for tensor in checkpoint.values())
        asked = next((row.name for row in rows if row is not None and row.is_float and row.bits >= 16), "f32")
    row = resolve_dtype(asked)
    if not row.is_float or row.bits < 16 or getattr(torch, row.torch or "", None) is None:
        raise UnsupportedError(
            f"expected a dtype to compute in (f32, bf16, f16 or f64), found {row.name}", rule="model.dtype"
        )
    return row.name
