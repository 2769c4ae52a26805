"""Run programs on what Ingot makes for them: ``make clients``, or ``python tools/clients/run.py [WORD ...]``.

Words select cells: programs, containers, presets or models, as in ``vllm w4a16 base``.

For each cell that a profile claims (program, container, preset) and each model: ``ingot quantize`` makes the result,
the program loads it in its own venv, and its logits after 256 tokens and its greedy text of 16 tokens are compared with
Ingot's decoded values in f32. Results go into ``results.json``, of which ``docs/runtimes.md`` shows the table. A cell
is skipped if it has a result of the same version and the same source of Ingot. A cell whose files the program has
read before, be it from another preset, gets that result. ``--again`` runs all cells.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import reference
from cells import FAILED, NOT_MADE, NOT_RUN, PASSED, RESULTS, Cell, Result, claimed, read_results, write_results

from ingot.artifacts.open import open_source
from ingot.errors import IngotError
from ingot.runtime.quantize.options import QuantizeOptions
from ingot.runtime.quantize.run import quantize
from ingot.runtimes.accepts import accepts
from ingot.runtimes.table import runtime_named
from ingot.stores.location import Location

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOKENS = 256
SKIPPED = 1024
"""Tokens of the text before those that are read: the model of ``make_model.py`` knows them by heart."""
PROMPT = 32
COUNT = 16
LIMIT = 1e-3
TIE = 6.0
"""Text may part at two tokens whose log-probabilities in the decoded model differ by this times the root of the limit
of KL. Rounding that moves logits by a standard deviation s has a KL of about s^2 / 2, and moves a difference of two by
twice the root of KL; this is three times that."""
SECONDS = 600


@dataclass(frozen=True)
class Program:
    """A program: the suffix of its venv beside ``.venv`` (empty: that one), its module, and folders of modules."""

    venv: str
    module: str
    folders: tuple[str, ...] = ()


_FIELDS = ("runtime", "preset", "container", "model")
"""The order in which a word is looked up: ``fp8`` is a preset and a container."""
MODELS = ("base", "divisible")
PROGRAMS = {
    "mlx": Program("", "run_mlx"),
    "llama.cpp": Program("", "run_llama", (".xllamacpp",)),
    "transformers": Program(".clients-transformers", "run_transformers"),
    "onnxruntime": Program(".clients-onnxruntime", "run_onnxruntime"),
    "openvino": Program(".clients-openvino", "run_openvino"),
    "mistral.rs": Program(".clients-mistralrs", "run_mistralrs"),
    "vllm": Program(".clients-vllm", "run_vllm"),
}


class Worker:
    """A process of a program, which is started again after it ended."""

    def __init__(self, program: Program, venv: str, log: Path) -> None:
        self._program = program
        self._venv = venv
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self.version = ""

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a job; a process that ends or hangs refuses it."""
        if self._process is None:
            self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        if answer is None:
            self.close()
            lines = [line for line in self._log.read_text("utf-8", "replace").splitlines() if line.strip()]
            return {"refused": f"the process ended or hung: {lines[-1][:200] if lines else ''}"}
        return answer

    def start(self) -> None:
        """Start the process; its first answer is its version."""
        folders = [str(Path(f"{self._venv}{name}").resolve()) for name in self._program.folders]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "HF_HUB_OFFLINE": "1"}
        python = Path(f"{self._venv}{self._program.venv}") / "bin" / "python"
        command = [str(python), str(HERE / "worker.py"), self._program.module]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        answer = self._read()
        if answer is None:
            raise SystemExit(f"{' '.join(command)} does not start; see {self._log}")
        self.version = answer["version"]

    def _read(self) -> dict[str, Any] | None:
        assert self._process is not None
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], SECONDS)
        line = self._process.stdout.readline() if ready else ""
        return json.loads(line.removeprefix("ANSWER ")) if line.startswith("ANSWER ") else None

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@dataclass(frozen=True)
class Model:
    """A source model, its graph, the tokens that are read, a prompt, and the statistics for calibrated presets."""

    path: Path
    graph: Path
    tokens: list[int]
    prompt: list[int]
    statistics: Path


