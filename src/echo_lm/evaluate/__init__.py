"""What a model can do."""

from echo_lm.evaluate.recall import Recall, recall

__all__ = ["Recall", "recall"]
