"""Operators: functions on tensors, each in several forms that are the same map."""

from echo_lm.ops.checks import debug as debug
from echo_lm.ops.delta import DeltaState as DeltaState
from echo_lm.ops.delta import delta_rule as delta_rule
from echo_lm.ops.ska import SKAState as SKAState
from echo_lm.ops.ska import ska as ska
from echo_lm.ops.ssd import SSDState as SSDState
from echo_lm.ops.ssd import ssd as ssd
