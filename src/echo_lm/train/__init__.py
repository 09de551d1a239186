"""One training loop, for recall tasks and for text.

>>> model = EchoLM(EchoConfig.preset("synthetic-ska"))
>>> history = train(model, task, TrainConfig(steps=1000, lr=2e-3), folder="run")
>>> history.last("test_accuracy")
"""

from echo_lm.evaluate.recall import Source
from echo_lm.train.config import TrainConfig
from echo_lm.train.history import History, Record
from echo_lm.train.loop import train
from echo_lm.train.nonfinite import Diverged

__all__ = ["Diverged", "History", "Record", "Source", "TrainConfig", "train"]
