"""List the files of Ingot that a command executes on its second call in one process, all threads included.

    python tools/trace_files.py convert x.safetensors 'y{run}.gguf' --recipe q4_k
    python tools/trace_files.py --functions verify x.zt
    python tools/trace_files.py -c 'import ingot; ingot.open("x.zt").close()'

``{run}`` in an argument is 1 in the first call and 2 in the second. The list is on stdout, in the order of first use;
the output of the command is on stderr. ``--functions`` lists functions instead of files. A file counts if one of its
functions is called, or if it is imported by the second call.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from pathlib import Path
from types import FrameType


class Recorder:
    """A trace function that records the code of Ingot that is called while ``enabled`` is set."""

    def __init__(self, package: Path) -> None:
        self._prefix = f"{package}/"
        self.enabled = False
        self.calls: dict[tuple[str, str], None] = {}

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        """Record a call. Lines and returns are not traced."""
        code = frame.f_code
        if self.enabled and code.co_filename.startswith(self._prefix):
            self.calls.setdefault((code.co_filename.removeprefix(self._prefix), code.co_qualname), None)


def trace(arguments: list[str], code: str | None) -> Recorder:
    """Run ``ingot`` with the arguments, or the code, twice and return the calls of the second run."""
    import ingot
    from ingot.cli.main import run

    recorder = Recorder(Path(ingot.__file__).parent)
    # Threads may live on from the first call: they are traced from their start.
    threading.settrace(recorder)
    sys.settrace(recorder)
    try:
        for number in ("1", "2"):
            recorder.enabled = number == "2"
            with contextlib.redirect_stdout(sys.stderr):
                if code is not None:
                    exec(compile(code.replace("{run}", number), "<command>", "exec"), {})
                elif exit_code := run([argument.replace("{run}", number) for argument in arguments]):
                    sys.exit(f"call {number} failed with exit code {exit_code}")
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    return recorder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", action="store_true", help="list functions instead of files")
    parser.add_argument("-c", dest="code", metavar="CODE", help="run Python code instead of a command")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of ingot")
    options = parser.parse_args()
    recorder = trace(options.arguments, options.code)
    files = dict.fromkeys(file for file, _ in recorder.calls)
    if options.functions:
        print(*(f"{file}: {name}" for file, name in recorder.calls), sep="\n")
    else:
        print(*files, sep="\n")
    print(f"{len(files)} files, {len(recorder.calls)} functions")


if __name__ == "__main__":
    main()
