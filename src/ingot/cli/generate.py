"""The command ``ingot generate``."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any

from ingot.artifacts.destination import CPU
from ingot.cli.declare import declare
from ingot.cli.output import Json, line, print_json
from ingot.core.about import About
from ingot.errors import printable
from ingot.reporting.report import size_text
from ingot.runtime.loading.options import Draft, LoadOptions

EPILOG = (
    "Examples:\n\n"
    '  ingot generate ./Llama-3-8B "Once upon a time"\n\n'
    '  ingot generate ./packed "The kernel" --keep-packed --max-tokens 64\n\n'
    '  ingot generate model.zt "The kernel" --dtype f32 --json\n\n'
    '  ingot generate ./model.squizd "The kernel" --draft\n\n'
    '  ingot generate ./model "The kernel" --kv-cache int4\n\n'
    '  ingot generate ./larger-than-memory "The kernel" --stream --max-ram 2GiB'
)

_NOT_BLANK = re.compile(r"[^\n\t]+")


@declare("generate", EPILOG)
def command(
    *,
    load: LoadOptions,
    prompt: Annotated[str, About("Text to continue.", argument=True)],
    max_tokens: Annotated[int, About("Limit of new tokens.", metavar="N", minimum=1)] = 32,
    draft: Annotated[bool, About("Decode speculatively with the EAGLE-3 head that the model carries.")] = False,
    drafting: Draft,
    json: Json = False,
) -> None:
    """Load a model with transformers, continue a prompt with the most likely tokens, and show time and memory.

    Needs the extra transformers. The text goes to stdout, the figures to stderr. A draft head does not change the text;
    it saves time if most of its proposed tokens are right.
    """
    from ingot.runtime.evaluation.generate import generate

    generated = generate(load, prompt, max_tokens, drafting if draft or drafting.head is not None else None)
    if json:
        print_json(generated)
        return
    text = generated.prompt + generated.text
    print(_NOT_BLANK.sub(lambda match: printable(match[0]), text))  # a model may write terminal escape sequences
    for text in summary(generated):
        line(text, stream=sys.stderr)


def summary(generated: Any) -> list[str]:
    """Return lines with the time, memory and number of tokens of loading and generating."""
    load = generated.load
    speed = "" if generated.tokens_per_second is None else f", then {generated.tokens_per_second:.3g} tokens/s"
    end = ", ended by itself" if generated.stopped else ""
    times = f"loaded in {load.seconds:.3f} s, first token after {generated.first_token_seconds:.3f} s{speed}"
    packed = f"{size_text(load.packed)} kept packed"
    streamed = f", {size_text(load.streamed)} streamed ({size_text(load.window)} at a time)" if load.streamed else ""
    device = "" if load.device == CPU else f" on {load.device}"
    return [
        f"{load.model}, {load.dtype}{device}, from {load.format}: {load.tier} ({printable(load.why)})",
        f"{size_text(load.mapped)} mapped, {size_text(load.decoded)} decoded, {packed}{streamed}",
        f"{times}; {len(generated.tokens)} tokens{end}",
        *([] if generated.drafted is None else [_draft_line(generated.drafted)]),
        *([] if generated.kv_cache is None else [_cache_line(generated.kv_cache)]),
    ]


def _cache_line(use: Any) -> str:
    per_token = f"{use.bytes_per_token:.0f} bytes a token, {use.full_bytes_per_token:.0f} in full precision"
    return f"KV cache {use.kind}: {size_text(use.nbytes)} of {use.tokens} tokens, {per_token}"


def _draft_line(drafted: Any) -> str:
    if drafted.dropped:
        return f"draft head not used: {drafted.dropped}"
    per_pass = "-" if drafted.tokens_per_pass is None else f"{drafted.tokens_per_pass:.2f}"
    speed = "" if drafted.speed_up is None else f", {drafted.speed_up:.2f} times as fast as token by token"
    accepted = f"{drafted.accepted} of {drafted.proposed} proposed tokens right"
    return f"draft head: {accepted}, {per_pass} tokens a pass{speed}"
