"""Determine the text that a chat template puts before a user's first message.

A template is a program in Jinja, written by the author of a model. Jinja's sandbox stops it from reaching Python, but
not from running for hours or filling the memory; so it runs in a separate process with limits. The template gets the
same variables and settings as in transformers (``transformers.utils.chat_template_utils``).
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

_SECONDS = 10
_MEMORY = 1 << 30
_MESSAGE = "0a1b2c3d4e5f"  # a message that no template contains
_DATE = datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC)  # a fixed date, so that samples can be repeated


def text_before_user(template: str, special_tokens: Mapping[str, str]) -> str:
    """Return the text before a user's message; empty if the template fails, takes too long or drops the message.

    Parameters
    ----------
    template : str
        A chat template, as tokenizers of transformers store it.
    special_tokens : mapping of str to str
        The texts of special tokens by their names, such as ``bos_token``.
    """
    try:
        result = subprocess.run(  # noqa: S603  # this program and this module
            [sys.executable, "-m", __name__],
            input=json.dumps({"template": template, "special_tokens": dict(special_tokens)}).encode(),
            capture_output=True,
            timeout=2 * _SECONDS,
            check=True,
        )
        return str(json.loads(result.stdout))
    except (subprocess.SubprocessError, ValueError, OSError):
        return ""


def _limit() -> None:
    """Limit processor time and memory of this process, on systems that can."""
    if sys.platform == "win32":  # the caller's time limit remains
        return
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))


def _main() -> None:
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    request = json.load(sys.stdin)
    _limit()

    class Generation(Extension):
        """A Jinja extension for the statement ``generation``, with which templates mark an assistant's answer.

        transformers adds this statement to Jinja. Here it renders its contents unchanged.
        """

        tags = {"generation"}  # noqa: RUF012  # the type in jinja2

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    extensions = [Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["strftime_now"] = _DATE.strftime
    environment.globals["raise_exception"] = lambda message: sys.exit(1)
    messages = [{"role": "user", "content": _MESSAGE}]
    names = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": False}
    rendered = environment.from_string(request["template"]).render(**request["special_tokens"], **names)
    before, message, _ = rendered.partition(_MESSAGE)
    json.dump(before if message else "", sys.stdout)


if __name__ == "__main__":
    _main()
