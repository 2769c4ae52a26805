"""Every test here runs for each instruction set that this processor has, one after the other: references are shared."""

from __future__ import annotations

import pytest

from ingot.core.runtime import native


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Call the test once per instruction set; a failure says for which."""
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    before = native.isa()
    try:
        for name in native.available_isas():
            native.set_isa(name)
            try:
                pyfuncitem.obj(**arguments)
            except Exception as error:
                error.add_note(f"instruction set: {name}")
                raise
    finally:
        native.set_isa(before)
    return True