class Runner:
    """Runs the cells of one program."""

    def __init__(self, runtime: str, worker: Worker, folder: Path, tree: str) -> None:
        self._profile = runtime_named(runtime)
        self._worker = worker
        self._folder = folder
        self._tree = tree

    def run(self, cell: Cell, model: Model, earlier: Iterable[Result]) -> Result:
        """Return the result of a cell; an earlier one if version and files are the same."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        result = Result(**vars(cell), verdict=FAILED, version=self._worker.version, date=today, tree=self._tree)
        out = self._folder / {"gguf": "model.gguf", "onnx": "model.onnx"}.get(cell.container, "model")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        try:
            make(cell, model, out)
        except IngotError as error:
            return replace(result, verdict=NOT_MADE, note=f"{error.message} [{error.rule}]")
        result = replace(result, output=digest_of(out), content=content_digest(out))
        program = (cell.runtime, cell.container, cell.model, result.version)
        for item in earlier:
            if (item.runtime, item.container, item.model, item.version) != program:
                continue
            same = item.output == result.output or (item.content and item.content == result.content)
            if same and item.verdict in (PASSED, NOT_RUN):
                return replace(item, **vars(cell), output=result.output, content=result.content, tree=self._tree)
        answer = self._worker.ask(self._job(cell, model, out))
        if "not_run" in answer:
            return replace(result, verdict=NOT_RUN, note=answer["not_run"])
        if "refused" in answer:
            return replace(result, note=answer["refused"])
        return self._judge(result, model, out, answer)

    def _job(self, cell: Cell, model: Model, out: Path) -> dict[str, Any]:
        return {
            "path": str(out),
            "container": cell.container,
            "preset": cell.preset,
            "tokens": model.tokens,
            "prompt": model.prompt,
            "text": reference.text_of(model.path, model.prompt),
            "count": COUNT,
            "out": str(self._folder / "logits.npy"),
        }

    def _judge(self, result: Result, model: Model, out: Path, answer: dict[str, Any]) -> Result:
        expected, greedy = reference.decoded(out, model.path, model.tokens, model.prompt, COUNT)
        kl = None
        if "positions" in answer:
            logits = np.load(self._folder / "logits.npy")
            kl = reference.divergence(expected[answer["positions"], : logits.shape[1]], logits)
        tokens = answer["greedy"]
        if answer["text"] is None:
            pairs = zip(greedy, tokens, strict=False)
            equal = next((index for index, (first, second) in enumerate(pairs) if first != second), len(tokens))
        else:
            equal = reference.equal_tokens(model.path, model.prompt, greedy, answer["text"])
        gap = None
        if equal < COUNT:
            text = model.prompt + greedy[:equal]
            second = tokens[equal] if equal < len(tokens) else None
            gap = reference.gap_after(out, model.path, text, greedy[equal], second)
        limit = self._limit(out)
        passed = (kl is None or kl <= limit) and (gap is None or gap <= TIE * math.sqrt(limit))
        verdict = PASSED if passed else FAILED
        return replace(
            result, verdict=verdict, kl=None if kl is None else float(f"{kl:.3g}"), limit=limit, equal=equal,
            count=COUNT, gap=None if gap is None else float(f"{gap:.2g}"), note=answer["note"],
        )  # fmt: skip

    def _limit(self, out: Path) -> float:
        """Return the largest limit of the schemes that the result's tensors match."""
        source = open_source(Location.parse(out))
        try:
            schemes = accepts(self._profile, source).schemes
        finally:
            source.close()
        return max([LIMIT, *(scheme.kl for scheme in schemes)])


def make(cell: Cell, model: Model, out: Path) -> None:
    """Make the result of a cell as ``ingot quantize`` does."""
    calibrated = cell.preset.endswith("-calibrated")
    calibration = str(statistics_of(model)) if calibrated else "none"
    source = model.path
    if cell.container == "onnx":
        source = model.graph
        if not source.exists():
            subprocess.run([sys.executable, HERE / "make_onnx.py", model.path, source], check=True, capture_output=True)
    quantize(
        QuantizeOptions(
            source, out, runtime=cell.runtime, preset=cell.preset, format=cell.container, calibration=calibration
        )
    )


