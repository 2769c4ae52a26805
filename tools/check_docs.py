"""Check what the documents claim against the code: ``make docs``. Prints a line per fault; exit code 1 if there is one.

    python tools/check_docs.py            check
    python tools/check_docs.py --write    first refresh the table of formats and codecs in docs/containers.md

Checked: relative links and their anchors; paths and make targets named in the text; every ``ingot ...`` command line
parses; Python and TOML blocks compile; the table of formats and codecs equals ``ingot formats``; every rule that the
source raises is on a spec page and every rule on a spec page is in the source; the version is the same everywhere; the
tables of benchmarks and of the demo are those that ``tools/bench_table.py`` renders; ``docs/runtimes.md`` is the page
that ``tools/runtimes_page.py`` renders; every test that the page of
statements names is there; the site's lists lead to every page of ``docs/``; fragments of the changelog have the names
and the length that ``changelog.d/README.md`` states.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CATALOG, BENCHMARKS = "docs/containers.md", "docs/benchmarks.md"
_SKIPPED = {"venv", ".git", "build", "dist", "ingot-demo", "golden", "node_modules"}
_SHELL = ("sh", "bash", "console")
_PLACEHOLDER = re.compile(r"\[|…|\.\.\.|<[a-z]")
_PATH = re.compile(r"(?:src|tests|tools|bench|spec|docs|examples|native|changelog\.d|\.ci|\.github)/[\w./*-]*")
_NOT_KEPT = ("bench/results",)
_RULE = re.compile(r"([a-z][a-z0-9_]*)\.([a-z][a-z0-9-]*)")
_FILE_SUFFIXES = {
    "py",
    "md",
    "json",
    "jsonl",
    "toml",
    "txt",
    "cc",
    "h",
    "zt",
    "safetensors",
    "mlmodel",
    "numpy",
    "torch",
}
_WEIGHTS = {"model.norm", "model.layers"}  # names of tensors that look like rules


@dataclass(frozen=True)
class Block:
    """A fenced block: language, text, line of the opening fence."""

    language: str
    text: str
    line: int


@dataclass(frozen=True)
class Document:
    """A Markdown file: its path, its prose with blocks blanked out, its blocks."""

    path: Path
    prose: str
    blocks: tuple[Block, ...]

    def spans(self) -> Iterator[tuple[int, str]]:
        """Yield inline code with its line number."""
        for found in re.finditer(r"`([^`\n]+)`", self.prose):
            yield self.prose.count("\n", 0, found.start()) + 1, found[1]


def read(path: Path) -> Document:
    """Split a Markdown file into prose and fenced blocks."""
    prose: list[str] = []
    blocks: list[Block] = []
    fence, language, indent, start, body = "", "", 0, 0, list[str]()
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        opening = re.match(r"\s*(`{3,})\s*(\w*)\s*$", line)
        if not fence and opening:
            fence, language, start, body = opening[1], opening[2], number, []
            indent = len(line) - len(line.lstrip())
        elif fence and line.strip() == fence:
            blocks.append(Block(language, "\n".join(body) + "\n", start))
            fence = ""
        elif fence:
            body.append(line[indent:])  # blocks inside of lists are indented
        prose.append("" if fence or opening else line)
    return Document(path, "\n".join(prose), tuple(blocks))


def documents(root: Path) -> list[Document]:
    """Every Markdown file of the project."""
    found = [(path, path.relative_to(root).parts) for path in sorted(root.rglob("*.md"))]
    return [read(path) for path, parts in found if not _SKIPPED & set(parts) and not parts[0].startswith(".venv")]


def tour(document: Document) -> list[tuple[str, int]]:
    """The calls of ``ingot`` in a page's console blocks, each with the exit code that it states (0 if none)."""
    lines = [line for block in document.blocks if block.language == "console" for line in block.text.splitlines()]
    calls = [line.removeprefix("$ ") for line in lines if line.startswith("$ ingot ")]
    stated = [re.search(r"exit code (\d)", line) for line in calls]
    return [(line, int(code[1]) if code else 0) for line, code in zip(calls, stated, strict=True)]


# Links, paths, make targets.


