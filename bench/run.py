"""Run every benchmark one after the other: ``make bench``.

Each prints ratios against memcpy or a named peer measured in the same run, and writes its figures as JSON into
``bench/results/``. Arguments name the benchmarks to run (default: all); ``demo`` is the figures of ``ingot demo``.
``bench/results/all.json`` has the figures of every benchmark there, the machine, and the versions of the peers:
``python bench/compare.py old.json new.json`` shows what changed between two such files.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

PEERS = ("numpy", "torch", "safetensors", "ztensor", "gguf", "deltatensors", "zipnn", "zstandard", "coremltools")
HERE = Path(__file__).parent
LLAMA = HERE.parent / ".venv.llama" / "bin" / "python"  # of `make interop-llama`
BENCHMARKS: dict[str, list[str]] = {
    "kernels": [],
    "lossless": [],
    "load": [],
    "convert": ["--gigabytes", "8", "--max-ram", "1GiB"],
    "delta": [],
    "patch": ["--gigabytes", "1"],
    "wdelta": ["--megabytes", "256"],
    "packed": ["--batch", "1", "8", "16", "64", "256"],
    "prompt": ["--repeat", "2"],
    "palette": [],
    "opening": [],
}
DEMO = "import sys; from ingot.cli.main import run; sys.exit(run(['demo', '--json', '--out', sys.argv[1]]))"


def main() -> None:
    wanted = sys.argv[1:] or [*BENCHMARKS, "demo"]
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    (results / "machine.json").write_text(json.dumps(machine(), indent=2))
    for name in wanted:
        print(f"== {name}", flush=True)
        if name == "demo":
            demo(results / "demo.json")
            continue
        given = BENCHMARKS[name] + (["--llama", str(LLAMA)] if name == "prompt" and LLAMA.exists() else [])
        command = [sys.executable, str(HERE / f"{name}.py"), *given, "--json", str(results / f"{name}.json")]
        if subprocess.run(command, check=False).returncode:
            sys.exit(f"benchmark {name} failed")
    (results / "all.json").write_text(json.dumps(together(results), indent=1) + "\n")
    print(f"figures as JSON in {results}, all of them in all.json")


def together(results: Path) -> dict[str, object]:
    """Return the figures of every benchmark that has any, by its name, and the machine."""
    found: dict[str, object] = {}
    for name in ("machine", *BENCHMARKS, "demo"):
        path = results / f"{name}.json"
        if path.exists():
            found[name] = json.loads(path.read_text("utf-8"))
    return found


def demo(result: Path) -> None:
    """Sizes, errors and perplexities of the demo's table."""
    with tempfile.TemporaryDirectory() as folder, result.open("w") as out:
        if subprocess.run([sys.executable, "-c", DEMO, folder], stdout=out, check=False).returncode:
            sys.exit("the demo failed")


def machine() -> dict[str, object]:
    """Describe what the figures were measured on and with."""
    return {
        "processor": processor(),
        "processors": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version for name in ("ingot", *PEERS) if (version := version_of(name))},
    }


def version_of(name: str) -> str | None:
    """Return what is installed of a package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
