"""What ``ingot`` prints without arguments: README's six jobs, a command for each."""

from __future__ import annotations

from ingot.cli.tables import line

JOBS = {
    "Make weights smaller": "ingot convert model.safetensors small.zt --recipe int4",
    "Move them to another container": "ingot convert gptq-folder model.gguf",
    "Look, check, compare": "ingot verify small.zt",
    "Keep fine-tunes as deltas": "ingot diff base tuned -o tuned.zt",
    "Run and evaluate them": 'ingot generate folder "Once upon a time"',
    "Make them for one machine": "ingot plan folder --chip m4",
}


def welcome() -> None:
    """Print the jobs."""
    for job, command in JOBS.items():
        line(f"{job}:")
        line(f"  {command}")
    line("All commands: ingot --help")
