"""Credentials for registries, as `docker login` and similar commands store them.

Each source is a JSON object in Docker's form, with an entry for each registry. Therefore no registry receives the
credentials of another registry.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ingot.core.parsing.strictjson import strict_json
from ingot.errors import FormatError, ResourceError

DOCKER_HUB = "docker.io"
_CONTENT = "DOCKER_AUTH_CONFIG"
_FILE = "REGISTRY_AUTH_FILE"
_FOLDER = "DOCKER_CONFIG"
_RULE = "registry.credentials"
_MAX_FILE = 1 << 20
_HELPER = re.compile(r"[\w.-]+", re.ASCII)
_HELPER_SECONDS = 30
_TOKEN_USER = "<token>"  # noqa: S105 - a name that stands for an identity token


def login_of(host: str) -> str:
    """Return ``name:password`` for a registry from the first source with an entry for it; empty if no source has one.

    The sources, in this order: the text in ``DOCKER_AUTH_CONFIG``; the file in ``REGISTRY_AUTH_FILE``; ``config.json``
    in the folder ``DOCKER_CONFIG``, which is ``~/.docker`` by default; the file of Podman and Skopeo.

    Raises
    ------
    FormatError
        ``registry.credentials``: a source is not a JSON object, or an entry is malformed.
    ResourceError
        ``registry.credentials``: a credential helper is missing or fails.
    """
    names = [host, f"https://{host}", f"https://{host}/v1/", f"https://{host}/v2/"]
    if host == DOCKER_HUB:
        names = ["https://index.docker.io/v1/", *names]
    for settings, location in _sources():
        helper = _mapping(settings.get("credHelpers")).get(host)
        if helper is None:
            entries = _mapping(settings.get("auths"))
            entry = next((_mapping(entries[name]) for name in names if name in entries), None)
            login = _login_in(entry, location) if entry is not None else ""
            if login or entry is None:
                if login:
                    return login
                continue
            helper = settings.get("credsStore")
        if helper is not None:
            return _ask_helper(helper, names[0], location)
    return ""


def _sources() -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the settings that exist, and the name of each in messages."""
    text = os.environ.get(_CONTENT)
    if text:
        yield strict_json(text.encode("utf-8", "surrogateescape"), _RULE, _RULE, _CONTENT), _CONTENT
    folder = os.environ.get(_FOLDER)
    docker = Path(folder) if folder else Path("~/.docker").expanduser()
    paths = [docker / "config.json", Path("~/.config/containers/auth.json").expanduser()]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        paths.append(Path(runtime) / "containers" / "auth.json")
    if file := os.environ.get(_FILE):
        paths.insert(0, Path(file))
    for path in paths:
        with suppress(OSError), path.open("rb") as opened:
            data = opened.read(_MAX_FILE + 1)
            if len(data) > _MAX_FILE:
                raise FormatError(_RULE, f"expected at most {_MAX_FILE} bytes", where=str(path))
            yield strict_json(data, _RULE, _RULE, str(path)), str(path)


def _login_in(entry: Mapping[str, Any], location: str) -> str:
    """Return the name and password of an entry; empty if a helper has them."""
    if isinstance(entry.get("username"), str) and isinstance(entry.get("password"), str):
        return f"{entry['username']}:{entry['password']}"
    encoded = entry.get("auth")
    if encoded is None or encoded == "":
        return ""
    try:
        login = b64decode(str(encoded), validate=True).decode()
    except ValueError:
        login = ""
    if ":" not in login:
        raise FormatError(
            _RULE, "expected an entry with NAME:PASSWORD in base64; log in again (`docker login`)", where=location
        )
    return login


def _ask_helper(helper: object, name: str, location: str) -> str:
    """Return the login that a credential helper has for a registry; empty if it has none."""
    program = shutil.which(f"docker-credential-{helper}") if _HELPER.fullmatch(str(helper)) else None
    if program is None:
        raise ResourceError(
            f"these settings name the credential helper {str(helper)[:60]!r}, which is not installed: install "
            "docker-credential-NAME, or log in without a helper",
            rule=_RULE,
            where=location,
        )
    try:
        answer = subprocess.run(  # noqa: S603 - the user's settings name the program
            [program, "get"], input=name.encode(), capture_output=True, timeout=_HELPER_SECONDS, check=False
        )
        fields = _mapping(json.loads(answer.stdout)) if answer.returncode == 0 else {}
    except (OSError, ValueError, subprocess.TimeoutExpired):
        fields = {}
        answer = None
    if fields.get("Username") == _TOKEN_USER:
        raise ResourceError(
            "the credential helper has an identity token, which Ingot does not support: log in with a name and a "
            "password or access token",
            rule=_RULE,
            where=location,
        )
    if isinstance(fields.get("Username"), str) and isinstance(fields.get("Secret"), str):
        return f"{fields['Username']}:{fields['Secret']}"
    if answer is not None and answer.returncode and b"not found" in answer.stdout + answer.stderr:
        return ""
    raise ResourceError(
        f"the credential helper docker-credential-{helper} gave no name and password: log in again",
        rule=_RULE,
        where=location,
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
