"""A missing optional package is one sentence that says what to install."""

from __future__ import annotations

import pytest

from echo_lm.extras import need


def test_brings_what_is_there() -> None:
    assert need("json", "plot").dumps(1) == "1"


def test_says_what_to_install() -> None:
    with pytest.raises(ValueError, match=r"needs not_there, .* pip install 'echo-lm\[plot\]'"):
        need("not_there.part", "plot")
