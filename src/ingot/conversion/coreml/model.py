"""A whole checkpoint as a Core ML package: a program made for it, and its tensors in that (``spec/coreml.md``)."""

from __future__ import annotations

from collections.abc import Mapping

from ingot.artifacts.extract_options import ModelOptions
from ingot.artifacts.open import Source
from ingot.conversion.coreml.program import Execution, WholeModel, opened, with_program
from ingot.conversion.report import ConvertReport
from ingot.core.options import takes
from ingot.errors import UnsupportedError, UsageError
from ingot.formats.coreml.build import OPSETS
from ingot.formats.coreml.llama import constant_name
from ingot.model.checkpoint import Checkpoint
from ingot.naming.config import LlamaConfig
from ingot.views.names import rename, select

CONTEXT = 512
_RULE = "coreml.model"
# Tensors that older programs store and every reader makes itself.
_MADE = (".rotary_emb.inv_freq",)


@takes(ModelOptions, "extract")
def extract_model(options: ModelOptions) -> ConvertReport:
    """Make an ML program of a Llama, and a package of it and of the checkpoint's tensors.

    The program takes ``input_ids``, int32 [1, context], and gives ``logits``, f16 [1, context, vocabulary]: position t
    depends on the tokens up to t alone, so that a shorter text may be filled up with any token. A tensor of f16 keeps
    its codec where an operation of the opset says the same; all others are written as f16.

    ``path`` is a model folder with the ``config.json`` of a Llama. ``context`` is the model's own by default, at most
    512: scores take its square of memory. The rest is as in ``ingot.convert``.

    Raises
    ------
    UsageError
        ``coreml.model``: no such folder, opset or context, a tensor that is missing, misshapen or not known.
    UnsupportedError
        ``coreml.model``: another architecture.
    CodecError
        A value that f16 cannot hold.
    """
    execution = Execution(options.max_ram, options.resume, options.overwrite, options.progress)
    with opened(options.path, options.out) as begun:
        view = _view(begun.checkpoint, _request(begun.source, options.opset, options.context))
        return begun.write(view, execution)


def _request(source: Source, opset: str, context: int | None) -> WholeModel:
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
    return WholeModel(config, chosen, opset)


def _config(values: Mapping[str, object], where: str) -> LlamaConfig:
    try:
        return LlamaConfig.from_mapping(values)
    except (UsageError, UnsupportedError) as error:
        raise type(error)(error.message, rule=_RULE, where=where) from None


def _view(checkpoint: Checkpoint, wanted: WholeModel) -> Checkpoint:
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
