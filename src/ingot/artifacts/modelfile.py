"""Write Modelfiles of ollama for GGUF files, and recognize Modelfiles that add nothing to their GGUF file.

ollama reads the chat template from the file's ``tokenizer.chat_template``, and compares it with its built-in templates
(``server/model.go`` of ollama 0.33). A line TEMPLATE, in Go's syntax, would replace the file's template. Therefore this
line is written only for a file without a template; it passes the prompt unchanged.

A line with a stop text is written for each end token of ``generation_config.json`` that is a control token of the file.
Ordinary text never contains control tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MODELFILE = "Modelfile"
PLAIN_PROMPT = "{{ .Prompt }}"
_TEMPLATE = "tokenizer.chat_template"
_TOKENS = "tokenizer.ggml.tokens"
_TYPES = "tokenizer.ggml.token_type"
_CONTROL = 3  # LLAMA_TOKEN_TYPE_CONTROL
_HEADER = "# Written by Ingot. Create the model with: ollama create NAME -f THIS_FILE"


def modelfile_name(weights: str) -> str:
    """Return the name of the Modelfile that is written next to a file of weights: ``x.Modelfile`` for ``x.gguf``."""
    return f"{weights.removesuffix('.gguf')}.{MODELFILE}"


def modelfile_text(weights: str, metadata: Mapping[str, Any], end_ids: Sequence[int]) -> str:
    """Return the text of a Modelfile for the GGUF file ``weights`` in the same folder.

    Parameters
    ----------
    weights : str
        The name of the file.
    metadata : mapping
        The metadata of the file.
    end_ids : sequence of int
        Ids of the tokens that end an answer, from ``generation_config.json``.
    """
    lines = [_HEADER, f"FROM ./{weights}"]
    if has_template(metadata):
        lines.append(f"# No TEMPLATE: ollama reads {_TEMPLATE} of the file.")
    else:
        lines.append(f"TEMPLATE {PLAIN_PROMPT}")
    controls = control_tokens(metadata)
    texts = dict.fromkeys(controls[index] for index in end_ids if index in controls)
    lines += [f'PARAMETER stop "{text}"' for text in texts if _is_quotable(text)]
    return "\n".join(lines) + "\n"


def has_template(metadata: Mapping[str, Any]) -> bool:
    """Return whether a GGUF file has a chat template."""
    return bool(metadata.get(_TEMPLATE))


def control_tokens(metadata: Mapping[str, Any]) -> dict[int, str]:
    """Return the texts of a GGUF file's control tokens by id; empty if the file has no tokenizer."""
    tokens = metadata.get(_TOKENS)
    types = metadata.get(_TYPES)
    if tokens is None or types is None:
        return {}
    pairs = enumerate(zip(tokens, types, strict=False))
    return {index: str(text) for index, (text, token_type) in pairs if token_type == _CONTROL}


def adds_nothing(directives: Iterable[tuple[str, str]], metadata: Mapping[str, Any]) -> bool:
    """Return whether a Modelfile without its lines ``directives`` would have the same effect.

    Lines without effect are stop texts that are control tokens of the file, and the template that passes the prompt
    unchanged if the file has no template.

    Parameters
    ----------
    directives : iterable of (str, str)
        All lines except FROM: their names in lower case, and their values.
    metadata : mapping
        The metadata of the GGUF file.
    """
    controls = set(control_tokens(metadata).values())
    for name, value in directives:
        parameter, _, text = value.partition(" ")
        if name == "parameter" and parameter == "stop" and _unquoted(text.strip()) in controls:
            continue
        if name == "template" and _unquoted(value) == PLAIN_PROMPT and not has_template(metadata):
            continue
        return False
    return True


def _unquoted(value: str) -> str | None:
    """Return a value without its quotes, or None if the closing quotes are in a later line."""
    for quotes in ('"""', '"'):
        if value.startswith(quotes):
            inner = value[len(quotes) : -len(quotes)]
            is_complete = len(value) >= 2 * len(quotes) and value.endswith(quotes) and quotes not in inner
            return inner if is_complete else None
    return value


def _is_quotable(text: str) -> bool:
    """Return whether ollama's parser reads a quoted text unchanged. It removes characters that are not printable."""
    return text.isprintable() and '"' not in text
