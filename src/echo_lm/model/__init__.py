"""The language model. Reading a configuration does not import torch."""

from typing import TYPE_CHECKING

from echo_lm._lazy import lazy_names

if TYPE_CHECKING:
    from echo_lm.model.config import EchoConfig as EchoConfig
    from echo_lm.model.decoder import Decoder as Decoder
    from echo_lm.model.lm import EchoLM as EchoLM
    from echo_lm.model.lm import EchoOutput as EchoOutput
    from echo_lm.model.state import EchoState as EchoState

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "EchoConfig": "echo_lm.model.config",
        "Decoder": "echo_lm.model.decoder",
        "EchoLM": "echo_lm.model.lm",
        "EchoOutput": "echo_lm.model.lm",
        "EchoState": "echo_lm.model.state",
    },
)
