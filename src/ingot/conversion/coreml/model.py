"""Writing of a full Llama as a Core ML package: a generated program with the model's tensors (``spec/coreml.md``)."""

from __future__ import annotations

from collections.abc import Mapping

from ingot.artifacts.extract_options import ModelOptions
from ingot.artifacts.open import Source
from ingot.conversion.coreml.program import Execution, FullModel, open_for_package, with_program
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
# Tensors that old versions of transformers store, although every reader computes them.
_COMPUTED = (".rotary_emb.inv_freq",)


@takes(ModelOptions, "extract")
def extract_model(options: ModelOptions) -> ConvertReport:
    """Write a package with an ML program for a Llama and the checkpoint's tensors.

    The program maps ``input_ids``, int32 [1, context], to ``logits``, f16 [1, context, vocabulary]. Position t depends
    only on tokens up to t, so shorter inputs may be padded with any token. A tensor of f16 keeps its codec if the opset
    has an operation for it; all others are written as f16.

    ``path`` is a model folder with the ``config.json`` of a Llama. The default of ``context`` is the model's context,
    but at most 512, because the memory for attention scores is quadratic in it. The other options are those of
    ``ingot.convert``.

    Raises
    ------
    UsageError
        ``coreml.model``: no such folder, opset or context; a missing or unknown tensor, or one of a wrong shape.
    UnsupportedError
        ``coreml.model``: another architecture.
    CodecError
        A value beyond the range of f16.
    """
    execution = Execution(options.max_ram, options.resume, options.overwrite, options.progress)
    with open_for_package(options.path, options.out) as package:
        view = _view(package.checkpoint, _request(package.source, options.opset, options.context))
        return package.write(view, execution)


def _request(source: Source, opset: str, context: int | None) -> FullModel:
    """Return the program to generate for a model folder; raise ``coreml.model``."""
    if opset not in OPSETS:
        raise UsageError(f"expected the opset {', '.join(OPSETS)}, found {opset!r}", rule=_RULE)
    values = source.config()
    if not values:
        raise UsageError(
            "expected a model folder with a config.json; name the folder of the model",
            rule=_RULE,
            where=source.location,
        )
    if values.get("model_type") != "llama":
        raise UnsupportedError(
            f"expected the model_type llama, the only one with a Core ML program, found "
            f"{values.get('model_type')!r:.80}",
            rule=_RULE,
            where=source.location,
        )
    config = _config(values, source.location)
    chosen = min(config.context, CONTEXT) if context is None else context
    if not 1 <= chosen <= config.context:
        raise UsageError(
            f"expected a context of 1 to {config.context} tokens, found {chosen}", rule=_RULE, where=source.location
        )
    return FullModel(config, chosen, opset)


def _config(values: Mapping[str, object], location: str) -> LlamaConfig:
    try:
        return LlamaConfig.from_mapping(values)
    except (UsageError, UnsupportedError) as error:
        raise type(error)(error.message, rule=_RULE, where=location) from None


def _view(checkpoint: Checkpoint, model: FullModel) -> Checkpoint:
    """Return the model's tensors under the names of the program's constants, with the program attached."""
    shapes = model.config.shapes()
    for name, shape in shapes.items():
        if name not in checkpoint:
            raise UsageError("the model lacks this tensor, which its config.json requires", rule=_RULE, where=name)
        if checkpoint[name].shape != shape:
            raise UsageError(
                f"expected the shape {list(shape)}, found {list(checkpoint[name].shape)}", rule=_RULE, where=name
            )
    tied = {"lm_head.weight"} if model.config.tied_head else set()
    for name in checkpoint:
        if name not in shapes and name not in tied and not name.endswith(_COMPUTED):
            raise UsageError(
                "the program for a Llama has no place for this tensor; remove it from the model",
                rule=_RULE,
                where=name,
            )
    renamed = rename(select(checkpoint, shapes), {name: constant_name(name) for name in shapes})
    return with_program(renamed, model)
