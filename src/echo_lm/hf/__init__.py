"""Echo for transformers, whose Auto classes know Echo's folders after `import echo_lm.hf`.

A folder is the same for both: `EchoLM` and `AutoModelForCausalLM` read what either has written.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from echo_lm._lazy import lazy_names
from echo_lm.extras import need

if TYPE_CHECKING:
    from echo_lm.hf.cache import EchoCache as EchoCache
    from echo_lm.hf.config import EchoHFConfig as EchoHFConfig
    from echo_lm.hf.model import EchoForCausalLM as EchoForCausalLM

need("transformers", "hf")
import_module("echo_lm.hf.register")

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "EchoCache": "echo_lm.hf.cache",
        "EchoForCausalLM": "echo_lm.hf.model",
        "EchoHFConfig": "echo_lm.hf.config",
    },
)
