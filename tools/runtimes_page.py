"""Write ``docs/runtimes.md`` from the profiles in ``src/ingot/runtimes/profiles``: ``python tools/runtimes_page.py``.

``make docs`` compares the page with what this module renders.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/runtimes.md"
RESULTS = "tools/clients/results.json"
_PROOF = """## Proof by the programs

`make clients` runs these programs on what `ingot quantize` makes for them, on two small models: `base`, of which few
matrices divide by 256, and `divisible`, whose every dimension does. A program loads the result and reads 256 tokens;
KL is the mean divergence of its next-token distributions from those of Ingot's decoded values in f32, in nats per
token. Then it generates 16 tokens greedily. `12 of 16, tie 0.03` says that the texts part after 12 tokens, where the
decoded model prefers its token by 0.03 nats.

A cell is *passed* if the KL is below 0.001 or the limit that the scheme's note explains, and greedy text is equal or
parts at a tie of at most 0.05 nats. *not run*: the program has no kernel on this machine; the note says how far it got.
*not made*: Ingot refuses this preset for this model. The figures are those of `tools/clients/results.json`.
"""
_HEAD = """# Runtimes: what each program accepts

A *runtime* is a program that runs models. Ingot has a profile of each: data that states the version, the containers and
schemes that it accepts, what else a file or folder needs, the default preset for each bit width, and the command that
runs the result. `ingot quantize --for R`, `ingot convert --for R`, `ingot verify X --for R`, `ingot matrix X --for R`
and `ingot recipes --for R` read these profiles, and the line "next:" names a program only if its profile accepts the
result. [The format of a profile](../spec/runtimes.md) is open: a package can add one.

