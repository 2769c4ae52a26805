"""A whole checkpoint as a Core ML package: a program made for it, and its tensors in that (``spec/coreml.md``)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike

from ingot.core.llama import LlamaConfig
from ingot.core.progress import Progress, ProgressCallback
from ingot.engine.resources import Resources
from ingot.errors import UnsupportedError, UsageError
from ingot.formats.coreml.build import OPSETS
from ingot.formats.coreml.format import CoremlFormat
from ingot.formats.coreml.llama import constant_name, llama_template
from ingot.model.checkpoint import Checkpoint
from ingot.model.lazy import Lazy
from ingot.model.view import derived
from ingot.ops.convert.convert import Prepared, refuse_same, run
from ingot.ops.convert.plan import PlanRequest, plan_conversion
from ingot.ops.convert.report import ConvertReport
from ingot.ops.destination import destination
from ingot.ops.open import Source, checkpoint_of, open_source
from ingot.ops.views.names import rename, select
from ingot.recipes.choice import Choice
from ingot.recipes.recipe import Recipe, Rule

AnyPath = str | PathLike[str]
CONTEXT = 512
_RULE = "coreml.model"
# Tensors that older programs store and every reader makes itself.
_MADE = (".rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class ProgramRequest:
    """What program is wanted: of which model, for how many tokens at once, in which opset."""

    config: LlamaConfig
    context: int
    opset: str


def extract_model(
    path: AnyPath,
    out: AnyPath,
    *,
    opset: str = "iOS16",
    context: int | None = None,
    max_ram: int | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> ConvertReport:
    """Make an ML program of a Llama, and a package of it and of the checkpoint's tensors.

    The program takes ``input_ids``, int32 [1, context], and gives ``logits``, f16 [1, context, vocabulary]: position t
    depends on the tokens up to t alone, so that a shorter text may be filled up with any token. A tensor of f16 keeps
    its codec where an operation of the opset says the same; all others are written as f16.

    Parameters
    ----------
    path : path
        A model folder with the ``config.json`` of a Llama.
    out : path
        ``X.mlpackage``.
    opset : {"iOS16", "iOS17", "iOS18"}
    context : int, optional
        By default the model's own, at most 512: scores take its square of memory.
    max_ram, resume, overwrite, progress
        As in ``ingot.convert``.

    Raises
    ------
    UsageError
        ``coreml.model``: no such folder, opset or context, a tensor that is missing, misshapen or not known.
    UnsupportedError
        ``coreml.model``: another architecture.
    CodecError
        A value that f16 cannot hold.
    """
    started = time.perf_counter()
    place = destination(out, CoremlFormat.name)
    source = open_source(path, io="pread")
    close = source.close
    try:
        refuse_same(source, place)
        wanted = _request(source, opset, context)
        view = _view(checkpoint_of(source), wanted)
        close = view.close
        format = CoremlFormat().fit(view.attachments)
        kept = [name for name in view if format.refuses(view[name].spec()) is None]
        recipe = _recipe(kept)
        plan = plan_conversion(view, CoremlFormat(), PlanRequest(recipe, allow_requantize=True))
        resources = Resources(max_ram, None, Progress(plan.in_bytes, progress))
        with Prepared(source, view, plan, place, recipe) as prepared:
            report = run(prepared, resources, overwrite=overwrite, resume=resume)
        return replace(report, seconds=time.perf_counter() - started)
    finally:
        close()


def _recipe(kept: Sequence[str]) -> Recipe:
    half = Rule(Choice("dense", {"dtype": "f16"}), "f16")
    stays = (Rule(None, "as stored", match=tuple(kept)),) if kept else ()
    return Recipe("model program", (*stays, half))


def _request(source: Source, opset: str, context: int | None) -> ProgramRequest:
    if opset not in OPSETS:
        raise UsageError(f"expected the opset {', '.join(OPSETS)}, found {opset!r}", rule=_RULE)
    values = source.config()
    if not values:
        raise UsageError("expected a model folder with a config.json, found none", rule=_RULE, where=source.location)
    if values.get("model_type") != "llama":
        raise UnsupportedError(
            f"expected the model_type llama, of which a program can be made, found {values.get('model_type')!r:.80}",
            rule=_RULE,
            where=source.location,
        )
    config = _config(values, source.location)
    chosen = min(config.context, CONTEXT) if context is None else context
    if not 1 <= chosen <= config.context:
        raise UsageError(
            f"expected a context of 1 to {config.context} tokens, found {chosen}", rule=_RULE, where=source.location
        )
    return ProgramRequest(config, chosen, opset)


def _config(values: Mapping[str, object], where: str) -> LlamaConfig:
    try:
        return LlamaConfig.from_mapping(values)
    except (UsageError, UnsupportedError) as error:
        raise type(error)(error.message, rule=_RULE, where=where) from None


def _view(checkpoint: Checkpoint, wanted: ProgramRequest) -> Checkpoint:
    """Return the model's tensors under the names of their constants, with the program that they go into."""
    shapes = wanted.config.shapes()
    for name, shape in shapes.items():
        if name not in checkpoint:
            raise UsageError("expected this tensor of the model, found none", rule=_RULE, where=name)
        if checkpoint[name].shape != shape:
            found = list(checkpoint[name].shape)
            raise UsageError(f"expected {list(shape)}, found {found}", rule=_RULE, where=name)
    tied = {"lm_head.weight"} if wanted.config.tied_head else set()
    for name in checkpoint:
        if name not in shapes and name not in tied and not name.endswith(_MADE):
            raise UsageError(
                "expected a Llama's tensors alone, found this one, which the program would leave out",
                rule=_RULE,
                where=name,
            )
    renamed = rename(select(checkpoint, shapes), {name: constant_name(name) for name in shapes})
    return with_program(renamed, wanted)


def with_program(checkpoint: Checkpoint, wanted: ProgramRequest) -> Checkpoint:
    """Return the checkpoint with a program made for it in place of its own; without companions, which are no part."""
    said = {"context": wanted.context, "opset": wanted.opset, **asdict(wanted.config)}
    view = derived(checkpoint, Lazy(checkpoint, checkpoint.__getitem__), with_program, wanted, said)
    template = llama_template(wanted.config, wanted.context, wanted.opset)
    view.attachments = replace(checkpoint.attachments, draft=None, coreml=None, program=template)
    view.companions = {}
    return view
