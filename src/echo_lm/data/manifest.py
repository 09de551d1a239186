"""What a folder of tokens says of itself.

    FOLDER/manifest.json                  what is here, of what it was made, and by which tokenizer
           tokenizer.json                 that one
           train-00000.tokens.npy         documents one after the other, each behind a separator
           train-00000.documents.npy      for each document where its separator stands, and the
                                          number of its source
           test-00000...                  the same of what is held out

No document lies in two shards.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

FORMAT, VERSION = "echo-lm tokens", 1
MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"


def token_file(shard: str) -> str:
    return f"{shard}.tokens.npy"


def document_file(shard: str) -> str:
    return f"{shard}.documents.npy"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Of a folder that `echo-lm data prepare` made or was making."""
    path = folder / MANIFEST_FILE
    if not path.exists():
        raise ValueError(f"{folder} holds no {MANIFEST_FILE}: make it with echo-lm data prepare.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from None
    found = (manifest.get("format"), manifest.get("version")) if type(manifest) is dict else None
    if found != (FORMAT, VERSION):
        raise ValueError(
            f"{path} is not of version {VERSION} of {FORMAT!r}, which this version of Echo reads: "
            "prepare the text again."
        )
    return dict(manifest)


def file_hash(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def fingerprint(manifest: dict[str, Any]) -> str:
    """The same for the same tokens, wherever they lie."""
    told = json.dumps(manifest["recipe"], sort_keys=True)
    return sha256(told.encode()).hexdigest()[:16]
