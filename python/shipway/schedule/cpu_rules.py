"""dlight rules for CPUs: what TVM's own lack is a schedule for products of matrices.

A product is recognised by its accesses, not by its name: axes of both operands are the batch, axes of one are its rows
or columns. Stages before it are inlined or become its packing, stages after it are computed on each tile. All sums are
in the dtype of the product's stage, which for this project is float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from tvm import s_tir, tirx
from tvm.s_tir.dlight.cpu.base import CPUScheduleRule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target
from tvm.target.codegen import llvm_get_vector_width

_FEW_ROWS = 8  # rows that a GEMV keeps in registers
_TILE_ROWS, _TILE_VECTORS = 8, 2  # 16 accumulators: enough to hide the latency of a fused multiply-add


@dataclass(frozen=True)
class _Product:
    """A sum of products over one axis; the axes as positions among the block's iterators."""

    block: SBlockRV
    before: list[SBlockRV]
    after: list[SBlockRV]
    batch: list[int]
    rows: list[int]
    columns: list[int]
    depth: int
    extents: list[int | tirx.Expr]
    inner_depth: bool  # the second operand is contiguous along the sum


def _lanes(target: Target) -> int:
    """Float32 elements of a vector register."""
    return max(4, llvm_get_vector_width(target) // 32)


def _static(extent: object) -> int | None:
    return int(extent) if isinstance(extent, int | tirx.IntImm) else None


def _blocks(sch: s_tir.Schedule) -> list[SBlockRV]:
    return sch.get_child_blocks(sch.get_sblock("root"))


def _is_reduction(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    return any(axis.iter_type == tirx.IterVar.CommReduce for axis in sch.get(block).iter_vars)


def _product(sch: s_tir.Schedule) -> _Product | None:
    """Finds the one product of a function."""
    blocks = _blocks(sch)
    reductions = [index for index, block in enumerate(blocks) if _is_reduction(sch, block)]
    if len(reductions) != 1:
        return None
    at = reductions[0]
    stage = sch.get(blocks[at])
    if len(stage.reads) != 2 or len(stage.writes) != 1:
        return None
    axes = stage.iter_vars
    used = [[any(index.min.same_as(axis.var) for index in read.region) for axis in axes] for read in stage.reads]
    depth = [i for i, axis in enumerate(axes) if axis.iter_type == tirx.IterVar.CommReduce]
    spatial = [i for i in range(len(axes)) if i not in depth]
    if len(depth) != 1 or not all(used[operand][depth[0]] for operand in (0, 1)):
        return None
    groups: dict[tuple[bool, bool], list[int]] = {(True, True): [], (True, False): [], (False, True): []}
    for i in spatial:
        kind = (used[0][i], used[1][i])
        if kind not in groups:  # an extent of one that no operand mentions
            kind = (True, False)
        groups[kind].append(i)
    columns = groups[False, True]
    last = stage.reads[1].region[-1].min
    if len(columns) != 1 or spatial[-1] != columns[0]:
        return None
    return _Product(
        blocks[at],
        blocks[:at],
        blocks[at + 1 :],
        groups[True, True],
        groups[True, False],
        columns,
        depth[0],
        [_static(axis.dom.extent) or axis.dom.extent for axis in axes],
        inner_depth=last.same_as(axes[depth[0]].var),
    )


def _count(product: _Product, axes: list[int]) -> int | None:
    """How many iterations the axes have together, if that is known."""
    total = 1
    for axis in axes:
        extent = _static(product.extents[axis])
        if extent is None:
            return None
        total *= extent
    return total


def _inline(sch: s_tir.Schedule, blocks: list[SBlockRV]) -> None:
    for block in blocks:
        sch.compute_inline(block)


def _merge_after(sch: s_tir.Schedule, blocks: list[SBlockRV]) -> SBlockRV | None:
    """Inlines all but the last of what follows a product."""
    _inline(sch, blocks[:-1])
    return blocks[-1] if blocks else None


def _vector(sch: s_tir.Schedule, loop: LoopRV, lanes: int) -> tuple[LoopRV, LoopRV, int]:
    """Splits a loop of known extent by the largest vector that divides it."""
    width = gcd(_static(sch.get(loop).extent) or 1, lanes)
    outer, inner = sch.split(loop, [None, width])
    return outer, inner, width


class GEMV(CPUScheduleRule):
    """A product of few rows: each weight is read once, and its speed is that of memory."""

    def apply(self, func: tirx.PrimFunc, target: Target, _: bool) -> s_tir.Schedule | None:
        """Returns the schedule, or ``None`` if this is no product of at most 8 rows."""
        if not isinstance(func, tirx.PrimFunc) or not self.is_target_available(target):
            return None
        sch = s_tir.Schedule(func)
        product = _product(sch)
        if product is None:
            return None
        rows = _count(product, product.rows)
        if rows is None or rows > _FEW_ROWS:
            return None
        if product.inner_depth and _static(product.extents[product.depth]) is not None:
            return self._dots(sch, product, _lanes(target))
        if not product.inner_depth and _static(product.extents[product.columns[0]]) is not None:
            return self._sums(sch, product, _lanes(target))
        return None

    def _dots(self, sch: s_tir.Schedule, product: _Product, lanes: int) -> s_tir.Schedule:
        """The sum runs along contiguous memory: partial sums in the lanes of one vector per result."""
        _inline(sch, product.before)
        after = _merge_after(sch, product.after)
        block = product.block
        loops = sch.get_loops(block)
        column = loops[product.columns[0]]
        _, lane, _ = _vector(sch, loops[product.depth], lanes)
        partial = sch.rfactor(lane, len(product.extents) - 1)
        sch.set_scope(partial, 0, "local")

        # The final sums: tiles of columns in parallel.
        loops = sch.get_loops(block)
        columns = _static(product.extents[product.columns[0]])
        tile = next((n for n in (8, 6, 4) if columns is not None and columns % n == 0), None)
        tiles, column = sch.split(loops[product.columns[0]], [None, tile or 16])
        sch.reorder(
            *(loops[i] for i in product.batch), tiles, column, *(loops[i] for i in product.rows), loops[product.depth]
        )
        task = sch.fuse(*(loops[i] for i in product.batch), tiles)
        sch.parallel(task)
        # Where the last tile may be cut, each column is a loop of its own: its condition stays out of the sum.
        at = task if tile else column
        if after is not None:
            sch.reverse_compute_at(after, task)
            sch.set_scope(block, 0, "local")
        sch.compute_at(partial, at, preserve_unit_loops=True)
        inner = sch.get_loops(partial)[1 if tile else 2 :]
        lane_loop, *spatial, depth_loop = inner  # in the order of the factored block's iterators
        sch.reorder(depth_loop, *spatial, lane_loop)
        for loop in spatial:
            sch.unroll(loop)
        sch.vectorize(lane_loop)
        init = sch.decompose_reduction(partial, depth_loop)
        sch.vectorize(sch.get_loops(init)[-1])
        return sch

    def _sums(self, sch: s_tir.Schedule, product: _Product, lanes: int) -> s_tir.Schedule:
        """The columns are contiguous: one vector of results for several columns."""
        _inline(sch, product.before)
        after = _merge_after(sch, product.after)
        loops = sch.get_loops(product.block)
        tiles, column, _ = _vector(sch, loops[product.columns[0]], lanes * _TILE_VECTORS)
        sch.reorder(
            *(loops[i] for i in product.batch), tiles, loops[product.depth], *(loops[i] for i in product.rows), column
        )
        task = sch.fuse(*(loops[i] for i in product.batch), tiles)
        sch.parallel(task)
        local = sch.cache_write(product.block, 0, "local")
        sch.reverse_compute_at(local, task)
        if after is not None:
            sch.reverse_compute_at(after, task)
        _register_tile(sch, product.block, local, [loops[i] for i in product.rows], column, loops[product.depth], lanes)
        return sch


def _register_tile(
    sch: s_tir.Schedule,
    block: SBlockRV,
    copy: SBlockRV,
    rows: list[LoopRV],
    column: LoopRV,
    depth: LoopRV,
    lanes: int,
) -> None:
    """Makes the loops under the sum straight-line vector code, and its clearing too."""
    vectors, lane, _ = _vector(sch, column, lanes)
    for loop in (*rows, vectors):
        sch.unroll(loop)
    sch.vectorize(lane)
    init = sch.decompose_reduction(block, depth)
    sch.vectorize(sch.get_loops(init)[-1])
    for loop in sch.get_loops(init)[1:-1]:
        if _static(sch.get(loop).extent) is not None:
            sch.unroll(loop)
    inner = sch.get_loops(copy)[-1]
    if _static(sch.get(inner).extent) is not None:
        _, lane, width = _vector(sch, inner, lanes)
        if width > 1:
            sch.vectorize(lane)


class GEMM(CPUScheduleRule):
    """A product of any number of rows: packed operands, a tile of results in registers, columns in parallel."""

    def apply(self, func: tirx.PrimFunc, target: Target, _: bool) -> s_tir.Schedule | None:
        """Returns the schedule, or ``None`` if this is no product."""
        if not isinstance(func, tirx.PrimFunc) or not self.is_target_available(target):
            return None
        sch = s_tir.Schedule(func)
        product = _product(sch)
        if product is None or len(product.rows) != 1:
            return None
        lanes = _lanes(target)
        (row,), (column,), block = product.rows, product.columns, product.block
        sizes = {row: _TILE_ROWS, column: lanes * _TILE_VECTORS}
        after = _merge_after(sch, product.after)
        sch.pad_einsum(block, [sizes.get(axis, 1) for axis in range(len(product.extents))])
        copies = sch.get_consumers(block)
        copy = copies[0] if copies else sch.cache_write(block, 0, "local")
        if copies and after is not None and sch.get(copy).name_hint != sch.get(after).name_hint:
            sch.compute_inline(copy)
            copy = after
        sch.set_scope(block, 0, "local")
        # Operands become packed copies: tiles of rows or columns, along the sum, innermost the tile.
        packs = [_pack(sch, block, operand, sizes[axis]) for operand, axis in ((0, row), (1, column))]

        loops = sch.get_loops(block)
        batch = [loops[axis] for axis in product.batch]
        row_tiles, rows = sch.split(loops[row], [None, _TILE_ROWS])
        column_tiles, columns = sch.split(loops[column], [None, sizes[column]])
        depth = loops[product.depth]
        sch.reorder(*batch, column_tiles, row_tiles, depth, rows, columns)
        task = sch.fuse(*batch, column_tiles)
        sch.parallel(task)
        sch.compute_at(packs[1], task)
        sch.reverse_compute_at(copy, row_tiles)
        _register_tile(sch, block, copy, [rows], columns, depth, lanes)
        pack_loops = sch.get_loops(packs[0])
        sch.parallel(sch.fuse(*pack_loops[: len(batch) + 1]) if batch else pack_loops[0])
        return sch


def _pack(sch: s_tir.Schedule, block: SBlockRV, operand: int, tile: int) -> SBlockRV:
    """Makes an operand ``[..., rows, depth]`` or ``[..., depth, columns]`` tiles; returns the stage that does.

    Inlines whatever else makes that operand.
    """
    buffer = sch.get(block).reads[operand].source
    maker = [p for p in sch.get_producers(block) if sch.get(p).writes[0].source.same_as(buffer)]
    if maker:
        stage = maker[0]
        _inline(sch, sch.get_producers(stage))
    else:
        stage = sch.cache_read(block, operand, "global")
    axes = sch.get(block).iter_vars
    depth = next(axis.var for axis in axes if axis.iter_type == tirx.IterVar.CommReduce)
    inner_depth = sch.get(block).reads[operand].region[-1].min.same_as(depth)

    def tiled(*index: tirx.Expr) -> list[tirx.Expr]:
        *outer, a, b = index
        position, along = (a, b) if inner_depth else (b, a)
        return [*outer, position // tile, along, position % tile]

    sch.transform_layout(stage, ("write", 0), tiled)
    return stage


class RowReduction(CPUScheduleRule):
    """Softmax and norms: everything about one row in one task."""

    def apply(self, func: tirx.PrimFunc, target: Target, _: bool) -> s_tir.Schedule | None:
        """Returns the schedule, or ``None`` if no stage reduces, or the last does."""
        if not isinstance(func, tirx.PrimFunc) or not self.is_target_available(target):
            return None
        sch = s_tir.Schedule(func)
        *before, last = _blocks(sch)
        if not any(_is_reduction(sch, block) for block in before) or _is_reduction(sch, last):
            return None
        loops = sch.get_loops(last)
        many = any(_static(sch.get(loop).extent) is None for loop in loops[:-1])
        row = sch.fuse(*loops[:-1]) if len(loops) > 2 else loops[0]
        for block in reversed(before):
            sch.compute_at(block, row, preserve_unit_loops=True)
        if many:
            sch.parallel(row)
        lanes = _lanes(target)
        for block in (*before, last):
            loop = sch.get_loops(block)[-1]
            if not _is_reduction(sch, block) and _static(sch.get(loop).extent) is not None:
                _, lane, width = _vector(sch, loop, lanes)
                if width > 1:
                    sch.vectorize(lane)
        return sch


class Elementwise(CPUScheduleRule):
    """Whatever maps elements to elements: one stage, vectors innermost, rows in parallel when there may be many."""

    def apply(self, func: tirx.PrimFunc, target: Target, _: bool) -> s_tir.Schedule | None:
        """Returns the schedule, or ``None`` if a stage reduces."""
        if not isinstance(func, tirx.PrimFunc) or not self.is_target_available(target):
            return None
        sch = s_tir.Schedule(func)
        blocks = _blocks(sch)
        if any(_is_reduction(sch, block) for block in blocks):
            return None
        last = blocks[-1]
        _inline(sch, blocks[:-1])
        loops = sch.get_loops(last)
        if not loops:
            return sch
        if _static(sch.get(loops[-1]).extent) is not None:
            _, lane, width = _vector(sch, loops[-1], _lanes(target))
            if width > 1:
                sch.vectorize(lane)
        if len(loops) > 1 and any(_static(sch.get(loop).extent) is None for loop in loops[:-1]):
            sch.parallel(sch.fuse(*loops[:-1]) if len(loops) > 2 else loops[0])
        return sch


CPU_RULES = (GEMV(), GEMM(), RowReduction(), Elementwise())
