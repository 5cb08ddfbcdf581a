"""Runs one implementation of one op in one dtype and judges it: what tests, campaigns and op tables share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shipway.numerics.dtypes import DTYPES
from shipway.numerics.verdict import Verdict, judge, judge_choice, judge_exact
from shipway.ops.catalogue import OPS
from shipway.ops.data import lay_out
from shipway.ops.op import Case, Implementation, Inputs, Op, Output, Outputs, Runner


class OpRunner(Runner):
    """The :class:`Runner` every property receives.

    Args:
        op: The op.
        implementation: Its row.
        dtype: Dtype under test.
        wrap: Replaces the implementation's callable by ``wrap(callable)``, to plant a defect.

    Attributes:
        max_ulps: Largest error of all outputs judged so far, in ulps.
        cosine_diff: Their largest cosine difference.
    """

    def __init__(
        self,
        op: Op,
        implementation: Implementation,
        dtype: str,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        self.op = op
        self.implementation = implementation
        self.dtype = dtype
        self.format = DTYPES[dtype]
        self.bitwise = implementation.bitwise
        self.max_ulps = 0.0
        self.cosine_diff = 0.0
        self._wrap = wrap

    def inputs(self, case: Case) -> Inputs:
        """See :class:`Runner`."""
        inputs = self.op.draw(case, np.random.default_rng(case.seed))
        self.op.within(inputs, self.format.max_finite)
        return {name: self.round(x) if name in self.op.activations else x for name, x in inputs.items()}

    def round(self, x: np.ndarray) -> np.ndarray:
        """See :class:`Runner`."""
        return self.format.round(x)

    def __call__(self, inputs: Inputs, layout: str = "contiguous") -> Outputs:
        """See :class:`Runner`; ``layout`` applies to the arguments named in :attr:`Op.strided`."""
        return self._run(self.implementation, inputs, layout, self._wrap)

    def other(self, op: str) -> OpRunner:
        """See :class:`Runner`."""
        row = OPS[op].implementations[self.implementation.name]
        return OpRunner(OPS[op], row, self.dtype)

    def judged(self, inputs: Inputs, outputs: Outputs, expected: Mapping[str, Output] | None = None) -> Verdict:
        """The verdict on one run's outputs: the first that fails, else the one with the largest error in ulps.

        The base of a float32 PyTorch row would be itself, so that row is held to the a-priori bound alone. In reduced
        precision PyTorch rounds between its steps, which no bound of a single accumulation covers; there its own
        error is the base, and the cosine and the non-finite positions decide.
        """
        expected = expected or self.op.reference(**inputs)
        itself = self.implementation.name == "torch" and self.dtype == "f32" and self._wrap is None
        base: Outputs = {}
        if not itself and any(output.dtype in ("act", "f32") for output in expected.values()):
            base = self._run(self.op.implementations["torch"], inputs, "contiguous", None)
        verdicts = []
        for name, output in expected.items():
            if output.dtype == "exact":
                verdicts.append(judge_exact(outputs[name], output.value))
            elif output.dtype == "choice":
                verdicts.append(judge_choice(outputs[name], output.value))
            else:
                verdicts.append(
                    judge(
                        outputs[name],
                        output.value,
                        base.get(name),
                        self.dtype,
                        magnitude=output.magnitude,
                        reduction=output.reduction,
                        rounded=output.rounded,
                        operands=output.operands,
                        out_dtype="f32" if output.dtype == "f32" else None,
                    )
                )
        worst = min(verdicts, key=lambda verdict: (verdict.ok, -verdict.max_ulps))
        self.max_ulps = max(self.max_ulps, *(verdict.max_ulps for verdict in verdicts))
        self.cosine_diff = max(self.cosine_diff, *(verdict.cosine_diff for verdict in verdicts))
        return worst

    def judge(self, inputs: Inputs, outputs: Outputs) -> str:
        """See :class:`Runner`."""
        return self.judged(inputs, outputs).reason

    def against(self, inputs: Inputs, expected: Mapping[str, Output] | None = None) -> str:
        """See :class:`Runner`."""
        return self.judged(inputs, self(inputs), expected).reason

    def same(self, inputs: Inputs, other: Outputs) -> str:
        """See :class:`Runner`."""
        outputs = self(inputs)
        if not self.bitwise:
            return self.judged(inputs, outputs).reason
        return _different(outputs, other, "other bits in")

    def strided(self, case: Case) -> str:
        """Checks the row's policy on non-contiguous arguments: the contiguous result or a ``ValueError``.

        The call stands between two with the same shapes and contiguous arguments, which must give the same bits.
        """
        inputs = self.inputs(case)
        contiguous = self(inputs)
        refusing = {"refused": self.op.strided, "copied": self.op.mutates}.get(self.implementation.strided, ())
        refused = any(
            not lay_out(self._tensor(name, inputs[name]), case.layout).is_contiguous()
            for name in self.op.strided
            if name in refusing and inputs[name] is not None
        )
        try:
            outputs = self(inputs, case.layout)
        except ValueError as error:
            reason = "" if refused else f"{case.layout} arguments refused: {error}"
        else:
            if refused:
                reason = f"{case.layout} arguments are declared refused but ran"
            elif self.implementation.strided == "handled":
                reason = self.judged(inputs, outputs).reason
            else:
                reason = _different(outputs, contiguous, f"{case.layout} arguments change")
        return reason or _different(self(inputs), contiguous, f"after a call with {case.layout} arguments, another")

    def _tensor(self, name: str, value: Any) -> Any:
        """A fresh torch tensor of an array argument, activations in the dtype under test; other arguments as is."""
        import torch

        if not isinstance(value, np.ndarray):
            return value
        tensor = torch.from_numpy(np.array(value, order="C"))
        if name not in self.op.activations:
            return tensor
        return tensor.to({"bf16": torch.bfloat16, "f16": torch.float16}.get(self.dtype, torch.float32))

    def arguments(self, inputs: Inputs, layout: str = "contiguous") -> dict[str, Any]:
        """Fresh torch tensors of drawn inputs, those named in :attr:`Op.strided` laid out as ``layout`` says."""
        arguments = {name: self._tensor(name, value) for name, value in inputs.items()}
        for name in self.op.strided:
            if arguments[name] is not None:
                arguments[name] = lay_out(arguments[name], layout)
        return arguments

    def outputs(self, arguments: Mapping[str, Any], result: Any) -> Outputs:
        """Every output of a call: what it returned and what it wrote in place."""
        return {name: _array(arguments[name]) for name in self.op.mutates} | {self.op.result: _array(result)}

    def _run(
        self,
        implementation: Implementation,
        inputs: Inputs,
        layout: str,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None,
    ) -> Outputs:
        function = self.op.load(implementation, self.dtype, head_dim_of(inputs), wrap)
        arguments = self.arguments(inputs, layout)
        return self.outputs(arguments, function(*arguments.values()))


def head_dim_of(inputs: Inputs) -> int:
    """head_dim of drawn inputs; any number where the op has no heads."""
    return int(inputs["cache"].shape[-1]) if "cache" in inputs else 64


def _different(outputs: Outputs, expected: Outputs, what: str) -> str:
    """One line naming the first output that has other bits than expected; empty when there is none."""
    for name, values in expected.items():
        if reason := judge_exact(outputs[name], values).reason:
            return f"{what} {name}: {reason}"
    return ""


def _array(result: Any) -> np.ndarray:
    """A result as float32 or int32 NumPy array, bf16 widened."""
    import torch

    if isinstance(result, torch.Tensor):
        return result.float().numpy() if result.is_floating_point() else result.numpy()
    return np.asarray(result)
