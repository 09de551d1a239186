"""Layers: modules around the operators, each `forward(x, state) -> (y, state)` or `forward(x)`."""

from echo_lm.layers.attention import Attention as Attention
from echo_lm.layers.attention import AttentionState as AttentionState
from echo_lm.layers.delta_net import DeltaNet as DeltaNet
from echo_lm.layers.delta_net import DeltaNetState as DeltaNetState
from echo_lm.layers.documents import Documents as Documents
from echo_lm.layers.koopman_mlp import SpectralKoopmanMLP as SpectralKoopmanMLP
from echo_lm.layers.lift import ClebschGordanLift as ClebschGordanLift
from echo_lm.layers.mamba2 import Mamba2 as Mamba2
from echo_lm.layers.mamba2 import Mamba2State as Mamba2State
from echo_lm.layers.mamba3 import Mamba3 as Mamba3
from echo_lm.layers.mamba3 import Mamba3State as Mamba3State
from echo_lm.layers.ska import SpectralKoopmanAttention as SpectralKoopmanAttention
from echo_lm.layers.ska import WindowedSKAState as WindowedSKAState
from echo_lm.layers.swiglu import SwiGLU as SwiGLU
from echo_lm.ops.ska import SKAState as SKAState
from echo_lm.ops.state import TensorState

STATES: dict[str, type[TensorState]] = {
    kind.__name__: kind
    for kind in (
        AttentionState,
        DeltaNetState,
        Mamba2State,
        Mamba3State,
        SKAState,
        WindowedSKAState,
    )
}
"""What a sequence layer may remember, by name."""