def digest_of(path: Path) -> str:
    """Return a digest of a file, or of the files of a folder and their names."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def content_digest(path: Path) -> str:
    """Return a digest of tensors, metadata and further files, without the metadata in which Ingot names the preset."""
    source = open_source(Location.parse(path))
    try:
        metadata = {key: value for key, value in source.catalog.metadata.items() if not key.startswith("ingot.")}
        digest = hashlib.sha256(repr(sorted(metadata.items())).encode())
        for name, tensor in source.catalog.tensors.items():
            digest.update(
                f"{name} {tensor.shape} {tensor.dtype} {tensor.codec} {sorted(tensor.params.items())}".encode()
            )
            for role, part in sorted(tensor.parts.items()):
                data = bytearray(part.nbytes)
                part.readinto(0, memoryview(data))
                digest.update(role.encode() + data)
    finally:
        source.close()
    for file in sorted(path.glob("*")) if path.is_dir() else ():
        if file.suffix != ".safetensors":
            digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def tree_digest() -> str:
    """Return a digest of Ingot's source and of the programs' modules."""
    digest = hashlib.sha256()
    for file in sorted([*(ROOT / "src" / "ingot").rglob("*"), *HERE.glob("*.py")]):
        if file.suffix in (".py", ".toml", ".so"):
            digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def statistics_of(model: Model) -> Path:
    """Return the statistics of a model, which are collected once: few, because only the layout of results matters."""
    from ingot.runtime.calibration.calibrate import calibrate
    from ingot.runtime.calibration.calibration import CalibrateOptions

    if not model.statistics.exists():
        calibrate(CalibrateOptions(model.path, model.statistics, samples=4))
    return model.statistics


def main() -> int:
    """Run the cells and write the results after each."""
    arguments = parsed()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    models = open_models(arguments, work)
    results = read_results(arguments.results)
    tree = tree_digest()
    failed = 0
    for runtime, cells in selected(arguments.words, list(models), calibrated=arguments.calibrated).items():
        with tempfile.TemporaryDirectory(dir=work) as folder:
            worker = Worker(PROGRAMS[runtime], arguments.venv, work / f"{PROGRAMS[runtime].module}.log")
            worker.start()
            drop_unclaimed(runtime, arguments.results)
            runner = Runner(runtime, worker, Path(folder) / "cell", tree)
            for number, cell in enumerate(cells, 1):
                before = None if arguments.again else results.get(cell)
                if before is not None and (before.tree, before.version) == (tree, worker.version):
                    failed += before.verdict == FAILED
                    continue
                started = time.monotonic()
                results[cell] = runner.run(cell, models[cell.model], () if arguments.again else results.values())
                write_results({**read_results(arguments.results), cell: results[cell]}, arguments.results)
                failed += results[cell].verdict == FAILED
                print(
                    f"{number}/{len(cells)} {line_of(results[cell])} ({time.monotonic() - started:.0f} s)", flush=True
                )
            worker.close()
    print(f"{failed} failed")
    return 1 if failed else 0


def selected(words: list[str], models: list[str], *, calibrated: bool) -> dict[str, list[Cell]]:
    """Return the cells that words select, by program: those that have a word of each field that words name."""
    every = {name: list(claimed(name, models, calibrated=calibrated)) for name in PROGRAMS}
    named: dict[str, set[str]] = {}
    for word in words:
        fields = (name for name in _FIELDS for cells in every.values() if any(getattr(c, name) == word for c in cells))
        name = next(fields, None)
        if name is None:
            raise SystemExit(f"{word}: no cell has this program, container, preset or model")
        named.setdefault(name, set()).add(word)
    return {
        runtime: chosen
        for runtime, cells in every.items()
        if (
            chosen := [cell for cell in cells if all(getattr(cell, name) in allowed for name, allowed in named.items())]
        )
    }


def drop_unclaimed(runtime: str, path: Path) -> None:
    """Remove the results of cells that a program's profile no longer claims."""
    results = read_results(path)
    models = sorted({cell.model for cell in results})
    now = set(claimed(runtime, models, calibrated=True))
    write_results({cell: item for cell, item in results.items() if cell.runtime != runtime or cell in now}, path)


def line_of(result: Result) -> str:
    """Return a result as a line of text."""
    cell = f"{result.runtime} {result.container} {result.preset} {result.model}: {result.verdict}"
    if result.equal is None:
        return f"{cell}: {result.note}"
    gap = "" if result.gap is None else f", gap {result.gap}"
    return f"{cell}: KL {result.kl} (limit {result.limit}), {result.equal} of {result.count} tokens{gap} {result.note}"


def open_models(arguments: argparse.Namespace, work: Path) -> dict[str, Model]:
    """Return the models by name."""
    paths = {"base": arguments.models / "base", "divisible": arguments.divisible}
    text = arguments.models / "heldout_prose.txt"
    models = {}
    for name in MODELS:
        ids = reference.tokens_of(paths[name], text, SKIPPED + TOKENS)
        models[name] = Model(
            paths[name], work / f"{name}.onnx", ids[SKIPPED:], ids[:PROMPT], work / f"{name}-statistics.safetensors"
        )
    return models


def parsed() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="programs, containers, presets or models; default: all cells")
    parser.add_argument("--models", type=Path, default=ROOT.parent / "shared" / "models", help="the folder of base")
    parser.add_argument("--divisible", type=Path, default=ROOT / "build" / "clients" / "divisible")
    parser.add_argument("--venv", default=str(ROOT / ".venv"), help="the venv of the tests; others lie beside it")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "clients")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--calibrated", action="store_true", help="calibrated presets that have a plain form, too")
    parser.add_argument("--again", action="store_true", help="run cells that have a result, too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
