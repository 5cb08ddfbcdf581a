"""A wrong call of any op, whoever implements it, is a ``ValueError`` before anything native runs.

The calls are built from the ops' signatures alone. Rows whose packages are not installed are skipped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from op_calls import RUNNERS, SMALL, Arguments, arguments_of, assert_same_bits, call, callable_of
from shipway.numerics.check import OpRunner
from shipway.ops.catalogue import OPS
from shipway.ops.op import Case
from shipway.signature import SIGNATURES, Array, check

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def test_signatures_are_those_of_the_catalogue() -> None:
    assert OPS.keys() <= SIGNATURES.keys()
    for op in OPS.values():
        dims = {name: max(dim.low, min(2, dim.high)) for name, dim in op.dims.items()}
        drawn = OpRunner(op, op.implementations["torch"], "f32").arguments(
            op.draw(Case(dims), np.random.default_rng(0))
        )
        signature = SIGNATURES[op.name]
        assert list(drawn) == list(signature)
        assert op.activations == {n for n, k in signature.items() if isinstance(k, Array) and k.dtype == "act"}
        assert set(op.mutates) == {n for n, k in signature.items() if isinstance(k, Array) and k.written}
        check(op.name, "f32", list(drawn.values()))


@dataclass(frozen=True)
class Wrong:
    """One bad call: the arguments that change, and what the message says."""

    op: str
    said: str
    change: Callable[[Arguments], Mapping[str, Any]]

    def __str__(self) -> str:
        return f"{self.op}: {self.said}"


def puts(**values: Any) -> Callable[[Arguments], Mapping[str, Any]]:
    """Replaces arguments; a list becomes an int32 tensor."""
    return lambda given: {
        name: torch.tensor(value, dtype=torch.int32) if isinstance(value, list) else value
        for name, value in values.items()
    }


def turns(**changes: Callable[[Any], Any]) -> Callable[[Arguments], Mapping[str, Any]]:
    return lambda given: {name: change(given[name]) for name, change in changes.items()}


INF, NAN = math.inf, math.nan

WRONG = (
    Wrong("embedding", "ids must be from 0 and below 5, but ids[1] is 5", puts(ids=[0, 5])),
    Wrong("embedding", "ids must be from 0 and below 5, but ids[0] is -1", puts(ids=[-1, 0])),
    Wrong("embedding", "ids must be torch.int32 on cpu, not torch.int64 on cpu", turns(ids=lambda x: x.long())),
    Wrong("embedding", "ids must be torch.int32 on cpu, not torch.int32 on meta", turns(ids=lambda x: x.to("meta"))),
    Wrong("embedding", "ids must be a torch tensor, not list", turns(ids=lambda x: x.tolist())),
    Wrong("embedding", "table has shape [0, 6], but V must be at least 1", turns(table=lambda x: x[:0])),
    Wrong("rms_norm", "x must have 2 dimensions ['T', 'K'], not shape [1, 2, 6]", turns(x=lambda x: x[None])),
    Wrong("rms_norm", "x must have 2 dimensions ['T', 'K'], not shape []", turns(x=lambda x: x[0, 0])),
    Wrong("rms_norm", "x must be torch.float32 on cpu, not torch.float64 on cpu", turns(x=lambda x: x.double())),
    Wrong("rms_norm", "weight has shape [1], but K is 6", turns(weight=lambda x: x[:1])),
    Wrong("rms_norm", "eps must be from 0 to 3.4028234663852886e+38, not -1e-05", puts(eps=-1e-5)),
    Wrong("rms_norm", "eps must be from 0 to 3.4028234663852886e+38, not nan", puts(eps=NAN)),
    Wrong("rms_norm", "eps must be from 0 to 3.4028234663852886e+38, not inf", puts(eps=INF)),
    Wrong("rms_norm", "eps must be float, not '1e-5'", puts(eps="1e-5")),
    Wrong("rms_norm", "eps must be from 0 to 2147483647, not 2147483648", puts(eps=2**31)),
    Wrong("rope", "positions must be from 0 and below 8, but positions[1] is 8", puts(positions=[0, 8])),
    Wrong("rope", "positions must be from 0 and below 8, but positions[0] is -1", puts(positions=[-1, 0])),
    Wrong("rope", "positions has shape [1], but T is 2", puts(positions=[0])),
    Wrong("rope", "table has 63 columns, but must have an even number", turns(table=lambda x: x[:, :63].clone())),
    Wrong("rope", "table has 128 columns", turns(table=lambda x: x.repeat(1, 2))),
    Wrong(
        "qkv_rope_append",
        "wq has 192 rows and wk 64, but cache has 2 kv_heads of 64",
        turns(
            wq=lambda x: x[:192],
            wk=lambda x: x[:64],
            wv=lambda x: x[:64],
            bias_q=lambda x: x[:192],
            bias_k=lambda x: x[:64],
            bias_v=lambda x: x[:64],
        ),
    ),
    Wrong("qkv_rope_append", "wq has 255 rows", turns(wq=lambda x: x[:255], bias_q=lambda x: x[:255])),
    Wrong(
        "qkv_rope_append",
        "the 3 heads of wq cannot share the 2 kv_heads of cache evenly",
        turns(wq=lambda x: x[:192], bias_q=lambda x: x[:192]),
    ),
    Wrong("qkv_rope_append", "biases come all or not at all, but bias_k is None and bias_q is not", puts(bias_k=None)),
    Wrong("qkv_rope_append", "norms come all or not at all, but norm_q is None and norm_k is not", puts(norm_q=None)),
    Wrong("qkv_rope_append", "norm_q has shape [32], but D is 64", turns(norm_q=lambda x: x[:32])),
    Wrong(
        "qkv_rope_append",
        "cache has shape [2, 2, 2, 8, 2, 32], but D is 64",
        turns(cache=lambda x: x[..., :32].clone()),
    ),
    Wrong(
        "qkv_rope_append", "cache has shape [2, 2, 1, 8, 2, 64], but 2 is 2", turns(cache=lambda x: x[:, :, :1].clone())
    ),
    Wrong("qkv_rope_append", "layer is 2, but cache has 2 layers", puts(layer=2)),
    Wrong("qkv_rope_append", "layer must be from 0 to 2147483647, not -1", puts(layer=-1)),
    Wrong("qkv_rope_append", "layer must be int, not 0.0", puts(layer=0.0)),
    Wrong("qkv_rope_append", "layer must be int, not False", puts(layer=False)),
    Wrong("qkv_rope_append", "start[0] is -1, so that 1 new rows end at position 0", puts(start=[-1, 0])),
    Wrong(
        "qkv_rope_append",
        "start[1] is 8, so that 1 new rows end at position 9, but cache has 8 positions",
        puts(start=[0, 8]),
    ),
    Wrong(
        "qkv_rope_append",
        "start[1] is 2147483647, so that 1 new rows end at position 2147483648",
        puts(start=[0, 2**31 - 1]),
    ),
    Wrong("qkv_rope_append", "position 5, but cache has 8 positions and table 4", turns(table=lambda x: x[:4])),
    Wrong("qkv_rope_append", "offsets goes from 0 to 99, but there are 2 rows", puts(offsets=[0, 1, 99])),
    Wrong("qkv_rope_append", "offsets goes from 1 to 2, but there are 2 rows", puts(offsets=[1, 1, 2])),
    Wrong("qkv_rope_append", "offsets has 2 numbers, start 2 and cache 2 slots", puts(offsets=[0, 2])),
    Wrong(
        "qkv_rope_append",
        "offsets has 4 numbers, start 3 and cache 2 slots",
        puts(offsets=[0, 1, 2, 2], start=[0, 0, 0]),
    ),
    Wrong("qkv_rope_append", "start has shape [0], but B must be at least 1", puts(offsets=[0], start=[])),
    Wrong(
        "attention_prefill",
        "takes offsets that ascend, but offsets[1:3] is [4, 2]",
        puts(offsets=[0, 4, 2], start=[0, 0]),
    ),
    Wrong(
        "attention_prefill", "start[0] is 1000000, so that 1 new rows end at position 1000001", puts(start=[10**6, 0])
    ),
    Wrong("attention_prefill", "start[0] is -2, so that 1 new rows end at position -1", puts(start=[-2, 0])),
    Wrong("attention_prefill", "window must be from 0 to 2147483647, not -1", puts(window=-1)),
    Wrong("attention_prefill", "window must be from 0 to 2147483647, not 2147483648", puts(window=2**31)),
    Wrong("attention_prefill", "scale must be from 0 to 3.4028234663852886e+38, not nan", puts(scale=NAN)),
    Wrong("attention_prefill", "scale must be from 0 to 3.4028234663852886e+38, not -0.125", puts(scale=-0.125)),
    Wrong("attention_prefill", "scale must be float, not None", puts(scale=None)),
    Wrong(
        "attention_prefill",
        "the 3 heads of q cannot share the 2 kv_heads of cache evenly",
        turns(q=lambda x: x[:, :3].clone()),
    ),
    Wrong("attention_prefill", "q has shape [2, 4, 0], but D is 64", turns(q=lambda x: x[..., :0])),
    Wrong("attention_decode", "takes one row per sequence, but offsets[0:2] is [0, 2]", puts(offsets=[0, 2, 2])),
    Wrong("attention_decode", "layer is 9, but cache has 2 layers", puts(layer=9)),
    Wrong("attention_decode", "q has shape [2, 4, 1], but D is 64", turns(q=lambda x: x[..., :1])),
    Wrong(
        "attention_decode",
        "cache has shape [2, 2, 2, 0, 2, 64], but capacity must be at least 1",
        turns(cache=lambda x: x[:, :, :, :0]),
    ),
    Wrong("linear", "w has shape [64, 5], but K is 6", turns(w=lambda x: x[:, :5].clone())),
    Wrong("linear", "x has shape [2, 0], but K must be at least 1", turns(x=lambda x: x[:, :0], w=lambda x: x[:, :0])),
    Wrong("linear", "w must be a plain dense tensor, not a torch.sparse_coo", turns(w=lambda x: x.to_sparse())),
    Wrong("linear_residual", "residual has shape [2, 1], but N is 64", turns(residual=lambda x: x[:, :1].clone())),
    Wrong("gate_up_silu", "up has shape [1, 6], but N is 64", turns(up=lambda x: x[:1])),
    Wrong("mlp", "down has shape [64, 6], but K is 6", turns(down=lambda x: x.T.contiguous())),
    Wrong("mlp", "residual has shape [2, 3], but K is 6", turns(residual=lambda x: x[:, :3].clone())),
    Wrong("linear_int8", "w must be torch.int8 on cpu, not torch.uint8", turns(w=lambda x: x.view(torch.uint8))),
    Wrong("linear_int8", "groups of a row of 6 elements are 1, not 2", turns(w_scales=lambda x: x.repeat(1, 2))),
    Wrong("linear_int8", "w_scales must be torch.float16 on cpu", turns(w_scales=lambda x: x.float())),
    Wrong("linear_int4", "pairs of a row of 6 elements are 3, not 4", turns(w=lambda x: torch.cat([x, x[:, :1]], 1))),
    Wrong("linear_int4", "w_zeros has shape [63, 1], but N is 64", turns(w_zeros=lambda x: x[1:])),
    Wrong(
        "gate_up_silu_int4", "up_scales has shape [64, 2], but groups is 1", turns(up_scales=lambda x: x.repeat(1, 2))
    ),
    Wrong("lm_head", "rows must be from 0 and below 2, but rows[1] is 2", puts(rows=[0, 2])),
    Wrong("lm_head", "rows must be from 0 and below 2, but rows[0] is -1", puts(rows=[-1, 0])),
    Wrong("greedy", "logits has shape [2, 0], but V must be at least 1", turns(logits=lambda x: x[:, :0])),
    Wrong("greedy", "logits must be torch.float32 on cpu, not torch.float16 on cpu", turns(logits=lambda x: x.half())),
    Wrong("sample", "temperature must be above 0 to 3.4028234663852886e+38, not 0.0", puts(temperature=0.0)),
    Wrong("sample", "temperature must be above 0 to 3.4028234663852886e+38, not inf", puts(temperature=INF)),
    Wrong("sample", "top_p must be above 0 to 1, not 0", puts(top_p=0)),
    Wrong("sample", "top_p must be above 0 to 1, not 1.0001", puts(top_p=1.0001)),
    Wrong("sample", "top_p must be above 0 to 1, not nan", puts(top_p=NAN)),
    Wrong("sample", "top_k must be from 0 to 2147483647, not -1", puts(top_k=-1)),
    Wrong("sample", "vocab must be from 1 to 2147483647, not 0", puts(vocab=0)),
    Wrong("sample", "vocab is 6, but logits has 5 columns", puts(vocab=6)),
    Wrong(
        "sample",
        "uniform must be from 0 and below 1, but uniform[1] is 1.0",
        turns(uniform=lambda x: torch.tensor([0.5, 1.0])),
    ),
    Wrong(
        "sample",
        "uniform must be from 0 and below 1, but uniform[0] is nan",
        turns(uniform=lambda x: torch.tensor([NAN, 0.5])),
    ),
    Wrong("sample", "uniform has shape [3], but R is 2", turns(uniform=lambda x: torch.zeros(3))),
)


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_the_check_names_argument_and_values(wrong: Wrong) -> None:
    arguments = arguments_of(wrong.op)
    check(wrong.op, "f32", list(arguments.values()), head_dim=64)
    arguments.update(wrong.change(arguments))
    with pytest.raises(ValueError, match=re.escape(wrong.said)) as caught:
        check(wrong.op, "f32", list(arguments.values()), head_dim=64)
    assert str(caught.value).startswith(wrong.op)
    assert "\n" not in str(caught.value)


def test_a_head_dim_that_no_kernel_serves_is_refused_before_it_is_compiled() -> None:
    arguments = arguments_of("attention_decode", sizes=SMALL | {"D": 264})
    with pytest.raises(ValueError, match="cache has a head_dim of 264, the largest is 256"):
        check("attention_decode", "f32", list(arguments.values()))


@pytest.mark.parametrize("name", RUNNERS)
def test_bad_calls_raise_on_every_row_and_leave_it_working(name: str) -> None:
    runner = RUNNERS[name]
    good = arguments_of(runner.op.name, runner.dtype)
    before = call(name, good)
    for wrong in (wrong for wrong in WRONG if wrong.op == runner.op.name):
        with pytest.raises(ValueError, match=re.escape(wrong.op)):
            callable_of(name)(*(good | wrong.change(good)).values())
    for count in (0, len(good) - 1, len(good) + 1):
        with pytest.raises(ValueError, match=f"{runner.op.name} takes .*; {count} arguments were given"):
            callable_of(name)(*[*good.values(), None][:count])
    assert_same_bits(call(name, good), before)