def check_links(document: Document) -> Iterator[str]:
    """Relative links lead to files, and their anchors to headings."""
    for found in re.finditer(r"\[[^\]]*\]\(([^)\s]+)\)", document.prose):
        target, _, anchor = found[1].partition("#")
        if re.match(r"[a-z]+:", found[1]):
            continue
        place = document.path.parent / target if target else document.path
        if not place.exists():
            yield f"link to {found[1]}: no such file"
        elif anchor and anchor not in _anchors(place):
            yield f"link to {found[1]}: no such heading"


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+\s+(.*)$", read(path).prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def check_paths(document: Document, root: Path) -> Iterator[str]:
    """Paths of the repository that the text names exist; so do make targets."""
    targets = set(re.findall(r"^([a-z0-9-]+):", (root / "Makefile").read_text("utf-8"), re.MULTILINE))
    for line, span in document.spans():
        if _PATH.fullmatch(span) and not span.startswith(_NOT_KEPT) and not any(root.glob(span.rstrip("/"))):
            yield f"line {line}: no such file: {span}"
    for line, text in [*document.spans(), *((block.line, block.text) for block in document.blocks)]:
        for target in re.findall(r"^(?:\$ )?make ([a-z0-9-]+)", text, re.MULTILINE):
            if target not in targets:
                yield f"line {line}: no target {target!r} in the Makefile"


# Code and commands.


def check_blocks(document: Document) -> Iterator[str]:
    """Python compiles, TOML parses."""
    for block in document.blocks:
        try:
            if block.language == "python":
                compile(block.text, str(document.path), "exec")
            elif block.language == "toml":
                tomllib.loads(block.text)
        except (SyntaxError, tomllib.TOMLDecodeError) as error:
            yield f"line {block.line}: {block.language} block: {error}"


def commands(document: Document) -> Iterator[tuple[int, str]]:
    """Yield every ``ingot`` command line that is shown, with its line number; not those with placeholders."""
    for line, span in document.spans():
        if re.match(r"ingot [a-z-]", span) and not _PLACEHOLDER.search(span):
            yield line, span
    for block in document.blocks:
        if block.language not in _SHELL:
            continue
        text = block.text.replace("\\\n", "  ")
        for offset, line in enumerate(text.splitlines(), 1):
            shown = line.removeprefix("$ ") if block.language == "console" and line.startswith("$ ") else line
            if block.language == "console" and shown is line:
                continue  # output
            for piece in re.split(r"\s(?:\||&&|;)\s", shown):
                if piece.strip().startswith("ingot "):
                    yield block.line + offset, piece.strip()


def parse_command(text: str) -> str | None:
    """Return why a command line would not be understood, None if it is; nothing is run."""
    from ingot.cli.main import app

    words = shlex.split(re.split(r"\s\d?>", text)[0], comments=True)[1:]
    takes_value = {option: not parameter.is_flag for parameter in app.params for option in parameter.opts}
    while words and words[0].startswith("-"):
        name = words.pop(0)
        if name not in takes_value and name not in {"--help", "-h"}:
            return "no such option before the command"
        del words[: takes_value.get(name, False)]
    if not words:
        return None
    name, *rest = words
    if name not in app.commands:
        return f"no command {name!r}"
    if {"--help", "-h"} & set(rest):
        return None
    try:
        app.commands[name].make_context(name, rest)
    except Exception as error:
        tell = getattr(error, "format_message", None)
        return str(tell() if tell else error)
    return None


def check_commands(document: Document) -> Iterator[str]:
    """Command lines parse."""
    for line, text in commands(document):
        reason = parse_command(text)
        if reason is not None and not (reason.startswith("Missing argument") and f"`{text}`" in document.prose):
            yield f"line {line}: {text}: {reason}"


# Rules.


def rules_raised(root: Path) -> tuple[set[str], set[str]]:
    """Return the rules that the source names, and the suffixes of those that begin with a codec's or table's name."""
    literals: set[str] = set()
    modules: set[str] = set()
    families: set[str] = set()
    suffixes: set[str] = set()
    for path in sorted((root / "src").rglob("*.py")):
        if "testing" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                told = re.findall(r" \[([a-z]+\.[a-z-]+)\]$", node.value)  # at the end of a message of the command line
                literals |= {node.value, *told} if _is_rule(node.value) else set(told)
                families |= {rule.partition(".")[0] for rule in told}
            if isinstance(node, ast.Call):
                modules |= _modules(node)
                for value in _rule_arguments(node):
                    if isinstance(value, ast.Constant) and _is_rule(str(value.value)):
                        families.add(value.value.partition(".")[0])
                    elif isinstance(value, ast.JoinedStr) and isinstance(value.values[-1], ast.Constant):
                        suffixes.add(str(value.values[-1].value).removeprefix("."))
    for path in sorted((root / "native").rglob("*.cc")):
        found = set(re.findall(r'"([a-z]+\.[a-z0-9-]+)"', path.read_text("utf-8")))
        literals |= found
        families |= {rule.partition(".")[0] for rule in found}
    return {rule for rule in literals - modules if rule.partition(".")[0] in families}, suffixes


def _modules(call: ast.Call) -> set[str]:
    """Return the name of the optional package's module that ``core.border.require`` is asked for."""
    if not isinstance(call.func, ast.Name) or call.func.id != "require" or not call.args:
        return set()
    return {call.args[0].value} if isinstance(call.args[0], ast.Constant) else set()


