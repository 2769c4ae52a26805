"""Gives workers whose PYTHONPATH has this folder the tasks of ``fault_tasks``."""

from ingot.cluster.tasks import TASK_TYPES

for _name in ("echo", "raise", "exit", "sleep", "hash", "garble"):
    TASK_TYPES.add(f"test-{_name}", f"fault_tasks:{_name.upper()}")
