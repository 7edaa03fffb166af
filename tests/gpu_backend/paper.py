"""What the figures of the back end come to on paper: cycles of a tile, and ceilings from them.

    python tests/gpu_backend/paper.py [--renew]

prints the back end's table and this one; --renew writes both into docs/metal-fused.md. Needs the
ziglang package.

Costs are what others have measured of Apple's GPUs, for one of a core's four schedulers, which
sends one instruction of 32 lanes a cycle. The instructions are those of the stand-in's code for a
tile that no mask cuts. No figure here was measured on Apple hardware by us.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

from gpu_backend import (
    CORE_REGISTERS,
    HEAD_DIMS,
    ROOT,
    Clang,
    CodeBlock,
    Tiling,
    compiled,
    table,
    tile_loop,
    zig_clang,
)

UNCUT = ("is_seen_whole", "is_full", "all_are_live")  # what is true of most tiles
STAGING = "stage_rows"
SCHEDULERS = 4  # of a core
PRODUCT = 16  # cycles of 8 x 8 x 8: 512 fma on 32 lanes
REACHED = 101.7 / 128  # of a core's fma a cycle, by the best matrix product that was measured
CHIP_BYTES = 64  # of threadgroup memory, a cycle of a core
CHIP_LATENCY = 55  # cycles from a load from threadgroup memory to its use
DEVICE_LATENCY = 340  # the same where the last-level cache answers
MOST_SIMDGROUPS = 24  # of a core: more gain nothing
THREADGROUP_MEMORY = 60 * 1024  # of a core
STAGED_ARRAYS = 2  # for whose loads a tile waits
CHIP_WAIT = "; waits for threadgroup memory"
PAGE = ROOT / "docs/metal-fused.md"
# Cycles of one instruction; any other is one cycle.
CYCLES = (
    (r"s_waitcnt|s_clause|s_nop|s_inst_prefetch|; BARRIER|; ADDRESS|; PRODUCT|; waits", 0),
    (r"; EXP2|v_mul_lo|v_mul_hi|v_mad_[iu]64|v_mad_u64", 4),
    (r"v_rcp", 10.5),
    (r"v_add_co|v_sub_co|v_lshlrev_b64|v_ashrrev_i64", 2),  # halves of 64 bits; whole: 4
)
FLOAT = re.compile(r"; (EXP2|FMA|SHUFFLE)|v_\w+_f32|ds_|global_")
ON_CHIP = re.compile(r"ds_(?:read|write)(2?)(?:st64)?_b(\d+)")
ONCE_A_RUN = re.compile(r"global_store")  # the end of a run of 512 keys


@dataclass(frozen=True)
class Tile:
    """What a simdgroup does for one tile."""

    products: int
    float_cycles: float  # but for the products
    integer_cycles: float
    staging_cycles: float
    chip_bytes: int  # threadgroup memory read and written
    chip_waits: int  # for what threadgroup memory was asked for
    simdgroups: int  # that a core holds


def cycles(line: str) -> float:
    """Return how long one scheduler is busy with an instruction."""
    return next((cost for pattern, cost in CYCLES if re.match(pattern, line)), 1)


def chip_bytes(line: str) -> float:
    """Return what an instruction moves to or from threadgroup memory, for 32 lanes."""
    found = ON_CHIP.match(line)
    return 32 * int(found[2]) // 8 * (2 if found[1] else 1) if found else 0


def tile_sum(blocks: list[CodeBlock], rolled: int, count: Callable[[str], float]) -> float:
    """Add up the instructions of one turn of the loop over tiles.

    rolled: the turns that loops with products inside take. Loops without products are for values
    that are not finite, and not entered.
    """
    outer = tile_loop(blocks)
    within = {block.loops[-1] for block in blocks if outer in block.loops[:-1]}
    inner = {
        block.loops[-1]
        for block in blocks
        if block.loops and any("PRODUCT" in line for line in block.lines)
    } & within
    total = 0.0
    for block in blocks:
        loop = block.loops[-1] if block.loops else ""
        if loop == outer and any(ONCE_A_RUN.match(line) for line in block.lines):
            continue
        turns = 1 if loop == outer else rolled if loop in inner else 0
        total += turns * sum(count(line) for line in block.lines)
    return total


def with_marked_waits(blocks: list[CodeBlock]) -> list[CodeBlock]:
    """Return the code with a mark where it waits for what threadgroup memory was asked for."""
    asked = False
    marked = []
    for block in blocks:
        lines = []
        for line in block.lines:
            if asked and "lgkmcnt" in line:
                lines.append(CHIP_WAIT)
                asked = False
            asked = asked or line.startswith("ds_read")
            lines.append(line)
        marked.append(CodeBlock(lines, block.loops))
    return marked


def held_simdgroups(kernel: str, tiling: Tiling, registers: int) -> int:
    """Return how many simdgroups, of whole threadgroups, a core holds."""
    simdgroups = tiling.simdgroups(kernel)
    groups = min(
        CORE_REGISTERS // (32 * registers * simdgroups),
        THREADGROUP_MEMORY // tiling.threadgroup_bytes(kernel),
    )
    return min(groups * simdgroups, MOST_SIMDGROUPS)


def tile_of(kernel: str, head_dim: int, clang: Clang) -> Tile:
    """Count one kernel's tile."""
    tiling = Tiling.of(head_dim)
    figures, blocks = compiled(kernel, head_dim, clang, UNCUT)
    _, without = compiled(kernel, head_dim, clang, (*UNCUT, STAGING))
    blocks = with_marked_waits(blocks)
    rolled = tiling.blocks(kernel) if kernel in ("dq", "dkv") else 1

    def count(value: Callable[[str], float]) -> float:
        return tile_sum(blocks, rolled, value)

    return Tile(
        products=round(count(lambda line: "PRODUCT" in line)),
        float_cycles=count(lambda line: cycles(line) if FLOAT.match(line) else 0),
        integer_cycles=count(lambda line: 0 if FLOAT.match(line) else cycles(line)),
        staging_cycles=count(cycles) - tile_sum(without, rolled, cycles),
        chip_bytes=round(count(chip_bytes)),
        chip_waits=round(count(lambda line: line == CHIP_WAIT)),
        simdgroups=held_simdgroups(kernel, tiling, figures.registers),
    )


