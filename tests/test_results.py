"""Records name their circumstances and are written whole."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import echo_lm
from echo_lm.results import circumstances, write_json


def test_names_commit_machine_and_versions() -> None:
    found = circumstances()
    assert set(found) == {"date", "git", "hardware", "versions"}
    assert found["versions"]["echo_lm"] == echo_lm.__version__
    assert found["hardware"]["processor"]


def test_a_copy_in_someone_elses_repository_names_no_commit(tmp_path: Path) -> None:
    """An environment inside a user's project must not pass that project's commit off as ours."""
    shutil.copytree(Path(echo_lm.__file__).parent, tmp_path / "env" / "echo_lm")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run([*git, *command], check=True)
    code = "from echo_lm.results import circumstances; print(circumstances()['git'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "env", capture_output=True, text=True
    )
    assert done.stdout.strip() == str({"commit": "unknown", "dirty": False}), done.stderr


def test_records_are_json_whatever_the_numbers(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"loss": float("nan"), "by": ({"x": [float("inf"), 1.5]},)})
    told = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert told == {"loss": None, "by": [{"x": [None, 1.5]}]}


def test_a_failed_write_keeps_the_earlier_record(tmp_path: Path) -> None:
    path = tmp_path / "results" / "a.json"
    write_json(path, {"value": 1})
    with pytest.raises(TypeError):
        write_json(path, {"value": object()})
    assert json.loads(path.read_text()) == {"value": 1}
