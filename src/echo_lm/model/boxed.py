"""Models that come with the package: where a folder is asked for, a name will do. Free of torch."""

from __future__ import annotations

from pathlib import Path

BOX = Path(__file__).parents[1] / "box"
DEFAULT = "echo-tiny"


def boxed() -> list[str]:
    """Their names."""
    return sorted(config.parent.name for config in BOX.glob("*/config.json"))


def is_folder(place: str | Path) -> bool:
    """False too for what is too long for a name, such as a text."""
    try:
        return Path(place).is_dir()
    except OSError:
        return False


def model_folder(place: str | Path) -> Path:
    """The folder of a model; a name that is no folder here may be that of a model in the box."""
    if is_folder(place):
        return Path(place)
    if str(place) in boxed():
        return BOX / str(place)
    raise ValueError(
        f"There is no model directory at {place}, and no model of that name in the box: "
        f"{', '.join(boxed()) or 'it is empty'}."
    )