@dataclass(frozen=True)
class Ceilings:
    """Parts of a GPU's peak that a kernel cannot pass, from its tile."""

    issue: float  # M1 and M2: one instruction a cycle
    side_by_side: float  # M3 and M4: integer instructions beside the others
    chip: float  # bytes of threadgroup memory
    latency: float

    @classmethod
    def of(cls, tile: Tile) -> Ceilings:
        """Compute them."""
        products = PRODUCT * tile.products
        alone = products + tile.float_cycles + tile.integer_cycles
        waits = STAGED_ARRAYS * DEVICE_LATENCY + tile.chip_waits * CHIP_LATENCY
        return cls(
            issue=products / alone,
            side_by_side=products / max(products + tile.float_cycles, tile.integer_cycles),
            chip=min(1, products / (tile.chip_bytes / CHIP_BYTES * SCHEDULERS)),
            latency=min(1, tile.simdgroups / SCHEDULERS * products / (alone + waits)),
        )

    def share(self, issue: float) -> float:
        """Return the lowest of all."""
        return min(issue, self.chip, self.latency, REACHED)


def paper_table(clang: Clang) -> list[str]:
    """Return the tiles and their ceilings as rows of a Markdown table."""
    rows = [
        "| kernel | cycles of products | staging | other float | other integer | simdgroups a core "
        "| issue: M1, M2 | M3, M4 | threadgroup memory | latency | **M1, M2** | **M3, M4** |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kernel in ("forward", "dq", "dkv"):
        for head_dim in HEAD_DIMS:
            tile = tile_of(kernel, head_dim, clang)
            top = Ceilings.of(tile)
            shares = (top.issue, top.side_by_side, top.chip, top.latency)
            last = (top.share(top.issue), top.share(top.side_by_side))
            rows.append(
                f"| {kernel} {head_dim} | {PRODUCT * tile.products} | {tile.staging_cycles:.0f} "
                f"| {tile.float_cycles:.0f} | {tile.integer_cycles:.0f} | {tile.simdgroups} "
                + "".join(f"| {100 * share:.0f} % " for share in (*shares, *last))
                + "|"
            )
    return rows


def renewed(text: str, name: str, rows: list[str]) -> str:
    """Return a document with the table under its mark replaced."""
    mark = f"<!-- {name}, of tests/gpu_backend -->\n"
    before, _, after = text.partition(mark)
    if not after:
        raise ValueError(f"the document has no line {mark.strip()}")
    table = re.match(r"\n*(?:\|.*\n)*", after)[0]  # type: ignore[index]
    rest = after[len(table) :].lstrip("\n")
    return before + mark + "\n" + "\n".join(rows) + "\n\n" + rest


def tables(clang: Clang) -> dict[str, list[str]]:
    """Return both tables by their names."""
    return {"registers": table(clang), "cycles": paper_table(clang)}


def main() -> None:
    """Print the tables, or write them into the page."""
    found = tables(zig_clang())
    if sys.argv[1:] == ["--renew"]:
        text = PAGE.read_text(encoding="utf-8")
        for name, rows in found.items():
            text = renewed(text, name, rows)
        PAGE.write_text(text, encoding="utf-8")
    else:
        print("\n\n".join("\n".join(rows) for rows in found.values()))


if __name__ == "__main__":
    main()
