"""Nothing heavy is loaded before it is needed. Times are three times what benchmarks promise."""

from __future__ import annotations

import subprocess
import sys

import pytest

import echo_lm

OPTIONAL = (
    "transformers",
    "accelerate",
    "lm_eval",
    "matplotlib",
    "datasets",
    "pyarrow",
    "tokenizers",
    "zstandard",
    "fla",
    "mamba_ssm",
)
HELP = """
import sys
from echo_lm.cli import main
sys.argv = ["echo-lm", *{arguments!r}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import echo_lm; echo_lm.__version__; dir(echo_lm)",
        "import echo_lm.model",
        "from echo_lm import EchoConfig; EchoConfig.preset('echo-180m').to_dict()",
        HELP.format(arguments=["--help"]),
        HELP.format(arguments=["info", "--help"]),
        HELP.format(arguments=["demo", "--help"]),
        HELP.format(arguments=["analyze", "--help"]),
        HELP.format(arguments=["bench", "ops", "--help"]),
        HELP.format(arguments=["data", "prepare", "--help"]),
        "import echo_lm.data.preparation, echo_lm.data.tokenizer, echo_lm.data.shards",
    ],
)
def test_does_not_load_torch(code: str) -> None:
    fresh(f"{code}\nimport sys\nassert 'torch' not in sys.modules")


def test_the_model_loads_no_optional_package() -> None:
    code = "import sys, echo_lm.cli, echo_lm.demo, echo_lm.info, echo_lm.layers\n"
    code += "import echo_lm.data.source, echo_lm.data.command\n"
    code += "import echo_lm.bench.ops, echo_lm.bench.decode, echo_lm.bench.train\n"
    loaded = fresh(code + f"print([name for name in {OPTIONAL} if name in sys.modules])")
    assert loaded.strip() == "[]"


def test_importing_costs_little_beyond_torch() -> None:
    code = "import time, torch\nstart = time.perf_counter()\nimport echo_lm\necho_lm.EchoLM\n"
    assert min(float(fresh(code + "print(time.perf_counter() - start)")) for _ in range(2)) < 0.9


def test_public_names_are_there() -> None:
    assert {
        "EchoConfig",
        "EchoLM",
        "EchoState",
        "SKAState",
        "ska",
        "debug",
        "load_tokenizer",
    } <= set(dir(echo_lm))
    assert all(getattr(echo_lm, name) is not None for name in dir(echo_lm))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = echo_lm.nonsense
