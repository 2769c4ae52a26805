"""The checks of ``ingot doctor``: whether this installation of Ingot works, and which optional packages it has."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

import numpy as np

from ingot.core.bytes import checksums
from ingot.core.isolation import PACKAGE_FILE
from ingot.core.runtime.memory import available_ram, format_size
from ingot.core.runtime.native import available_isas
from ingot.core.runtime.native import isa as current_isa
from ingot.core.runtime.parallel import default_workers
from ingot.errors import INGOT_VERSION, install_hint
from ingot.reporting.report import Column, Figure, Line, Report, Table
from ingot.runtimes.profile import RuntimeProfile
from ingot.runtimes.table import runtime_named
from ingot.stores.local import LocalStore

# The package of each extra, and the features that need it.
EXTRAS = {
    "torch": ("torch", "ckpt[...].torch(), ingot.torch, files of torch.save"),
    "transformers": ("transformers", "ingot.load_model, ingot generate, ingot eval"),
    "mlx": ("mlx-lm", "ingot.mlx, state_dict(framework='mlx')"),
    "eval": ("lm-eval", "python -m ingot.lm_eval"),
    "jax": ("jax", "state_dict(framework='jax')"),
    "scipy": ("scipy", "ckpt[...].sparse('scipy')"),
    "astc": ("astc-encoder-py", "encoding and decoding of ASTC textures"),
    "gguf": ("gguf", "model folders to and from GGUF (names of tensors)"),
    "hub": ("huggingface_hub", "hf: addresses and models by their names on the Hub"),
    "sign": ("model-signing", "signatures: seal --sign, verify --signature"),
    "ray": ("ray", "convert, verify, compare(engine='ray'): many machines"),
    "remote": ("obstore", "s3:, gs: and az: addresses"),
    "demo": ("ingot-demo", "ingot demo outside a source tree"),
}
_CHECK_VALUE = "crc32c:0xe3069283"  # CRC-32C of "123456789", the catalogue's check value


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    ``state`` is ``ok``, ``other`` (an untested version), ``absent`` (an optional package), ``missing`` (a required
    program or package) or ``bad``. ``advice`` is a remedy, or empty.
    """

    name: str
    state: str
    result: str
    advice: str = ""


def checks_report(checks: Sequence[Check]) -> Report:
    """Return a report with the checks as a table, and the advice as lines."""
    columns = [Column("name", head="check"), Column("state", head="state"), Column("found", head="found")]
    advice = [f"{item.name}: {item.advice}" for item in checks if item.advice and item.state != "absent"]
    if any(item.advice and item.state == "absent" for item in checks):
        advice.append(f"absent extras are optional; `{install_hint('NAME')}` adds one to this installation")
    closing = [Line("{item}", items="advice")]
    rows = [(item.name, item.state, item.result, item.advice) for item in checks]
    tables = [Table("", [*columns, Column("advice")], rows)]
    return Report([Figure("advice", advice, "texts", data=False)], (), tables, closing)


def examine() -> list[Check]:
    """Run all checks and return their results; a failed check does not raise."""
    return [
        Check("ingot", "ok", f"{INGOT_VERSION}, {PACKAGE_FILE}"),
        Check("python", "ok", f"{platform.python_version()} on {platform.platform()}"),
        Check("numpy", "ok", np.__version__),
        _native(),
        _checksum(),
        Check("processors", "ok", f"{default_workers()} for this process"),
        Check("memory", "ok", f"{format_size(available_ram())} available"),
        Check("reading", "ok", f"{LocalStore('.').io} in the current folder"),
        *(_extra(name, package, use) for name, (package, use) in EXTRAS.items()),
    ]


def _native() -> Check:
    isa = current_isa()
    sets = ", ".join(available_isas())
    advice = ""
    if isa == "baseline" and platform.machine().lower() in ("x86_64", "amd64"):
        advice = "this processor has neither AVX2 nor AVX-512 (or hides them): kernels run several times slower"
    return Check("native core", "ok", f"instruction set {isa} (this processor can run: {sets})", advice)


def _checksum() -> Check:
    digest = checksums.digest("crc32c", b"123456789")
    good = checksums.same(_CHECK_VALUE, digest)
    return Check(
        "checksum",
        "ok" if good else "bad",
        digest,
        "" if good else "the native core gives wrong results: reinstall Ingot",
    )


def _extra(name: str, package: str, use: str) -> Check:
    try:
        return Check(f"extra {name}", "ok", f"{package} {metadata.version(package)}")
    except metadata.PackageNotFoundError:
        return Check(f"extra {name}", "absent", f"for {use}", f"{install_hint(name)} if you need {use}")


def examine_runtime(name: str) -> list[Check]:
    """Return checks of a program, and of the packages that are needed to write files for it; the program is not
    started.

    Raises ``UsageError`` ``runtime.unknown``.
    """
    profile = runtime_named(name)
    needs = profile.installation
    program, version = _program(profile)
    extras = [_needed_extra(extra, profile) for extra in needs.extras]
    optional = [_extra(extra, *_calibrates(extra)) for extra in needs.calibration if extra not in needs.extras]
    return [program, version, *extras, *optional]


def _program(profile: RuntimeProfile) -> tuple[Check, Check]:
    """Return two checks of a program: whether it is installed, and its version."""
    needs = profile.installation
    versions = {package: version for package in needs.packages if (version := _version_of(package))}
    paths = [path for program in needs.programs if (path := shutil.which(program))]
    here = [*paths, *(f"{package} {version}" for package, version in versions.items())]
    tried = f"the profile was {'run' if profile.machine else 'written'} {_with(profile)} ({profile.date})"
    if not here:
        result = f"not installed: {', '.join([*needs.programs, *needs.packages])}"
        return Check(profile.title, "missing", result, needs.hint), Check("version", "absent", f"not read; {tried}")
    requested = profile.package.partition("==")[2]
    same = [version for version in versions.values() if requested and f"{version}.".startswith(f"{requested}.")]
    advice = "" if same else f"`ingot verify FILE --for {profile.name}` answers for the version of the profile"
    installed = ", ".join(versions.values()) or "not read"
    checked = Check("version", "ok" if same else "other", f"{installed}; {tried}", advice)
    return Check(profile.title, "ok", ", ".join(here)), checked


def _with(profile: RuntimeProfile) -> str:
    if profile.package:
        return f"with {profile.package}"
    return f"with version {profile.version}" if profile.version else "from the program's documents"


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _needed_extra(name: str, profile: RuntimeProfile) -> Check:
    check = _extra(name, *EXTRAS[name])
    if check.state == "ok":
        return check
    return Check(check.name, "missing", check.result, f"{install_hint(name)} to write for {profile.title}")


def _calibrates(extra: str) -> tuple[str, str]:
    return EXTRAS[extra][0], "calibration (not with --calibration none)"
