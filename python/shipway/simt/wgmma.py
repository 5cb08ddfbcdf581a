"""Hopper's asynchronous products as the runtime takes them: Mojo writes them as inline assembly, in two forms."""

from __future__ import annotations

from shipway.errors import ShipwayError
from shipway.simt.ir import Call, Tokens

PRODUCT = "wgmma.mma_async"


def product(call: Call) -> tuple[str, Call]:
    """Returns the name in the table and the call with its operands in the order of ``Arguments`` in wgmma_ops.c.

    With A in shared memory the assembly has D, both descriptors, and the scales of D, A, B and whether A and B are
    transposed; with A in registers those four, the descriptor of B, the scales, whether B is transposed, and D.

    Raises:
        ShipwayError: The shape or the operands are of no kind that is simulated.
    """
    words = call.callee.replace("\\0A", " ").split()
    mnemonic = next(word for word in words if word.startswith(PRODUCT))
    shape, *types = mnemonic.removeprefix(f"{PRODUCT}.sync.aligned.").split(".")
    rows, _, rest = shape.removeprefix("m").partition("n")
    columns, _, depth = rest.partition("k")
    if (rows, depth) != ("64", "16"):
        raise ShipwayError(f"device IR: {mnemonic} is not simulated")
    operands = call.arguments
    held = int(columns) // 2
    zero = (["i32"], ["0"])
    if operands[0][0] == ["float"]:
        name = f"{PRODUCT}.{'.'.join(types)}"
        d, (a, b, *numbers) = operands[:held], operands[held:]
        registers = [zero] * 4
    else:
        name = f"{PRODUCT}.{'.'.join(types)} registers"
        registers, (b, *numbers), d = operands[:4], operands[4:-held], operands[-held:]
        numbers.insert(3, zero)
        a = (["i64"], ["0"])
    if len(numbers) != 5 or any(not value[0].lstrip("-").isdecimal() for _, value in numbers):
        raise ShipwayError(f"device IR: {mnemonic} with operands that are no numbers is not simulated")
    known: list[tuple[Tokens, Tokens]] = [(["i32"], value) for _, value in numbers]
    arguments = [(["i64"], [columns]), b, a, *known, *registers, *d]
    return name, Call(call.callee, True, call.returns, arguments)
