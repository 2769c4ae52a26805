"""No module of Ingot imports itself through others: neither at once, nor later in a function, nor for type checkers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[3] / "src"

Graph = dict[str, dict[str, int]]
"""Module to imported module to the line of the first import."""


def modules(source: Path) -> dict[str, Path]:
    """Return the file of each module by its dotted name."""
    files = {}
    for path in sorted([*source.rglob("*.py"), *source.rglob("*.pyi")]):
        parts = path.relative_to(source).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imported_names(tree: ast.Module, package: str) -> Iterator[tuple[str, str, int]]:
    """Yield module, imported name (empty for all of the module) and line of each import statement or call."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, "", node.lineno) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                parents = package.split(".")[: package.count(".") + 2 - level] if level else []
                base = ".".join([*parents, *filter(None, [module])])
                yield from ((base, alias.name, node.lineno) for alias in names)
            case ast.Call(func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"), args=[argument, *_]):
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value, "", node.lineno


def import_graph(files: dict[str, Path]) -> Graph:
    """Return which module imports which.

    An import of ``a.b.c`` also executes ``a`` and ``a.b``. Packages that contain the importing module do not count:
    they are being executed already.
    """
    graph: Graph = {}
    for name, path in files.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        targets = graph.setdefault(name, {})
        for base, attribute, line in imported_names(ast.parse(path.read_text("utf-8")), package):
            target = f"{base}.{attribute}" if f"{base}.{attribute}" in files else base
            if target not in files:
                continue
            parts = target.split(".")
            executed = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
            for item in executed:
                if item == target or not f"{name}.".startswith(f"{item}."):
                    targets.setdefault(item, line)
        targets.pop(name, None)
    return graph


def circles(graph: Graph) -> list[set[str]]:
    """Return the strongly connected components of more than one module (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[set[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for target in graph[name]:
            if target not in order:
                visit(target)
                lowest[name] = min(lowest[name], lowest[target])
            elif target in stack:
                lowest[name] = min(lowest[name], order[target])
        if lowest[name] == order[name]:
            start = stack.index(name)
            component = set(stack[start:])
            del stack[start:]
            if len(component) > 1:
                components.append(component)

    for name in graph:
        if name not in order:
            visit(name)
    return components


def describe(component: set[str], graph: Graph) -> str:
    """Return a line for each import within a circle."""
    lines = [
        f"  {name}:{line} imports {target}"
        for name in sorted(component)
        for target, line in sorted(graph[name].items())
        if target in component
    ]
    return "\n".join([f"{len(component)} modules import each other:", *lines])


def test_no_module_imports_itself_through_others() -> None:
    graph = import_graph(modules(SOURCE))
    assert len(graph) > 100
    components = circles(graph)
    assert not components, "\n".join(describe(item, graph) for item in components)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("import pack.b", "", False),
        ("import pack.b", "from pack import a", True),
        ("import pack.b", "from . import a", True),
        ("from pack.b import x", "def f():\n    from pack.a import y", True),
        ("from pack.b import x", "if TYPE_CHECKING:\n    from pack.a import Y", True),
        ("from pack.b import x", "from .a import y", True),
        ("from pack.b import x", "module = import_module('pack.a')", True),
        ("from pack.sub.c import x", "", True),
        ("from pack import sub", "", True),
    ],
)
def test_the_graph_contains_each_form_of_import(tmp_path: Path, first: str, second: str, expected: bool) -> None:
    texts = {"pack/a.py": first, "pack/b.py": second, "pack/sub/__init__.py": "import pack.a", "pack/sub/c.py": ""}
    for name, text in {"pack/__init__.py": "", **texts}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert bool(circles(import_graph(modules(tmp_path)))) is expected
