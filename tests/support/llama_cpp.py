"""Run the programs of ``tests/interop`` that compute with llama.cpp, which ends its process on some errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LOGITS = Path(__file__).parents[1] / "interop" / "llama_logits.py"
IMAGES = LOGITS.with_name("llama_images.py")


def run_jobs(program: Path, jobs: list[dict[str, Any]], folder: Path) -> dict[str, str]:
    """Return llama.cpp's error message for each printed path, empty on success."""
    errors: dict[str, str] = {}
    while jobs:
        (folder / "jobs.json").write_text(json.dumps(jobs))
        command = [sys.executable, str(program), str(folder / "jobs.json")]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
        lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
        errors |= {line["path"]: line["error"] for line in lines}
        if len(lines) < len(jobs):
            job = jobs[len(lines)]
            errors[job.get("mmproj", job["path"])] = "llama.cpp ended the process"
        jobs = jobs[len(lines) + 1 :]
    return errors
