"""Echo: sequence models that recall anything they have read, with a memory of fixed size."""

from typing import TYPE_CHECKING

from echo_lm._lazy import lazy_names

if TYPE_CHECKING:
    from echo_lm.data.tokenise import load_tokenizer as load_tokenizer
    from echo_lm.model.config import EchoConfig as EchoConfig
    from echo_lm.model.lm import EchoLM as EchoLM
    from echo_lm.model.state import EchoState as EchoState
    from echo_lm.ops import SKAState as SKAState
    from echo_lm.ops import debug as debug
    from echo_lm.ops import ska as ska

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "EchoConfig": "echo_lm.model.config",
        "EchoLM": "echo_lm.model.lm",
        "EchoState": "echo_lm.model.state",
        "SKAState": "echo_lm.ops",
        "debug": "echo_lm.ops",
        "load_tokenizer": "echo_lm.data.tokenise",
        "ska": "echo_lm.ops",
    },
)
