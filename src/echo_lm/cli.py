"""`echo-lm`: the command line. Heavy imports wait until a command runs."""

from __future__ import annotations

import sys
from typing import Annotated

import tyro

app = tyro.extras.SubcommandApp()


@app.command
def info(
    preset: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PRESET]")] = None,
) -> None:
    """Show this machine and who computes what on it, or what a preset is made of.

    Args:
        preset: A model by name, such as echo-180m; without one the names are listed.
    """
    from echo_lm.info import show_machine, show_preset

    if preset is None:
        show_machine()
    else:
        show_preset(preset)


@app.command
def demo(tokens: int = 100_000, seed: int = 0) -> None:
    """Read a long text in pieces: the memory keeps its size, and steps equal the parallel pass.

    Args:
        tokens: How much to read.
        seed: Of the weights and the text.
    """
    from echo_lm.demo import run

    if not run(tokens, seed):
        sys.exit(1)


def main() -> None:
    """Run a command; what is wrong with its arguments is said in one sentence."""
    try:
        app.cli(prog="echo-lm", description="Echo: recall with a memory of fixed size.")
    except ValueError as error:
        print(f"echo-lm: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
