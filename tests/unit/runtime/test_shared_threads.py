"""Products with packed weights by torch's threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: it forks, of which libraries that other tests have loaded warn.
PROGRAM = """
import ctypes, os, warnings
import torch
from ingot.runtime.layers.packed_linear import PackedLinear
from ingot.core.runtime import native
from tests.support.packed import PLAIN, matrix

warnings.simplefilter("ignore", DeprecationWarning)
layer = PackedLinear(matrix(PLAIN, 900, 300))
entry = ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
torch.set_num_threads(3)
with torch.no_grad():
    for rows in (1, 70):
        x, found = torch.randn(rows, 300, dtype=torch.bfloat16), []
        for team in (0, entry):
            native.kernels.share_team(team)
            found.append(layer(x))
        assert torch.equal(*found), rows
        child = os.fork()  # the team's threads are not there, and operations of torch wait for them
        if child == 0:
            same = layer(x).view(torch.int16).numpy().tobytes() == found[0].view(torch.int16).numpy().tobytes()
            os._exit(0 if same else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, rows
print("the same")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="OpenMP's threads are shared on Linux")
def test_torchs_threads_and_our_own_give_the_same_bits():
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "the same\n"), done.stderr
