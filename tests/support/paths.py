"""Folders of the source tree."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO_DATA = ROOT / "src" / "ingot" / "demo" / "data"  # the wheel does not contain it
