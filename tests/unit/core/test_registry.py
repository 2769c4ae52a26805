"""Tables that installed distributions extend by entry points: lazy, and safe from broken plugins."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

import ingot
from ingot.core.extensions import EXTENSIONS
from ingot.core.registry import Instances, Registry
from ingot.errors import PluginError, UsageError

ROOT = Path(__file__).resolve().parents[3]
Install = Callable[..., Path]


class Shape(Protocol):
    name: str

    def area(self) -> int: ...


def write_distribution(folder: Path, name: str, entry_points: str, code: str = "", module: str = "") -> Path:
    """Write an installed distribution by hand: one module and its metadata."""
    module = module or name.replace("-", "_")
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nSummary: Tests of plugins\n")
    (info / "entry_points.txt").write_text(entry_points)
    (folder / f"{module}.py").write_text(code)
    return folder


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a distribution for this test."""
    monkeypatch.syspath_prepend(tmp_path)

    def installed(name: str, entry_points: str, code: str = "") -> Path:
        module = name.replace("-", "_")
        monkeypatch.delitem(sys.modules, module, raising=False)
        return write_distribution(tmp_path, name, f"[ingot.shapes]\n{entry_points}", code)

    return installed


def shapes() -> Registry[Shape]:
    return Instances("shape", (("path", "pathlib:Path"),), group="ingot.shapes", contract=Shape, identifier="name")


SQUARE = "class Square:\n    name = 'square'\n    def area(self): return 4\n"


def test_entry_is_imported_on_first_use(install: Install) -> None:
    install("reg-square", "square = reg_square:Square", SQUARE)
    table = shapes()
    assert list(table) == ["path", "square"]
    assert "square" in table
    assert len(table) == 2
    assert "reg_square" not in sys.modules
    assert table["square"].area() == 4
    assert table["square"] is table.get("square")
    assert table.get("circle") is None
    assert [name for name, _ in table.available()] == ["path", "square"]
    with pytest.raises(UsageError, match="did you mean 'square'") as caught:
        table.get_or_refuse("squar")
    assert caught.value.rule == "shape.unknown"


