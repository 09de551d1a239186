"""An `EchoConfig` as transformers wants it: its settings, and what transformers adds."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from echo_lm.model.config import MODEL_TYPE, EchoConfig

SETTINGS = tuple(f.name for f in fields(EchoConfig))
DEFAULT = "echo-50m"
"""What is not given is as in this preset; transformers makes configurations of nothing."""


class EchoHFConfig(PreTrainedConfig):
    """The settings of `EchoConfig` under their names; `config.json` is the same file."""

    model_type = MODEL_TYPE
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "dim",
        "num_attention_heads": "heads",
        "tie_word_embeddings": "tie_embeddings",
    }
    use_cache = True

    def __init__(self, **entries: Any) -> None:
        usual = EchoConfig.preset(DEFAULT).to_dict()
        given = {self.attribute_map.get(name, name): value for name, value in entries.items()}
        ours = {name: given.pop(name, usual[name]) for name in SETTINGS}
        settings = EchoConfig.from_dict(ours).to_dict()
        use_cache = given.pop("use_cache", True)
        super().__init__(**given, **{name: settings[name] for name in SETTINGS})
        if not use_cache:
            self.use_cache = False

    @property
    def num_hidden_layers(self) -> int:
        return len(self.mixers)

    def to_echo(self) -> EchoConfig:
        """The settings alone."""
        return EchoConfig.from_dict({name: getattr(self, name) for name in SETTINGS})
