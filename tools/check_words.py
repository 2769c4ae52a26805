"""Check names and sentences against the style sheet: ``make words``. Exit code 1 if a package has too many hits.

    python tools/check_words.py            compare the hits of each package with tools/words_allowed.json
    python tools/check_words.py PATH...    list the hits in files or folders
    python tools/check_words.py --count    print the totals by word and by phrase
    python tools/check_words.py --write    write the present numbers, if neither total is higher than before

Names are checked in ``src/`` and ``native/``: no variable, parameter, function, class, attribute or module has a word
of ``FORBIDDEN`` as its whole name. Phrases are checked in docstrings, comments, messages and Markdown pages. The
subjects of commits after the one that ``words_allowed.json`` names have at most 72 characters.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = "tools/words_allowed.json"
SUBJECT_LIMIT = 72

_WORDS = """
found told tells said says stated made makes held kept known own one some each few many most least left rest whole place
places way kind kinds form forms piece pieces thing what where who at of as such asked wanted given called alike beside
behind odd wrong lost unsaid begun
"""
FORBIDDEN = frozenset(_WORDS.split())
"""Words that must not be a whole name. A longer name may contain them."""

_START = r"(?m)(?:^|(?<=[.;:!?]\s))[-*#>\s]*"
PHRASES = {
    "begins with Of": _START + r"Of (?!course\b)",
    "begins with What, Where or Who": _START + r"(?:What|Where|Who) (?![^.;:|]*\?)",
    "who without a noun": r"\bwhoever\b|(?:^|[^\w\s] |\b(?:for|of|by|to|and|or) )who (?:\w+s)\b",
    "somebody": r"\b(?:nobody|somebody|anybody|everybody|no one|whose business)\b",
    "is told": r"\b(?:is|are|was|were|be|been) (?:told|asked)\b|\btells? (?:of|whether|which|what|how|where|that)\b",
    "knows": r"\bknows? (?:of|nothing|no|how|which|what|whether|where|that)\b",
    "so many": r"\b[Ss]o many (?!\w+ that\b)|\bas many as\b",
    "the like": r"\bthe like\b|\band such\b|\b[Oo]f such\b|\bsuch a one\b",
    "errors as": r"\b[Ee]rrors as\b|\b[Rr]aises as\b|\b[Rr]aises what\b",
    "as there": r"\b[Aa]s there\b|\b[Aa]s here\b|\b[Aa]s of ``",
    "as it lies": r"\bas (?:it lies|they lie|it stands|they stand)\b",
    "beside": r"\bbeside (?:it|them|that|those|these|each other)\b",
    "those that": r"\bthose (?:that|of|which)\b[^.]*\bthose (?:that|of|which)\b",
    "of which it is": r"\bof which (?:it|they) (?:is|are)\b|\bthat (?:it is|they are) of\b",
    "found none": r"\bfound none\b",
}
"""Regular expressions of phrases that need a second reading. A space stands for any white space."""
_PATTERNS = {name: re.compile(pattern.replace(" ", r"\s+")) for name, pattern in PHRASES.items()}

_C_TYPE = (
    r"(?:auto|bool|int|long|unsigned|float|double|char|size_t|u?int\d+_t|void|__m\d+i?|struct|class|enum"
    r"|namespace|using|std::[\w:]+(?:<[^;{}()]*>)?|[A-Z]\w*(?:<[^;{}()]*>)?)"
)
_C_NAME = re.compile(rf"(?:^|[^\w.>:]){_C_TYPE}(?:\s+const)?[\s*&]+(?:__restrict\s+)?(\w+)\s*(?=[=;,(){{\[]|:(?!:)|$)")
_C_BINDING = re.compile(r"\bauto\s*&*\s*\[([\w\s,]+)\]")
_C_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Hit:
    """A name or a phrase that breaks the style sheet."""

    path: str
    line: int
    type: str  # "names" or "phrases"
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def is_forbidden(name: str) -> bool:
    return name.strip("_").lower() in FORBIDDEN


def python_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each definition."""
    for node in ast.walk(ast.parse(source)):
        name: str | None = None
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.ExceptHandler():
                name = node.name
            case ast.MatchAs() | ast.MatchStar():
                name = node.name
            case ast.arg():
                name = node.arg
            case ast.Name(ctx=ast.Store()):
                name = node.id
            case ast.Attribute(ctx=ast.Store()):
                name = node.attr
            case ast.alias():
                name = node.asname
        if name:
            yield getattr(node, "lineno", 1), name


