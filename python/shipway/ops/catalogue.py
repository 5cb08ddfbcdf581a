"""Every op the project knows, by name."""

from shipway.ops import embedding, gate_up_silu, greedy, lm_head, mlp, qkv_rope_append, rms_norm, rope, sample
from shipway.ops.attention import ATTENTION_DECODE, ATTENTION_PREFILL
from shipway.ops.linear import LINEAR, LINEAR_RESIDUAL
from shipway.ops.op import Op
from shipway.ops.packed import PACKED

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        embedding.OP,
        rms_norm.OP,
        rope.OP,
        qkv_rope_append.OP,
        ATTENTION_PREFILL,
        ATTENTION_DECODE,
        LINEAR,
        LINEAR_RESIDUAL,
        gate_up_silu.OP,
        mlp.OP,
        lm_head.OP,
        greedy.OP,
        sample.OP,
        *PACKED,
    )
}
