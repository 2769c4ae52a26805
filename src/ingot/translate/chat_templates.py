"""Conversion of chat templates between the files of a model folder and GGUF metadata.

A model may have one template, or several with names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_letters, digits
from typing import Any

from ingot.translate.keys import TEMPLATE, Typed

JINJA = "chat_template.jinja"
JSON = "chat_template.json"
ADDITIONAL = "additional_chat_templates/"
NAMES = "tokenizer.chat_templates"
"""GGUF key: the names of all templates except the default one."""
DEFAULT = "default"
_NAMED = TEMPLATE + "."
_LETTERS = frozenset(ascii_letters + digits)


@dataclass(slots=True)
class Templates:
    """Chat templates by their GGUF name, and the files whose templates are not used."""

    by_name: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    def to_metadata(self) -> Typed:
        """Return GGUF metadata: the default template, each named template, and the list of names."""
        named = {name: text for name, text in self.by_name.items() if name != DEFAULT}
        typed: Typed = {_NAMED + name: ("string", text) for name, text in named.items()}
        typed |= {NAMES: ("array:string", sorted(named))} if named else {}
        return typed | ({TEMPLATE: ("string", self.by_name[DEFAULT])} if DEFAULT in self.by_name else {})


def is_template_file(name: str) -> bool:
    """Return whether a file of a model folder contains only chat templates."""
    return name in (JINJA, JSON) or name.startswith(ADDITIONAL)


def find(settings: Mapping[str, Any], separate: Mapping[str, Any], texts: Mapping[str, str]) -> Templates:
    """Return the templates of a folder, by the precedence of ``gguf.SpecialVocab``.

    Parameters
    ----------
    settings : mapping
        ``tokenizer_config.json``, whose template precedes those of all files.
    separate : mapping
        ``chat_template.json``, used if there is no ``chat_template.jinja``.
    texts : mapping
        Texts of files by name, including ``chat_template.jinja`` and the files of ``additional_chat_templates``.
    """
    additional = {
        name.removeprefix(ADDITIONAL).removesuffix(".jinja"): text
        for name, text in texts.items()
        if name.startswith(ADDITIONAL) and name.endswith(".jinja")
    }
    in_settings = _choices(settings.get("chat_template"))
    in_json = _choices(separate.get("chat_template"))
    files = [*((JSON, text) for text in in_json.values()), *((JINJA, texts[JINJA]) for _ in range(JINJA in texts))]
    files += [(f"{ADDITIONAL}{name}.jinja", text) for name, text in additional.items()]
    default = {DEFAULT: texts[JINJA]} if JINJA in texts else in_json
    templates = Templates()
    for name, text in (in_settings or {**default, **additional}).items():
        spelled = "".join(letter if letter in _LETTERS else "_" for letter in name)
        if spelled in templates.by_name:
            templates.unused.append(f"the chat template {name[:80]!r}, whose name is that of another template in GGUF")
        elif spelled:
            templates.by_name[spelled] = text
    used = set(templates.by_name.values())
    templates.unused += [f"{name}, because another chat template is used" for name, text in files if text not in used]
    return templates


def from_metadata(metadata: Mapping[str, Any]) -> str | Sequence[Mapping[str, str]] | None:
    """Return the value of ``chat_template`` in ``tokenizer_config.json``: one text, or a list of names with texts."""
    default = metadata.get(TEMPLATE)
    named = {
        key.removeprefix(_NAMED): text
        for key, text in metadata.items()
        if key.startswith(_NAMED) and isinstance(text, str)
    }
    templates = {**({DEFAULT: default} if isinstance(default, str) else {}), **named}
    if not named:
        return default if isinstance(default, str) else None
    return [{"name": name, "template": text} for name, text in templates.items()]


def _choices(value: Any) -> dict[str, str]:
    """Return templates by name from a JSON value: one text, or a list of objects with a name and a template."""
    if isinstance(value, str):
        return {DEFAULT: value}
    choices = value if isinstance(value, list) else []
    return {
        choice["name"]: choice["template"]
        for choice in choices
        if isinstance(choice, Mapping)
        and isinstance(choice.get("name"), str)
        and isinstance(choice.get("template"), str)
    }
