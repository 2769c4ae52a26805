"""Signatures of models by keys, in the format of OpenSSF's package model-signing, which other tools verify.

A signature contains the SHA-256 of one file, or of each file of a folder. The package model-signing creates and
verifies it.
"""

from __future__ import annotations

from os import fspath
from pathlib import Path
from typing import Any

from ingot.core.border import require
from ingot.errors import IngotError, UsageError
from ingot.inspect.findings import Finding
from ingot.stores.location import AnyPath, Location
from ingot.stores.temporary import temporary_folder

EXTRA = "sign"
SIGNATURE = "model.sig"
"""The name of a folder's signature; that of the file ``X`` is ``X.sig``."""

_LONGEST = 600


def sign(location: Location, key: AnyPath, signature: AnyPath | None = None) -> Location:
    """Sign a folder or file with a private key; return the location of the signature.

    The signature file appears complete or not at all. If it is in the folder, it is not among the signed files.

    Parameters
    ----------
    location : Location
        On a local disk.
    key : path
        An elliptic-curve key (P-256, P-384 or P-521) as PEM, without a password.
    signature : path, optional
        By default ``model.sig`` in the folder, or ``X.sig`` beside the file ``X``.

    Raises
    ------
    MissingExtraError
        The package model-signing is missing.
    UsageError
        ``signature.key``, ``signature.files``; ``store.missing``.
    UnsupportedError
        ``store.not-local``.
    """
    package = require("model_signing", EXTRA)
    target = _default(location) if signature is None else Location.parse(signature)
    path = _path_of(location)
    try:
        signer = package.signing.Config().use_elliptic_key_signer(private_key=_file(key))
    except Exception as error:
        raise _key_error("private", key, error) from None
    signer.set_hashing_config(_hashing(package, path, Path(target.display)))
    with temporary_folder() as folder:
        try:
            signer.sign(path, Path(folder) / SIGNATURE)
        except Exception as error:
            raise UsageError(
                f"these files cannot be signed: {_first_line(error)}", rule="signature.files", where=location.display
            ) from None
        target.write((Path(folder) / SIGNATURE).read_bytes())
    return target


def check_signature(location: Location, signature: AnyPath, key: AnyPath) -> Finding:
    """Return a finding on a signature: a note if the key's owner signed exactly these files, else an error.

    Raises the errors of ``sign`` for a missing package, key or signature.
    """
    package = require("model_signing", EXTRA)
    path = _path_of(location)
    file = _file(signature)
    try:
        verifier = package.verifying.Config().use_elliptic_key_verifier(public_key=_file(key))
    except Exception as error:
        raise _key_error("public", key, error) from None
    try:
        try:
            verifier.verify(path, file)
        except ValueError:  # the signature may have been moved into the folder after signing
            verifier.set_hashing_config(_hashing(package, path, file)).verify(path, file)
    except Exception as error:
        reason = _first_line(error) or "it was made by another key, or changed"
        return Finding("error", "signature.invalid", location.display, f"the signature is not valid: {reason}")
    return Finding("note", "signature.valid", location.display, f"signed by the owner of {Location.parse(key).display}")


def _default(location: Location) -> Location:
    _, name = location.find()
    return location.parent.child(f"{location.name}.sig") if name else location.child(SIGNATURE)


def _hashing(package: Any, path: Path, file: Path) -> Any:
    """Return the package's hashing settings, which exclude the signature ``file`` if it is in the folder."""
    config = package.hashing.Config()
    signature = file.resolve()
    inside = path.is_dir() and signature.is_relative_to(path.resolve())
    return config.set_ignored_paths(paths=[signature.relative_to(path.resolve())] if inside else [])


def _path_of(location: Location) -> Path:
    store, name = location.find()
    return Path(fspath(store.require_path(name, "a signature")))


def _file(path: AnyPath) -> Path:
    store, name = Location.parse(path).find_file()
    return Path(fspath(store.require_path(name, "a signature")))


def _key_error(adjective: str, key: AnyPath, error: Exception) -> IngotError:
    if isinstance(error, IngotError):
        return error
    return UsageError(
        f"expected a {adjective} elliptic-curve key (P-256, P-384 or P-521) as PEM, without a password; make one with "
        "`openssl ecparam -name prime256v1 -genkey -noout`",
        rule="signature.key",
        where=Location.parse(key).display,
    )


def _first_line(error: Exception) -> str:
    return next((line.strip()[:_LONGEST] for line in str(error).splitlines() if line.strip()), "")