def _is_rule(text: str) -> bool:
    found = _RULE.fullmatch(text)
    return found is not None and found[2] not in _FILE_SUFFIXES and text not in _WEIGHTS


def _rule_arguments(call: ast.Call) -> Iterator[ast.expr]:
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    yield from (keyword.value for keyword in call.keywords if keyword.arg == "rule")
    if name in ("FormatError", "IntegrityError", "CodecError") and call.args:
        yield call.args[0]
    if name == "Finding" and len(call.args) > 1:
        yield call.args[1]


def rules_documented(root: Path) -> dict[str, Path]:
    """Return what looks like a rule in inline code of the spec pages."""
    return {
        span: document.path
        for document in documents(root / "spec")
        for _, span in document.spans()
        if _is_rule(span.replace("<codec>", "codec").replace("<kind>", "kind"))
    }


def check_rules(root: Path) -> Iterator[str]:
    """Rules of the source and of the spec pages are the same."""
    raised, suffixes = rules_raised(root)
    written = rules_documented(root)
    families = {rule.partition(".")[0] for rule in raised}
    for rule in sorted(raised - set(written)):
        yield f"spec: rule {rule} is raised and on no page"
    for suffix in sorted(suffixes - {rule.partition(".")[2] for rule in written}):
        yield f"spec: rules that end in .{suffix} are raised and on no page"
    for rule, path in sorted(written.items()):
        family, _, suffix = rule.partition(".")
        if family in families and rule not in raised and suffix not in suffixes:
            yield f"{path.relative_to(root)}: rule {rule} is in no source file"


# Tables and versions.


def catalog_table() -> str:
    """Render what carries what, as ``ingot formats`` tells it."""
    from ingot.inspect.catalog import codecs, formats

    kinds = [kind for kind in formats() if kind.codecs]  # what is only read carries nothing
    rows = [["codec", "lossless", "carried by", "what it is"], ["---"] * 4]
    for codec in codecs():
        carried = [f"`{kind.name}`" for kind in kinds if kind.name in codec.formats]
        others = [f"`{kind.name}`" for kind in kinds if kind.name not in codec.formats]
        told = ", ".join(carried) if len(others) > len(kinds) // 4 else f"all but {', '.join(others)}"
        rows.append([f"`{codec.name}`", "yes" if codec.lossless else "no", told, codec.summary])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def marked(text: str, name: str) -> str | None:
    """Return what stands between ``<!-- name -->`` and ``<!-- /name -->``."""
    found = re.search(rf"<!-- {name} -->\n(.*?)\n?<!-- /{name} -->", text, re.DOTALL)
    return found[1] if found else None


def replace_marked(text: str, name: str, content: str) -> str:
    """Replace what stands between the markers."""
    return re.sub(
        rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
        lambda found: f"{found[1]}{content}\n{found[2]}",
        text,
        flags=re.DOTALL,
    )


def check_tables(root: Path) -> Iterator[str]:
    """Generated tables and the README's picture are what the code and the figures say now."""
    readme, catalog, benchmarks = ((root / page).read_text("utf-8") for page in ("README.md", CATALOG, BENCHMARKS))
    if marked(catalog, "catalog") != catalog_table():
        yield f"{CATALOG}: the table of codecs and formats is out of date: python tools/check_docs.py --write"
    sys.path.insert(0, str(root / "tools"))
    try:
        import bench_table
        import readme_figures
        import runtimes_page
    finally:
        sys.path.pop(0)
    if (root / runtimes_page.PAGE).read_text("utf-8") != runtimes_page.render():
        yield f"{runtimes_page.PAGE}: the page is not that of the profiles: python tools/runtimes_page.py"
    figures = bench_table.published(root)
    if marked((root / "docs" / "tour.md").read_text("utf-8"), "demo") != bench_table.render_demo(figures["demo"]):
        yield "docs/tour.md: the demo's table is not that of bench/published.json: python tools/bench_table.py"
    if marked(benchmarks, "bench") != bench_table.render(figures):
        yield f"{BENCHMARKS}: the benchmarks are not those of bench/published.json: python tools/bench_table.py"
    if marked(readme, "sizes") != readme_figures.table(root):
        yield "README.md: the table of presets is out of date: python tools/readme_figures.py"
    if (root / readme_figures.PICTURE).read_text("utf-8") != readme_figures.picture(root):
        yield f"{readme_figures.PICTURE}: the picture is out of date: python tools/readme_figures.py"


def check_index(root: Path) -> Iterator[str]:
    """The index of spec pages names every page."""
    index = (root / "spec" / "README.md").read_text("utf-8")
    for page in sorted((root / "spec").glob("*.md")):
        if page.name != "README.md" and f"({page.name})" not in index:
            yield f"spec/README.md: does not list {page.name}"