def test_own_entries_need_no_metadata(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("reg-square", "square = reg_square:Square", SQUARE)
    monkeypatch.setattr("ingot.core.registry.read_plugins", None)
    assert str(shapes()["path"]) == "."


def test_name_of_an_own_entry_is_kept(install: Install) -> None:
    install("reg-path", "path = reg_path:Square", SQUARE)
    table = shapes()
    with pytest.warns(UserWarning, match=r"'path' of reg-path 1\.0 is ignored.*plugin\.name"):
        assert list(table) == ["path"]
    assert str(table["path"]) == "."
    assert "reg_path" not in sys.modules


def test_name_of_two_distributions_is_nobody_s(install: Install) -> None:
    install("reg-one", "square = reg_one:Square", SQUARE)
    install("reg-two", "square = reg_two:Square", SQUARE)
    table = shapes()
    with pytest.warns(UserWarning, match=r"reg-one 1\.0 and reg-two 1\.0 both register it"):
        assert "square" not in table
    with pytest.raises(UsageError):
        table.get_or_refuse("square")


@pytest.mark.parametrize(
    ("code", "rule", "problem"),
    [
        ("import a_module_that_is_missing", "plugin.import", "ModuleNotFoundError"),
        ("raise SystemExit(3)", "plugin.import", "SystemExit: 3"),
        ("def = 1", "plugin.import", "SyntaxError"),
        ("", "plugin.import", "has no attribute 'Square'"),
        ("Square = 5", "plugin.type", "not callable"),
        ("class Square:\n    def __init__(self, size): ...", "plugin.type", "size"),
        ("class Square:\n    name = 'square'", "plugin.type", "lacks area"),
        ("class Square:\n    def area(self): ...", "plugin.type", "lacks name"),
        (SQUARE.replace("'square'", "'circle'"), "plugin.type", "'circle'"),
    ],
)
def test_unusable_entry_is_one_error_and_one_warning(install: Install, code: str, rule: str, problem: str) -> None:
    install("reg-broken", "square = reg_broken:Square", code)
    table = shapes()
    with pytest.raises(PluginError) as caught:
        table.get_or_refuse("square")
    assert caught.value.rule == rule
    assert "distribution reg-broken 1.0" in str(caught.value)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.warns(UserWarning, match=r"reg-broken 1\.0") as caught_warnings:
        assert [name for name, _ in table.available()] == ["path"]
    assert len(caught_warnings) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [name for name, _ in table.available()] == ["path"]


def test_extensions_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["entry-points"] == EXTENSIONS


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(folder / 'site')!r}); from ingot.cli.entry import main; main()"
    return subprocess.run([sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder with a checkpoint, beside a plugin whose code cannot be imported."""
    entries = "".join(f"[ingot.{group}]\nbroken = cli_broken:x\n" for group in ("codecs", "formats", "commands"))
    write_distribution(tmp_path / "site", "cli-broken", entries, "import a_module_that_is_missing")
    (tmp_path / "model").mkdir()
    ingot.save(tmp_path / "model" / "model.safetensors", {"w": np.ones((2, 2), np.float32)})
    return tmp_path


@pytest.mark.parametrize("words", [("formats",), ("codecs",), ("matrix", "model"), ("inspect", "model")])
def test_broken_plugin_is_a_warning_of_other_commands(broken: Path, words: tuple[str, ...]) -> None:
    done = run(broken, *words)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert lines
    assert all(line.startswith("warning: ") and "cli-broken 1.0" in line for line in lines)
    assert len(set(lines)) == len(lines) <= 2


def test_broken_command_is_one_error(broken: Path) -> None:
    done = run(broken, "broken")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: command 'broken' of the distribution cli-broken 1.0 cannot be imported")
    assert line.endswith("[plugin.import]")


def test_command_of_another_type_is_one_error(tmp_path: Path) -> None:
    write_distribution(
        tmp_path / "site", "cli-old", "[ingot.commands]\nold = cli_old:register\n", "def register(app): pass\n"
    )
    done = run(tmp_path, "old")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "cli-old 1.0 cannot be created: TypeError: expected an object of click.Command, found function" in line
    assert line.endswith("[plugin.type]")


def test_broken_format_is_an_error_of_the_conversion_to_it(broken: Path) -> None:
    done = run(broken, "convert", "model", "out", "--format", "broken")
    assert done.returncode == 1
    assert "cli-broken 1.0" in done.stderr
    assert not (broken / "out").exists()


def test_completion_lists_commands_that_can_be_loaded(broken: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(broken / 'site')!r})\n"
        "from ingot.cli.main import app\n"
        "with app.make_context('ingot', [], resilient_parsing=True) as context:\n"
        "    names = [item.value for item in app.shell_complete(context, '')]\n"
        "assert 'convert' in names and 'broken' not in names, names\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_store_of_a_plugin_is_read_by_its_scheme(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "developing" / "store.md").read_text("utf-8")
    code = page.partition("\n```python\n")[2].partition("\n```\n")[0]
    entries = "[ingot.stores]\nzip = store_zip:ZipScheme\n"
    write_distribution(tmp_path / "site", "store-zip", entries, code)
    ingot.save(tmp_path / "model.safetensors", {"w": np.ones((2, 2), np.float32)})
    use = (
        "import sys, zipfile; sys.path.insert(0, 'site')\n"
        "with zipfile.ZipFile('a.zip', 'w') as archive: archive.write('model.safetensors', 'm/model.safetensors')\n"
        "import ingot\n"
        "with ingot.open('zip:a.zip!m') as checkpoint: assert list(checkpoint) == ['w']\n"
    )
    done = subprocess.run([sys.executable, "-c", use], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_inspector_of_a_plugin_shows_its_files(tmp_path: Path) -> None:
    code = (
        "class Notes:\n"
        "    def recognizes(self, head): return head.startswith(b'NOTE')\n"
        "    def show(self, path, details, json): print(path, details, json)\n"
    )
    write_distribution(tmp_path / "site", "cli-notes", "[ingot.inspectors]\nnotes = cli_notes:Notes\n", code)
    (tmp_path / "a.bin").write_bytes(b"NOTE of someone")
    done = run(tmp_path, "inspect", "a.bin", "--json")
    assert (done.returncode, done.stdout, done.stderr) == (0, "a.bin True True\n", "")
