"""What a source's ``config.json`` says of activations and caches, and its result does not."""

from __future__ import annotations

from ingot.core.config import CONFIG
from ingot.ops.convert.plan import ConvertPlan
from ingot.ops.open import Source


def unsaid(source: Source, plan: ConvertPlan) -> str:
    """Return a note of what is not carried; empty where nothing is lost."""
    said = source.format.activations(source.config()) if source.format.traits.config_keys else {}
    if not said:
        return ""
    if plan.config is not None:
        lost = plan.format.dropped_settings(plan.artifact, said)
    else:
        lost = [f"{key} ({value})" for key, value in said.items()]
    if not lost:
        return ""
    return f"not carried into {plan.format.name}: what the source's {CONFIG} says of {', '.join(lost)}"