This page is made from the profiles by `tools/runtimes_page.py`. The last column of a table says how far a statement
was tried:
"""
_TRIED = {
    "run": "run",
    "loads": "loaded",
    "config": "configuration only",
    "documented": "not run",
    "refused": "refused",
}


def render() -> str:
    """Return the page."""
    from ingot.runtimes.profile import OUTCOMES
    from ingot.runtimes.table import BUILT_IN, RUNTIMES

    profiles = [RUNTIMES[name] for name in BUILT_IN]
    lines = [
        *_HEAD.splitlines(),
        "",
        *table(["mark", "meaning"], [(_TRIED[key], text) for key, text in OUTCOMES.items()]),
    ]
    rows = [
        (f"[{item.title}](#{anchor(item.title)})", f"`--for {item.name}`", item.version or "-", tried(item))
        for item in profiles
    ]
    lines += ["", *table(["program", "option", "version", "what was run"], rows)]
    for item in profiles:
        lines += section(item)
    lines += proof()
    return "\n".join(lines) + "\n"


def proof() -> Iterator[str]:
    """Yield the tables of what the programs did."""
    path = ROOT / RESULTS
    cells = json.loads(path.read_text("utf-8"))["cells"] if path.exists() else []
    if not cells:
        return
    yield from ("", *_PROOF.splitlines())
    for runtime in dict.fromkeys(item["runtime"] for item in cells):
        rows = [item for item in cells if item["runtime"] == runtime]
        versions = ", ".join(sorted({item["version"] for item in rows}))
        yield from ("", f"### {runtime}: {versions}", "")
        heads = ["container", "preset", "model", "verdict", "KL", "greedy text", "note", "date"]
        yield from table(heads, [list(map(str, proof_row(item))) for item in rows])


def proof_row(item) -> Iterator[str]:
    """Yield the fields of a cell."""
    yield from (f"`{item['container']}`", f"`{item['preset']}`", item["model"], item["verdict"])
    yield f"{item['kl']:.1e}" if "kl" in item else ""
    tie = f", tie {item['gap']}" if "gap" in item else ""
    yield f"{item.get('equal', 0)} of {item['count']}{tie}" if "count" in item else ""
    yield from (item.get("note", ""), item["date"])


def section(profile) -> Iterator[str]:
    """Yield the lines of one program."""
    yield from ("", f"## {profile.title}", "", profile.summary)
    package = f" (`{profile.package}`)" if profile.package else ""
    if profile.machine:
        yield from ("", f"Version {profile.version}{package}, {profile.machine}, {profile.date}.")
    else:
        version = f"Version {profile.version}{package}; " if profile.version else ""
        yield from ("", f"{version}not run here ({profile.date}).")
    aliases = ", ".join(f"`{name}`" for name in profile.aliases)
    if aliases:
        yield from ("", f"Other names for `--for`: {aliases}.")
    yield ""
    rows = [
        (item.name, ", ".join(f"`{name}`" for name in item.containers), terms(item), item.note, _TRIED[item.outcome])
        for item in profile.schemes
    ]
    yield from table(["scheme", "containers", "which", "figure, or what the program says", "tried"], rows)
    if profile.presets:
        yield ""
        rows = [
            (f"{item.bits}", f"`{item.container}`", code(item.plain), code(item.calibrated)) for item in profile.presets
        ]
        yield from table(["bits", "container", "preset", "calibrated preset"], rows)
        yield from ("", f"Without `--bits`: {profile.default} bits.")
    notes = [*needs(profile), *profile.notes]
    yield from ("", *(f"- {text}" for text in notes)) if notes else ()
    for container, commands in profile.commands.items():
        yield from ("", "Command:" if container == "default" else f"Command for `{container}`:", "", "```text")
        yield from (*commands, "```")


def needs(profile) -> Sequence[str]:
    """Return sentences about what a file or folder needs beside its tensors."""
    lines = []
    for item in profile.requirements:
        names = [
            *(f"the file `{name}`" for name in item.files),
            *(f"`{name}` in `config.json`" for name in item.config),
        ]
        names += [f"the key `{name}`" for name in item.metadata]
        choices = ", ".join(f"`{name}`" for name in item.any_files)
        names += [f"one of the files {choices}"] if choices else []
        lines.append(f"Needs {', '.join(names)} ({', '.join(item.containers)}): {item.why}.")
    rules = profile.constraints
    texts = {
        "q, k, v and gate, up, which are multiplied as one matrix, need one scheme": rules.merged_scheme,
        "Blocks divide the rows of each member of a merged matrix": rules.merged_blocks,
        "Members of a merged matrix have one second scale": rules.merged_second_scale,
        "Embeddings and heads are not packed": rules.dense_embeddings,
        "Every tensor that `config.json` implies is present": rules.complete,
        "A file has only tensors of its architecture": rules.known_tensors,
        "The tokenizer has no more tokens than the embedding has rows": rules.vocabulary == "fits",
        "The tokenizer of a file has as many tokens as the embedding has rows": rules.vocabulary == "equal",
    }
    return [*lines, *(f"{text}." for text, applies in texts.items() if applies)]


def terms(scheme) -> str:
    """Return the conditions of a scheme in a few words."""
    words = [", ".join(f"`{name}`" for name in scheme.types)]
    words.append(f"{' or '.join(map(str, scheme.bits))} bits" if scheme.bits else "")
    if scheme.symmetric is not None:
        words.append("symmetric" if scheme.symmetric else "zero points")
    words.append(f"groups {', '.join(map(str, scheme.groups))}" if scheme.groups else "")
    words.append(f"scales {', '.join(scheme.scales)}" if scheme.scales else "")
    words.append("groups divide the columns" if scheme.whole_groups else "")
    return "; ".join(filter(None, words)) or "any"


def tried(profile) -> str:
    """Return what was run, in a few words."""
    if not profile.machine:
        return "nothing"
    counts = [sum(item.outcome == key for item in profile.schemes) for key in ("run", "loads", "config", "refused")]
    names = ("run", "loaded", "by configuration", "refused")
    return ", ".join(f"{count} {name}" for count, name in zip(counts, names, strict=True) if count)


def code(text: str) -> str:
    """Return a name as code; a dash if it is empty."""
    return f"`{text}`" if text else "-"


def anchor(title: str) -> str:
    """Return the anchor of a heading."""
    kept = "".join(char for char in title.lower() if char.isalnum() or char in " -_")
    return kept.replace(" ", "-")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table."""
    cells = [heads, ["---"] * len(heads), *([item.replace("|", "\\|") or "-" for item in row] for row in rows)]
    return [f"| {' | '.join(row)} |" for row in cells]


if __name__ == "__main__":
    (ROOT / PAGE).write_text(render(), "utf-8")
    sys.stdout.write(f"{PAGE}\n")
