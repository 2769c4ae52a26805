"""What every test may rely on."""

from __future__ import annotations

import signal

# A background job of a shell starts with Ctrl-C ignored, and its children inherit that: tests that interrupt a child
# process would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