def c_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each declaration that the patterns recognize."""
    for number, line in enumerate(source.splitlines(), 1):
        code = _C_STRING.sub('""', line).partition("//")[0]
        for match in _C_NAME.finditer(code):
            yield number, match[1]
        for match in _C_BINDING.finditer(code):
            yield from ((number, name.strip()) for name in match[1].split(","))


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each comment and of each string that has at least four words."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield from joined((token.start[0], token.string.lstrip("#")) for token in tokens if token.type == tokenize.COMMENT)
    tree = ast.parse(source)
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            text = node.value
        if len(text.split()) >= 4:
            yield node.lineno, text  # type: ignore[attr-defined]


def c_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each comment and of each string that has at least four words."""
    lines = list(enumerate(source.splitlines(), 1))
    yield from joined((number, line.partition("//")[2].lstrip("/")) for number, line in lines if "//" in line)
    for number, line in lines:
        strings = _C_STRING.findall(line.partition("//")[0])
        yield from ((number, text) for text in strings if len(text.split()) >= 4)


def joined(comments: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Join comments on consecutive lines into one text."""
    first, texts = 0, list[str]()
    for line, text in comments:
        if texts and line != first + len(texts):
            yield first, "\n".join(texts)
            texts = []
        first = first if texts else line
        texts.append(text)
    if texts:
        yield first, "\n".join(texts)


def page_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield a Markdown page as one text, its fenced blocks blank."""
    lines, fenced = [], False
    for line in source.splitlines():
        is_fence = line.lstrip().startswith("```")
        fenced ^= is_fence
        lines.append("" if fenced or is_fence else line)
    yield 1, "\n".join(lines)


READERS = {
    ".py": (python_names, python_texts),
    ".cc": (c_names, c_texts),
    ".h": (c_names, c_texts),
    ".md": (lambda source: iter(()), page_texts),
}


def sentence_count(path: Path) -> int:
    """Return the number of sentences in a file; a text without a full stop is one."""
    texts = READERS[path.suffix][1](path.read_text("utf-8"))
    return sum(max(len(re.findall(r"[.!?](?:\s|$)", text)), 1) for _, text in texts)


def hits_of(path: Path, root: Path) -> Iterator[Hit]:
    """Yield the hits of a file."""
    source, place = path.read_text("utf-8"), path.relative_to(root).as_posix()
    names, texts = READERS[path.suffix]
    module = path.parent.name if path.stem == "__init__" else path.stem
    defined = [*names(source), *([] if path.suffix == ".md" else [(1, module)])]
    yield from (Hit(place, line, "names", "name", name) for line, name in defined if is_forbidden(name))
    for first, text in texts(source):
        for rule, pattern in _PATTERNS.items():
            for match in pattern.finditer(text):
                line = first + text.count("\n", 0, match.end())
                excerpt = " ".join(text[max(match.start() - 20, 0) : match.end() + 30].split())
                yield Hit(place, line, "phrases", rule, excerpt)


def files(root: Path) -> list[Path]:
    """Return the files that are checked: sources and Markdown pages."""
    sources = [path for name in ("src", "native") for path in (root / name).rglob("*") if path.suffix in READERS]
    pages = [path for name in ("docs", "spec", "examples", "changelog.d") for path in (root / name).rglob("*.md")]
    return sorted({*sources, *pages, *root.glob("*.md")})


def package_of(path: str) -> str:
    """Return the package of a path: its first folder below ``src/ingot`` or ``native``, else its first folder."""
    parts = Path(path).parts[:-1]
    depth = {"src": 3, "native": 2}.get(parts[0] if parts else "", 1)
    return "/".join(parts[:depth]) or "."


def counts_by_package(hits: list[Hit]) -> dict[str, dict[str, int]]:
    counted = Counter((package_of(hit.path), hit.type) for hit in hits)
    packages = sorted({package for package, _ in counted})
    return {package: {type_: counted[package, type_] for type_ in ("names", "phrases")} for package in packages}


def compare(present: dict[str, dict[str, int]], allowed: dict[str, dict[str, int]]) -> tuple[list[str], list[str]]:
    """Return a line for each number that is too high, and a line for each number that can be lowered."""
    too_high, can_be_lowered = [], []
    for package in sorted({*present, *allowed}):
        for type_ in ("names", "phrases"):
            count, limit = present.get(package, {}).get(type_, 0), allowed.get(package, {}).get(type_, 0)
            if count > limit:
                too_high.append(f"{package}: {count} {type_}, {limit} allowed: tools/check_words.py PATH lists them")
            elif count < limit:
                can_be_lowered.append(f"{package}: {count} {type_}, {limit} allowed: tools/check_words.py --write")
    return too_high, can_be_lowered


def long_subjects(root: Path, after: str) -> list[str]:
    """Return a line for each subject of a commit after ``after`` that is too long."""
    command = ["git", "-C", str(root), "log", "--no-merges", "--format=%h %s", f"{after}..HEAD"]
    try:
        log = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        print(f"commit subjects are not checked: git finds no commit {after} here")
        return []
    commits = [line.partition(" ") for line in log.splitlines()]
    return [
        f"commit {commit}: subject of {len(subject)} characters, at most {SUBJECT_LIMIT} are allowed: {subject}"
        for commit, _, subject in commits
        if len(subject) > SUBJECT_LIMIT
    ]


def write(root: Path, settings: dict[str, Any], present: dict[str, dict[str, int]]) -> list[str]:
    """Write the present numbers. Return a line for each total that is higher than before; then nothing is written."""
    faults = []
    for type_ in ("names", "phrases"):
        before, now = (sum(counts[type_] for counts in each.values()) for each in (settings["packages"], present))
        if now > before:
            faults.append(f"{now} {type_} in all packages, {before} allowed: remove some first")
    if not faults:
        rows = [f"    {json.dumps(package)}: {json.dumps(counts)}" for package, counts in present.items()]
        head = f'{{\n  "commits_after": {json.dumps(settings["commits_after"])},\n  "packages": {{\n'
        (root / ALLOWED).write_text(head + ",\n".join(rows) + "\n  }\n}\n", "utf-8")
    return faults


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH")
    parser.add_argument("--count", action="store_true", help="print the totals by word and by phrase")
    parser.add_argument("--write", action="store_true", help="write the present numbers to tools/words_allowed.json")
    options = parser.parse_args(arguments)
    chosen = [path.resolve() for path in options.paths]
    checked = [path for path in files(root) if not chosen or any({path, *path.parents} & {item} for item in chosen)]
    hits = [hit for path in checked for hit in hits_of(path, root)]
    if options.count:
        sentences = sum(sentence_count(path) for path in checked)
        for type_ in ("names", "phrases"):
            counter = Counter(hit.rule if type_ == "phrases" else hit.text for hit in hits if hit.type == type_)
            print(f"{counter.total()} {type_}:", ", ".join(f"{text} {count}" for text, count in counter.most_common()))
        phrases = sum(hit.type == "phrases" for hit in hits)
        print(f"{100 * phrases / max(sentences, 1):.1f} phrases in 100 of {sentences} sentences")
        return 0
    if chosen:
        print(*hits, f"{len(hits)} hits", sep="\n")
        return 0
    settings = json.loads((root / ALLOWED).read_text("utf-8"))
    present = counts_by_package(hits)
    if options.write:
        faults, notes = write(root, settings, present), []
    else:
        faults, notes = compare(present, settings["packages"])
        faults += long_subjects(root, settings["commits_after"])
    print(*notes, *faults, f"{len(hits)} hits, {len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
