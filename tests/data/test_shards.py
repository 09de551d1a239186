"""A folder is what its manifest says, or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from echo_lm.data import TokenShards

from .texts import prepared, some_texts, tokens_of

TEXTS = some_texts(80)


@pytest.fixture
def folder(tokenizer: Path, tmp_path: Path) -> Path:
    return prepared(tmp_path, tokenizer, TEXTS, shard_tokens=700, held_out_share=0.1)


def test_one_row_of_tokens_whatever_the_shards(folder: Path) -> None:
    shards = TokenShards(folder)
    files = sorted(folder.glob("train-*.tokens.npy"))
    assert len(files) > 2
    everything = [token for file in files for token in tokens_of(file)]
    total = shards.tokens("train")
    assert total == len(everything)
    for start, stop in [(0, total), (0, 1), (690, 710), (650, 2200), (total - 5, total + 5)]:
        assert shards.read("train", start, stop).tolist() == everything[start:stop]
    assert shards.read("train", total, total + 5).tolist() == []


def test_documents_tile_the_row(folder: Path) -> None:
    shards = TokenShards(folder)
    starts = shards.document_starts("train")
    assert starts[0] == 0
    assert starts[-1] == shards.tokens("train")
    assert len(starts) == shards.documents("train") + 1
    row = shards.read("train", 0, 10**9)
    assert np.flatnonzero(row == shards.separator).tolist() == starts[:-1].tolist()
    with pytest.raises(ValueError, match="document must lie between 0 and "):
        shards.document("train", shards.documents("train"))


def test_knows_itself_wherever_it_lies(folder: Path, tokenizer: Path, tmp_path: Path) -> None:
    same = prepared(tmp_path / "b", tokenizer, TEXTS, shard_tokens=700, held_out_share=0.1)
    other = prepared(tmp_path / "c", tokenizer, TEXTS[1:], shard_tokens=700, held_out_share=0.1)
    assert TokenShards(folder).fingerprint == TokenShards(same).fingerprint
    assert TokenShards(folder).fingerprint != TokenShards(other).fingerprint


def cut_short(folder: Path) -> None:
    path = folder / "train-00001.tokens.npy"
    path.write_bytes(path.read_bytes()[:-20])


def grown(folder: Path) -> None:
    path = folder / "train-00001.tokens.npy"
    np.save(path, np.zeros(5000, np.uint16))


def gone(folder: Path) -> None:
    (folder / "train-00001.tokens.npy").unlink()


def retyped(folder: Path) -> None:
    path = folder / "train-00001.tokens.npy"
    np.save(path, np.load(path).astype(np.int64))


def of_objects(folder: Path) -> None:
    path = folder / "train-00001.tokens.npy"
    np.save(path, np.array([print]), allow_pickle=True)


def from_the_future(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "version": 2}))


def no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def half_a_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:100])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_short, r"train-00001\.tokens\.npy cannot be read"),
        (grown, r"train-00001\.tokens\.npy holds uint16 \[5000\] and the manifest says uint16"),
        (gone, r"train-00001\.tokens\.npy cannot be read"),
        (retyped, r"train-00001\.tokens\.npy holds int64"),
        (of_objects, r"train-00001\.tokens\.npy cannot be read"),
        (from_the_future, r"manifest\.json is not of version 1 of 'echo-lm tokens'"),
        (no_manifest, r"holds no manifest\.json: make it with echo-lm data prepare"),
        (half_a_manifest, r"manifest\.json cannot be read"),
    ],
)
def test_damage_is_named(damage: Callable[[Path], None], said: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=said) as error:
        TokenShards(folder)
    assert "\n" not in str(error.value)
