"""Being asked to stop, as a wish: the step is finished first. Asked again, at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what a scheduler sends before it kills."""
ONE_WISH = 0.5
"""Seconds: Ctrl-C reaches a process that torchrun started twice, once by torchrun."""


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether someone asked."""
    asked: float | None = None

    def note(signal_number: int, frame: FrameType | None) -> None:
        nonlocal asked
        now = time.monotonic()
        if asked is not None and now > asked + ONE_WISH:
            raise KeyboardInterrupt
        asked = now if asked is None else asked

    # Only the main thread may handle signals, and a process started to ignore them should.
    usual = (signal.default_int_handler, signal.SIG_DFL)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    on_main = threading.current_thread() is threading.main_thread()
    ours = [number for number, handler in handlers.items() if on_main and handler in usual]
    for number in ours:
        signal.signal(number, note)
    try:
        yield lambda: asked is not None
    finally:
        for number in ours:
            signal.signal(number, handlers[number])
