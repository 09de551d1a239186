"""Text, from files or a hub, into tokens on disk and batches for training.

>>> prepare([Path("corpus")], tokenizer=Path("tokenizer.json"), out=Path("tokens"))
>>> source = TextSource(TokenShards("tokens"), length=2048)
>>> train(model, source, TrainConfig(steps=1000, batch=96))
"""

from typing import TYPE_CHECKING

from echo_lm._lazy import lazy_names

if TYPE_CHECKING:
    from echo_lm.data.preparation import prepare as prepare
    from echo_lm.data.shards import TokenShards as TokenShards
    from echo_lm.data.source import TextBatch as TextBatch
    from echo_lm.data.source import TextSource as TextSource
    from echo_lm.data.tokenizer import train_tokenizer as train_tokenizer

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "TextBatch": "echo_lm.data.source",
        "TextSource": "echo_lm.data.source",
        "TokenShards": "echo_lm.data.shards",
        "prepare": "echo_lm.data.preparation",
        "train_tokenizer": "echo_lm.data.tokenizer",
    },
)
