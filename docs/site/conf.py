"""The site: ``make docs-site`` makes ``build/site/index.html`` of the pages as they lie, with Sphinx and MyST.

Zensical and Sphinx were built from three of these pages and looked at in chromium. Both look well, Zensical a little
airier. Sphinx was taken, for what a picture does not show:

- options of operations are fields of structs, from which the docstrings' parameters are made at import
  (``ingot.core.options.takes``): autodoc imports, and what reads source text alone does not see them;
- search works on pages opened as files, for the index is a script; Zensical's asks a server for ``search.json``;
- ``README.md``, ``docs/``, ``spec/`` and ``examples/`` are read where they lie, and links from one to the other or to a
  file of the repository hold; Zensical takes one folder;
- a link to no page or no heading is a warning, and warnings are errors.

Pages stay plain Markdown that any forge shows. What only the site has is added here while it is read: what leads from
page to page, and the help of every command.
"""

from __future__ import annotations

import os
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.errors import ConfigError

import ingot

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "Ingot"
version = release = ingot.__version__
html_title = f"Ingot {release}"
html_theme = "furo"
html_copy_source = False
html_show_search_summary = False  # pages opened as files may not fetch others: results would come with errors
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = [
    *("*.md", "docs/**", "spec/*.md"),
    *("changelog.d/README.md", "examples/README.md", "src/ingot/demo/data/README.md"),
]
exclude_patterns = ["bench", "build", "dist", "native", "tests", "tools", ".*", "ingot-demo"]
smartquotes = False  # pages say what they say
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

_JOBS = (
    *("docs/howto/quantize", "docs/howto/smaller", "docs/howto/ship", "docs/howto/containers", "docs/howto/check"),
    *("docs/howto/deltas", "docs/howto/adapters", "docs/howto/merge", "docs/howto/run", "docs/howto/sweep"),
    *("docs/howto/archives", "docs/howto/registries", "docs/howto/one-machine", "docs/howto/core-ml"),
)
_DEVELOPING = (
    *("docs/architecture", "docs/developing/source", "docs/developing/checks", "docs/developing/benchmarks"),
    *(
        "docs/developing/kernels",
        "docs/developing/codec",
        "docs/developing/family",
        "docs/developing/format",
        "docs/developing/store",
    ),
    "docs/developing/plugin",
)
_POLICIES = ("SECURITY", "CODE_OF_CONDUCT", "RELEASING", "changelog.d/README")
# What leads from the first page to the others, and from the index of spec pages to these.
_LEADS = {
    "README": (
        (
            "Start",
            (
                *("docs/tour", "docs/start/hobbyist", "docs/start/fine-tuner", "docs/start/platform-engineer"),
                *("docs/start/researcher", "docs/start/ios-engineer", "docs/coming-from", "examples/README"),
            ),
        ),
        (
            "Learn",
            (
                "docs/tutorials/quantize",
                "docs/tutorials/fine-tunes",
                "docs/tutorials/adapters",
                "docs/tutorials/remote",
            ),
        ),
        ("How-to", (*_JOBS, "docs/stories")),
        (
            "Concepts",
            ("docs/choosing", "docs/containers", "docs/families", "docs/runtimes", "docs/stability"),
        ),
        ("Reference", ("docs/site/commands", "docs/site/api", "spec/README")),
        ("Evidence", ("docs/costs", "docs/benchmarks", "docs/limits")),
        ("Develop", _DEVELOPING),
        ("Take part", ("CONTRIBUTING", "CHANGELOG", *_POLICIES, "src/ingot/demo/data/README")),
    ),
    "spec/README": (("", ("*",)),),
}


def _leads(docname: str) -> str:
    blocks = []
    for caption, pages in _LEADS.get(docname, ()):
        about = [":hidden:", ":glob:" if "*" in pages else "", f":caption: {caption}" if caption else ""]
        names = [name if name == "*" else f"/{name}" for name in pages]
        blocks.append("\n".join(["```{toctree}", *filter(None, about), *names, "```"]))
    return "\n\n".join(blocks)


def _help(words: list[str]) -> str:
    """Return what a command tells of itself, all of it where it has more than fits a screen."""
    from ingot.cli.main import app

    output = StringIO()
    with redirect_stdout(output):
        code = app.main(args=words, prog_name="ingot", standalone_mode=False)
    if code:
        raise ConfigError(f"ingot {' '.join(words)}: exit code {code}")
    return output.getvalue().strip("\n")


def _commands() -> str:
    """Return every command's help as Markdown, under the headings of ``ingot --help``."""
    from ingot.cli.commands import COMMANDS, GROUP_OF

    os.environ.update(COLUMNS="80")
    pages, panel = [], ""
    for name, own in GROUP_OF.items():
        if own != panel:
            panel = own
            pages.append(f"## {panel}")
        command: Any = COMMANDS[name]
        calls = [[name], *([name, inner] for inner in getattr(command, "commands", {}))]
        for words in calls:
            of = command if len(words) == 1 else command.commands[words[1]]
            every = any("--help-all" in parameter.opts for parameter in of.params)
            text = _help([*words, "--help-all" if every else "--help"])
            pages.append(f"### `ingot {' '.join(words)}`\n\n````text\n{text}\n````")
    return "\n\n".join(pages)


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname == "docs/site/commands":
        app.env.note_reread()  # no file that Sphinx knows of changes with an option
        added = _commands()
    else:
        added = _leads(docname)
    if added:
        source[0] = f"{source[0]}\n\n{added}\n"


def _finish(app: Sphinx, error: Exception | None) -> None:
    """Name the first page as web servers look for it."""
    out = Path(app.outdir)
    if error is None and app.builder.name == "html":
        shutil.copyfile(out / f"{root_doc}.html", out / "index.html")


def setup(app: Sphinx) -> None:
    """Register what is added to pages."""
    app.connect("source-read", _read)
    app.connect("build-finished", _finish)
