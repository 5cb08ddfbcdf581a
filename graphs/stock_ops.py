"""Every catalogue op made of stock MAX graphs, none of our kernels, as a function on torch CPU tensors.

An op calls the small graphs of ``stock_graphs`` one after another, and attention loops over the sequences of a ragged
batch: what a call costs beside the kernels is of no interest here. Arguments are not checked here.

bf16 is done as the stock decoder does it on a CPU: a product is MAX's own bf16 product, which rounds its result to
bf16; norms, RoPE, SiLU and attention are computed in f32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import torch
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import Module
from torch.utils.dlpack import from_dlpack

from shipway.artefacts import artefact, cpu_target
from shipway.graphs import stock_graphs


def load_ops(dtype: str, head_dim: int) -> dict[str, Callable[..., torch.Tensor]]:
    """Compiles (or takes from the artefact cache) every op.

    Args:
        dtype: ``"f32"`` or ``"bf16"``: activations, matrices and KV cache.
        head_dim: Unused: the graphs take any.

    Returns:
        A function per catalogue op, with the op's arguments.
    """
    made = _Ops(_models(), dtype)
    return {
        "embedding": made.embedding,
        "rms_norm": made.rms_norm,
        "rope": made.rope,
        "qkv_rope_append": made.qkv_rope_append,
        "attention_prefill": made.attention,
        "attention_decode": made.attention,
        "linear": made.linear,
        "linear_residual": made.linear_residual,
        "gate_up_silu": made.gate_up_silu,
        "mlp": made.mlp,
        "lm_head": made.lm_head,
        "greedy": made.greedy,
        "sample": made.sample,
    }


@lru_cache
def _models() -> Mapping[str, Model]:
    session = InferenceSession(devices=[CPU()])

    def build(directory: Path) -> None:
        module = Module()
        stock_graphs.build_graphs(module)
        session.compile(module).export_mef(directory / "ops.mef")

    source = sha256(Path(stock_graphs.__file__).read_bytes()).hexdigest()
    parts = {"source": source, "target": cpu_target(), "max": version("max")}
    made = artefact("stock-ops", parts, build)
    return dict(session.init_all(session.compile(made.path / "ops.mef")))


class _Ops:
    """The ops of one activation dtype, on the compiled graphs. Arguments are those of the catalogue's ops."""

    def __init__(self, models: Mapping[str, Model], dtype: str) -> None:
        self._models = models
        self._dtype = dtype

    def embedding(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self._wide(self._call(f"gather_{self._dtype}", table, ids))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._act(self._norm("rms_norm", x, weight, eps))

    def rope(self, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._act(self._rotate(self._wide(x), table, positions))

    def linear(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self._call(f"product_{self._dtype}", x, w)

    def linear_residual(self, x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._flat("add", residual, self.linear(x, w))

    def gate_up_silu(self, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self._act(self._flat("silu_product", self.linear(x, gate), self.linear(x, up)))

    def mlp(
        self, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        return self.linear_residual(self.gate_up_silu(x, gate, up), down, residual)

    def lm_head(self, x: torch.Tensor, w: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(self._call(f"gather_{self._dtype}", x, rows), w)

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        return self._call("greedy", logits)

    def sample(
        self, logits: torch.Tensor, uniform: torch.Tensor, temperature: float, top_k: int, top_p: float, vocab: int
    ) -> torch.Tensor:
        # MAX sorts one row at a time.
        order = [self._call("order", row, _index(vocab)) for row in logits]
        ranks = torch.stack(order) if order else torch.empty(logits.shape, dtype=torch.int64)
        numbers = (_number(temperature), _index(top_k or vocab), _number(top_p), _index(vocab))
        return self._call("sample", logits, ranks, uniform, *numbers)

    def qkv_rope_append(
        self,
        x: torch.Tensor,
        wq: torch.Tensor,
        wk: torch.Tensor,
        wv: torch.Tensor,
        bias_q: torch.Tensor | None,
        bias_k: torch.Tensor | None,
        bias_v: torch.Tensor | None,
        norm_q: torch.Tensor | None,
        norm_k: torch.Tensor | None,
        eps: float,
        table: torch.Tensor,
        cache: torch.Tensor,
        offsets: torch.Tensor,
        start: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:
        head_dim = _contiguous(cache).shape[-1]
        rows, first = offsets.tolist(), start.tolist()
        positions = torch.cat(
            [torch.arange(s, s + b - a, dtype=torch.int32) for s, (a, b) in zip(first, pairwise(rows), strict=True)]
        )

        def heads(w: torch.Tensor, bias: torch.Tensor | None, norm: torch.Tensor | None, turn: bool) -> torch.Tensor:
            y = self.linear(x, w)
            y = y if bias is None else self._call("bias", y, bias)
            y = y.view(len(x), len(w) // head_dim, head_dim)
            y = y if norm is None else self._norm("qkv_rope_append", y, norm, eps)
            return self._act(self._rotate(y, table, positions) if turn else y)

        q, k = heads(wq, bias_q, norm_q, True), heads(wk, bias_k, norm_k, True)
        v = heads(wv, bias_v, None, False)
        for b, (begin, end) in enumerate(pairwise(rows)):
            if begin < end:
                kept = cache[b, layer].flatten(2)
                new = (k[begin:end].flatten(1), v[begin:end].flatten(1))
                self._call(f"append_{self._dtype}", kept, *new, _index(first[b]))
        return q

    def attention(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        offsets: torch.Tensor,
        start: torch.Tensor,
        layer: int,
        scale: float,
        window: int,
    ) -> torch.Tensor:
        tokens, heads, head_dim = q.shape
        kv_heads = _contiguous(cache).shape[4]
        wide = self._wide(q).view(tokens, kv_heads, heads // kv_heads, head_dim)
        out = torch.empty_like(wide)
        for b, (begin, end) in enumerate(pairwise(offsets.tolist())):
            first = int(start[b])
            total = first + end - begin
            # Keys before the first row's window are seen by no row.
            hidden = max(first - window + 1, 0) if window else 0
            if begin < end and total <= 0:
                out[begin:end] = 0
            elif begin < end:
                keys, values = (self._wide(cache[b, layer, kind, hidden:total]) for kind in (0, 1))
                at, positions = torch.arange(first, total), torch.arange(hidden, total)
                seen = self._call("seen", at, positions, _index(window or total))
                out[begin:end] = self._call("attention", wide[begin:end], keys, values, _number(scale), seen, at)
        return self._act(out).view(q.shape)

    def _norm(self, op: str, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        name = f"rms_norm_{eps:g}"
        if name not in self._models:
            raise ValueError(
                f"{op}: eps {eps:g} is none of {', '.join(f'{known:g}' for known in stock_graphs.EPSILONS)}"
            )
        return self._call(name, x.flatten(0, -2), weight).view(x.shape)

    def _rotate(self, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        halves = _contiguous(table).view(len(table), 2, table.shape[1] // 2)
        return self._call("rotate", x, halves, positions)

    def _wide(self, x: torch.Tensor) -> torch.Tensor:
        """An activation in f32."""
        return x if self._dtype == "f32" else self._flat("widen", x)

    def _act(self, x: torch.Tensor) -> torch.Tensor:
        """f32 rounded to the activation dtype."""
        return x if self._dtype == "f32" else self._flat("narrow", x)

    def _flat(self, name: str, *arrays: torch.Tensor) -> torch.Tensor:
        """An elementwise graph on arrays of one shape."""
        return self._call(name, *(_contiguous(x).view(-1) for x in arrays)).view(arrays[0].shape)

    def _call(self, name: str, *arguments: torch.Tensor | Buffer) -> torch.Tensor:
        buffers = [x if isinstance(x, Buffer) else Buffer.from_dlpack(_contiguous(x).detach()) for x in arguments]
        result = self._models[name].execute(*buffers)
        return from_dlpack(result[0]) if result else torch.empty(0)


def _number(value: float) -> Buffer:
    return Buffer.scalar(value, DType.float32, CPU())


def _index(value: int) -> Buffer:
    return Buffer.scalar(value, DType.int64, CPU())


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    """``x``, refused where MAX would refuse it."""
    if not x.is_contiguous():
        raise ValueError(f"shape {list(x.shape)} is not contiguous (strides {x.stride()}): pass .contiguous()")
    return x
