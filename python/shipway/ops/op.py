"""What an op is: the data every check, benchmark and table reads.

An op's callable takes the values of :attr:`Op.draw`'s dict in order. Inside a check, activations are float32 arrays
that hold only values of the dtype under test; the runner (``shipway.numerics.check``) converts them on the way in
and out, so references and properties never see a storage format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from shipway.signature import SIGNATURES, check

Inputs = dict[str, Any]
Outputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class Dim:
    """One drawn integer of a shape: any value of ``low..high``, the ``special`` ones far more often.

    Shrinking goes towards ``low``. ``static`` marks a value that compiled implementations fix at compile time: only
    the special values are drawn, so that few shapes are compiled.
    """

    low: int
    high: int
    special: tuple[int, ...] = ()
    static: bool = False


@dataclass(frozen=True)
class Case:
    """One drawn case, printable and parseable as a line: ``T=3 K=576 seed=0 scale=1 distribution=normal ...``.

    Attributes:
        dims: Value of every :class:`Dim` of the op.
        seed: Seed of the NumPy generator that fills the arrays.
        scale: Factor on the op's main input.
        distribution: How the main input is filled (``shipway.ops.data.fill``).
        layout: Memory layout of the arguments named in :attr:`Op.strided` (``shipway.ops.data.LAYOUTS``).
    """

    dims: Mapping[str, int]
    seed: int = 0
    scale: float = 1.0
    distribution: str = "normal"
    layout: str = "contiguous"

    def __str__(self) -> str:
        dims = " ".join(f"{name}={value}" for name, value in self.dims.items())
        return (
            f"{dims} seed={self.seed} scale={self.scale:g} distribution={self.distribution} layout={self.layout}"
        ).strip()

    @classmethod
    def parse(cls, line: str) -> Case:
        """Reads what ``str(case)`` printed.

        Raises:
            ValueError: A word is not ``name=value``, or a value is not a number where one is needed.
        """
        dims: dict[str, int] = {}
        other: dict[str, Any] = {}
        for word in line.replace(",", " ").split():
            name, equals, value = word.partition("=")
            if not equals:
                raise ValueError(f"{word!r} is not name=value")
            if name in dims or name in other:
                raise ValueError(f"{name} is given twice")
            try:
                if name in ("distribution", "layout"):
                    other[name] = value
                elif name == "scale":
                    other[name] = float(value)
                elif name == "seed":
                    other[name] = int(value)
                else:
                    dims[name] = int(value)
            except ValueError:
                raise ValueError(f"{word!r}: {value!r} is not a number") from None
        return cls(dims, **other)

    def with_dims(self, **changed: int) -> Case:
        """The same case with some dims changed."""
        return replace(self, dims={**self.dims, **changed})


@dataclass(frozen=True)
class Output:
    """A float64 reference of one output.

    Attributes:
        value: float64, or int32 ids, or a mask of ids.
        dtype: ``"act"`` (the dtype under test), ``"f32"``, ``"exact"`` (equal bit for bit) or ``"choice"`` (``value
            [R, V]`` says which ids are right in each row).
        magnitude: ``sum|a||b|`` per element, for the a-priori error bound.
        reduction: Length K of the longest reduction.
        rounded: Root of the summed squares of what is held in the activation dtype between two reductions, as it
            reaches each output: what its roundings, independent of each other, do to the output.
        operands: What rounding every operand of a product to tf32 does to the output at most, where that is not
            2^-10 of :attr:`magnitude`.
    """

    value: np.ndarray
    dtype: str
    magnitude: np.ndarray | None = None
    reduction: int = 1
    rounded: np.ndarray | None = None
    operands: np.ndarray | None = None


class Format(Protocol):
    """What a property may ask of the dtype under test."""

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""

    @property
    def max_finite(self) -> float:
        """Largest finite value."""

    @property
    def underflow(self) -> float:
        """Absolute error that underflow may cause."""

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of one rounding."""


class Runner(Protocol):
    """One implementation of one op in one dtype, as a property sees it. Every method works on float32 arrays."""

    dtype: str
    format: Format
    bitwise: bool

    def inputs(self, case: Case) -> Inputs:
        """Draws the case's arguments; activations are rounded to the dtype."""

    def round(self, x: np.ndarray) -> np.ndarray:
        """Rounds values to the dtype under test, for inputs a property computes itself."""

    def __call__(self, inputs: Inputs) -> Outputs:
        """Runs the implementation on copies of the arguments; returns every output by name."""

    def other(self, op: str) -> Runner:
        """The same implementation's runner for another op of the catalogue."""

    def judge(self, inputs: Inputs, outputs: Outputs) -> str:
        """Judges outputs of a run on ``inputs`` against the op's reference; empty when they agree, else one line."""

    def against(self, inputs: Inputs, expected: Mapping[str, Output] | None = None) -> str:
        """Runs on ``inputs`` and judges the outputs against known values, the op's reference by default; empty when
        they agree, else one line."""

    def same(self, inputs: Inputs, other: Outputs) -> str:
        """Runs on ``inputs`` and compares with the outputs of another run that must agree: bitwise where the
        implementation claims it, else both only need to agree with the reference. Empty when they agree."""

    def strided(self, case: Case) -> str:
        """Checks the row's policy on non-contiguous arguments; empty when it holds, else one line."""