def check_site(root: Path) -> Iterator[str]:
    """The site's lists lead to every page of ``docs/``, each once, and to no page that is not there."""
    conf = root / "docs" / "site" / "conf.py"
    lists = [each for each in ast.parse(conf.read_text("utf-8")).body if isinstance(each, ast.Assign)]
    words = [node.value for each in lists for node in ast.walk(each) if isinstance(node, ast.Constant)]
    named = [word for word in words if isinstance(word, str) and re.fullmatch(r"[\w-]+(?:/[\w-]+)+", word)]
    pages = [path for path in sorted((root / "docs").rglob("*")) if path.suffix in (".md", ".rst")]
    for page in (path.relative_to(root).with_suffix("").as_posix() for path in pages):
        if named.count(page) != 1:
            yield f"docs/site/conf.py: leads to {page} {named.count(page)} times, expected once"
    for name in named:
        if not any((root / f"{name}{suffix}").exists() for suffix in ("", ".md", ".rst")):
            yield f"docs/site/conf.py: leads to {name}, which is not there"


def named_tests(root: Path) -> list[str]:
    """Return the tests that the page of statements names, as pytest takes them."""
    page = root / "spec" / "conformance.md"
    return re.findall(r"tests/[\w/.-]+\.py::\w[\w:]*(?:\[[^]\n]*\])?", page.read_text("utf-8")) if page.exists() else []


def check_named_tests(root: Path) -> Iterator[str]:
    """Every test that ``spec/conformance.md`` names is in its file, or in a suite that its class is derived from."""
    suites = _tests_of(*sorted((root / "src" / "ingot" / "testing").glob("*.py")))
    for name in dict.fromkeys(re.sub(r"\[.*", "", name) for name in named_tests(root)):
        path, _, test = name.partition("::")
        own, _, method = test.rpartition("::")
        held = _tests_of(root / path) if (root / path).exists() else {}
        inherited = {each for base in held.get(own, (set(), ()))[1] for each in suites.get(base, (set(), ()))[0]}
        if own not in held or method not in held[own][0] | inherited:
            yield f"spec/conformance.md: no such test: {name}"


def _tests_of(*paths: Path) -> dict[str, tuple[set[str], tuple[str, ...]]]:
    """Return the tests of files by class, "" for those of no class, each with the names of the class's bases."""
    found: dict[str, tuple[set[str], tuple[str, ...]]] = {"": (set(), ())}
    for path in paths:
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                found[""][0].add(node.name)
            elif isinstance(node, ast.ClassDef):
                bases = tuple(base.id for base in node.bases if isinstance(base, ast.Name))
                found[node.name] = ({item.name for item in node.body if isinstance(item, ast.FunctionDef)}, bases)
    return found


def check_version(root: Path) -> Iterator[str]:
    """Package, build file and changelog state one version."""
    import ingot

    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    if project != ingot.__version__:
        yield f"pyproject.toml: version {project}, ingot.__version__ is {ingot.__version__}"
    latest = re.search(r"^## \[([^\]]+)\]", (root / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    if latest is None or latest[1] != ingot.__version__:
        yield f"CHANGELOG.md: newest entry {latest[1] if latest else None}, ingot.__version__ is {ingot.__version__}"


def check_fragments(root: Path) -> Iterator[str]:
    """Fragments of the changelog are named ISSUE.TYPE.md, and each has one line."""
    for path in sorted((root / "changelog.d").glob("*")):
        if path.name == "README.md":
            continue
        if not re.fullmatch(r"(?:\d+|\+[\w-]+)\.(?:added|changed|removed|fixed|security)(?:\.\d+)?\.md", path.name):
            yield f"changelog.d/{path.name}: expected a name such as 38.fixed.md; see changelog.d/README.md"
        elif len(path.read_text("utf-8").strip().splitlines()) != 1:
            yield f"changelog.d/{path.name}: expected one line"


def faults(root: Path) -> list[str]:
    """Return everything that is wrong, a line each."""
    found = []
    for document in documents(root):
        place = document.path.relative_to(root)
        checks = (check_links(document), check_paths(document, root), check_blocks(document), check_commands(document))
        found += [f"{place}: {fault}" for check in checks for fault in check]
    for check in (
        check_rules,
        check_tables,
        check_index,
        check_site,
        check_named_tests,
        check_version,
        check_fragments,
    ):
        found += check(root)
    return found


def main() -> int:
    if "--write" in sys.argv[1:]:
        page = ROOT / CATALOG
        page.write_text(replace_marked(page.read_text("utf-8"), "catalog", catalog_table()), "utf-8")
    found = faults(ROOT)
    for line in found:
        print(line, file=sys.stderr)
    print(f"{len(found)} fault(s) in {len(documents(ROOT))} documents")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
