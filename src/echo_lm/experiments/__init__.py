"""The paper's experiments and ours, one file for each table or figure."""

from __future__ import annotations

from echo_lm.experiments.appendix import (
    CoTRetrievalExperiment,
    ResourceEconomyExperiment,
    SpecificRecallExperiment,
    ToolCallingExperiment,
)
from echo_lm.experiments.base import Experiment
from echo_lm.experiments.capacity import Capacity
from echo_lm.experiments.causality import Causality
from echo_lm.experiments.conditioning import Conditioning
from echo_lm.experiments.convolutions import Convolutions
from echo_lm.experiments.filters import Filters
from echo_lm.experiments.forgetting import Forgetting
from echo_lm.experiments.gradients import Gradients
from echo_lm.experiments.length import Length
from echo_lm.experiments.lm import LanguageModels
from echo_lm.experiments.lm_evals import Evaluations
from echo_lm.experiments.lm_needle import NeedlesInProse
from echo_lm.experiments.lm_sweep import Sweep
from echo_lm.experiments.long_conditioning import LongConditioning
from echo_lm.experiments.mqar import MQAR50M, MQARSmall
from echo_lm.experiments.persistence import Persistence
from echo_lm.experiments.precision import Precision
from echo_lm.experiments.rank import Rank
from echo_lm.experiments.recurrent import Recurrent
from echo_lm.experiments.ridge import Ridge
from echo_lm.experiments.transfer import Transfer
from echo_lm.experiments.zoology import ZoologyMQAR

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Transfer(),
        Length(),
        MQARSmall(),
        MQAR50M(),
        ToolCallingExperiment(),
        ResourceEconomyExperiment(),
        CoTRetrievalExperiment(),
        SpecificRecallExperiment(),
        Conditioning(),
        Persistence(),
        Capacity(),
        Gradients(),
        Precision(),
        Filters(),
        Causality(),
        Rank(),
        Ridge(),
        Convolutions(),
        Forgetting(),
        Recurrent(),
        LongConditioning(),
        ZoologyMQAR(),
        Sweep(),
        LanguageModels(),
        Evaluations(),
        NeedlesInProse(),
    )
}


def find(name: str) -> Experiment:
    """An experiment by name."""
    if name not in EXPERIMENTS:
        raise ValueError(f"There is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}.")
    return EXPERIMENTS[name]