@dataclass(frozen=True)
class Property:
    """A fact that holds for every correct implementation.

    Attributes:
        name: Named after the behaviour.
        check: Returns an empty string when the fact holds for this case, else one line.
        examples: Cases that are always run: known traps, and those that once failed somewhere.
        pinned: Whether only the examples are run.
    """

    name: str
    check: Callable[[Runner, Case], str]
    examples: tuple[Case, ...] = ()
    pinned: bool = False


@dataclass(frozen=True)
class KnownFailure:
    """A foreign implementation's declared failure: it prints as KNOWN, and turns red once ``case`` passes.

    Attributes:
        property: Name of the property that fails (``"reference"`` for the verdict itself).
        reason: Why.
        case: A case on which it fails.
        dtypes: Dtypes it fails in.
    """

    property: str
    reason: str
    case: Case
    dtypes: tuple[str, ...]


ONCE, PER_HEAD_DIM = "once", "per head_dim"


@dataclass(frozen=True)
class Implementation:
    """One row of an op's table.

    Attributes:
        name: ``"torch"``, ``"mojo"``.
        make: ``(dtype, head_dim) -> callable`` on torch CPU tensors; compiles where the implementation compiles. The
            callable trusts its arguments: call it through :meth:`Op.load`.
        dtypes: Dtypes it runs.
        strided: Non-contiguous arguments are ``"handled"``, ``"copied"`` or ``"refused"`` (``ValueError``).
        bitwise: Whether a row's result is claimed independent, bit for bit, of the rows and sequences beside it.
        compiled: ``""``: nothing is; :data:`ONCE`: all sizes are symbolic; :data:`PER_HEAD_DIM`: static dims cost a
            compilation each.
        compilations: Compilations of this process so far, where other sizes than the static ones cost some.
        requires: Importable modules it needs.
        install: What pip installs to get these modules.
        alone: As :attr:`make`, compiling this op only, where :attr:`make` would compile others beside it.
        known: Declared failures; our own kernels have none.
        device: ``"cpu"``; ``"gpu"``, this machine's; ``"simulated"``, one whose time says nothing.
        absent: Says of a dtype, in one line, what part of a machine it needs that is not here; empty when nothing.
    """

    name: str
    make: Callable[[str, int], Callable[..., Any]]
    dtypes: tuple[str, ...]
    strided: str
    bitwise: bool
    compiled: str = ""
    compilations: Callable[[], int] | None = None
    requires: tuple[str, ...] = ()
    install: str = ""
    alone: Callable[[str, int], Callable[..., Any]] | None = None
    known: tuple[KnownFailure, ...] = ()
    device: str = "cpu"
    absent: Callable[[str], str] = lambda dtype: ""


@dataclass(frozen=True)
class Op:
    """One op of the catalogue.

    Attributes:
        name: The same in mojo/, graphs/, tests/ and bench/.
        summary: One line with the formula.
        dims: Shape grammar: every combination of values is a valid shape.
        distributions: Fills of the main input worth drawing.
        draw: ``(case, rng) -> arguments`` in call order, float32 or int32 arrays, scalars or ``None``.
        activations: Arguments held in the dtype under test; the rest stay float32 or int32.
        reference: ``(**arguments) -> outputs`` in float64, by definition.
        result: Name of the returned output.
        mutates: Arguments written in place, which are outputs too.
        strided: Arguments a caller may pass as non-contiguous views.
        scales: Factors on the main input within the op's documented range.
        within: ``(arguments, largest)``: makes smaller, in place, what would leave the finite numbers of the dtype
            under test, up to ``largest``, between two of the op's reductions.
        properties: Facts beside agreement with the reference.
        traps: Cases that always run against the reference: shapes on which implementations are known to fail.
        implementations: Rows; the row named ``"torch"`` is the verdict's ``base``.
    """

    name: str
    summary: str
    dims: Mapping[str, Dim]
    distributions: tuple[str, ...]
    draw: Callable[[Case, np.random.Generator], Inputs]
    activations: frozenset[str]
    reference: Callable[..., dict[str, Output]]
    result: str
    strided: tuple[str, ...]
    properties: tuple[Property, ...]
    implementations: Mapping[str, Implementation]
    mutates: tuple[str, ...] = ()
    traps: tuple[Case, ...] = ()
    scales: tuple[float, ...] = (1.0, 1e-4, 1e-2, 30.0, 1e4)
    within: Callable[[Inputs, float], None] = lambda arguments, largest: None

    def load(
        self,
        row: Implementation,
        dtype: str,
        head_dim: int,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> Callable[..., Any]:
        """Makes a row's callable, behind the check that every implementation shares: a wrong call is a ``ValueError``.

        Args:
            row: One of :attr:`implementations`.
            dtype: Dtype under test.
            head_dim: head_dim of the heads, for the ops that have some.
            wrap: Replaces the row's callable behind the check by ``wrap(callable)``, to plant a defect.
        """
        function = row.make(dtype, head_dim)
        if wrap is not None:
            function = wrap(function)

        def call(*arguments: Any) -> Any:
            made_for = head_dim if "cache" in SIGNATURES[self.name] else None
            check(self.name, dtype, arguments, head_dim=made_for, strided=row.strided)
            return function(*arguments)

        return call
