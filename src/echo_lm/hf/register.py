"""Make Echo known to the Auto classes of transformers."""

from __future__ import annotations

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from echo_lm.hf.config import EchoHFConfig
from echo_lm.hf.model import EchoForCausalLM
from echo_lm.model.config import MODEL_TYPE

AutoConfig.register(MODEL_TYPE, EchoHFConfig)
AutoModelForCausalLM.register(EchoHFConfig, EchoForCausalLM)
# A folder may hold any tokenizer.json.
AutoTokenizer.register(EchoHFConfig, fast_tokenizer_class=PreTrainedTokenizerFast)
