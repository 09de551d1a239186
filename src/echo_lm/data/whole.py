"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Past the system's buffers before it has its name; a full disk leaves what was there."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ValueError(
            f"{path} could not be written ({error.strerror}); what was whole before still is: "
            "put that right and run the same again."
        ) from None
