"""Writing of a full decoder as a Core ML package: a generated program with the model's tensors (``spec/coreml.md``)."""

from __future__ import annotations

from ingot.artifacts.extract_options import ModelOptions
from ingot.artifacts.open import Source
from ingot.conversion.coreml.decoder import constant_name
from ingot.conversion.coreml.decoder_config import RULE, parse_decoder
from ingot.conversion.coreml.program import Execution, FullModel, open_for_package, with_program
from ingot.conversion.report import ConvertReport
from ingot.core.options import takes
from ingot.errors import UnsupportedError, UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.views.names import rename, select

CONTEXT = 2048
_MAX_CONTEXT = 1 << 17
# Tensors that old versions of transformers store, although every reader computes them.
_COMPUTED = (".rotary_emb.inv_freq",)


@takes(ModelOptions, "extract")
def extract_model(options: ModelOptions) -> ConvertReport:
    """Write a package with an ML program for a decoder and the checkpoint's tensors.

    The program continues a text by one or more tokens; keys and values of earlier tokens are in Core ML's states
    (iOS 18). It maps ``inputIds``, int32 [1, n], and ``fullAttentionMask``, f16 [1, 1, n, tokens so far], to
    ``logits``, f16 [1, n, vocabulary]. A tensor of f16 keeps its codec if the opset has an operation for it; all others
    are written as f16.

    ``path`` is a model folder with a ``config.json`` of llama, mistral, qwen2, qwen3, gemma, gemma2 or gemma3_text. The
    default of ``context`` is the model's context, but at most 2048, because the states hold that many tokens. The
    other options are those of ``ingot.convert``.

    Raises
    ------
    UsageError
        ``coreml.model``: no such folder or context; a missing or unknown tensor, or one of a wrong shape.
    UnsupportedError
        ``coreml.model``: another architecture.
    CodecError
        A value beyond the range of f16.
    """
    execution = Execution(options.max_ram, options.resume, options.overwrite, options.progress)
    with open_for_package(options.path, options.out) as package:
        view = _view(package.checkpoint, _request(package.source, options.context))
        return package.write(view, execution)


def _request(source: Source, context: int | None) -> FullModel:
    """Return the program to generate for a model folder; raise ``coreml.model``."""
    values = source.config()
    if not values:
        raise UsageError(
            "expected a model folder with a config.json; name the folder of the model",
            rule=RULE,
            where=source.location,
        )
    try:
        decoder = parse_decoder(values)
    except UnsupportedError as error:
        raise UnsupportedError(error.message, rule=RULE, where=source.location) from None
    longest = min(decoder.context, _MAX_CONTEXT)
    chosen = min(longest, CONTEXT) if context is None else context
    if not 2 <= chosen <= longest:
        raise UsageError(
            f"expected a context of 2 to {longest} tokens, found {chosen}", rule=RULE, where=source.location
        )
    return FullModel(decoder, chosen)


def _view(checkpoint: Checkpoint, model: FullModel) -> Checkpoint:
    """Return the model's tensors under the names of the program's constants, with the program attached."""
    names = dict[str, str]()
    for name, shape in model.decoder.shapes():
        if name not in checkpoint:
            raise UsageError("the model lacks this tensor, which its config.json requires", rule=RULE, where=name)
        if checkpoint[name].shape != shape:
            raise UsageError(
                f"expected the shape {list(shape)}, found {list(checkpoint[name].shape)}", rule=RULE, where=name
            )
        names[name] = constant_name(name)
    tied = {"lm_head.weight"} if model.decoder.tied_head else set()
    for name in checkpoint:
        if name not in names and name not in tied and not name.endswith(_COMPUTED):
            raise UsageError(
                f"the program for a {model.decoder.family} has no place for this tensor; remove it from the model",
                rule=RULE,
                where=name,
            )
    return with_program(rename(select(checkpoint, names), names), model)
