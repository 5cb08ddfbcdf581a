"""Shipway's kernels: one file per op, registrations for MAX graphs in `register`."""
from .register.attention import *
from .register.embedding import *
from .register.gate_up_silu import *
from .register.greedy import *
from .register.linear import *
from .register.lm_head import *
from .register.probe import *
from .register.qkv_rope_append import *
from .register.rms_norm import *
from .register.rope import *
from .register.sample import *
