"""What a GPU's compiler makes of the fused kernels stays within bounds, and docs say what it is."""

import os

import gpu_backend
import paper
import pytest
from gpu_backend import HEAD_DIMS, KERNELS, Tiling
from msl_check import Clang

CASES = [(kernel, head_dim) for kernel in KERNELS for head_dim in HEAD_DIMS]
STAGING = [case for case in CASES if case[0] != "decode"]
MOST_BRANCHES = 120
MOST_SCRATCH_OF_OPTIONS = 64
MOST_SCRATCH_OF_HALVES = 8


@pytest.fixture(scope="module")
def clang() -> Clang:
    """The compiler of the tables. Where it may be missing, FORGE_REQUIRE_METAL is not set."""
    try:
        return gpu_backend.zig_clang()
    except ImportError as missing:
        if os.environ.get("FORGE_REQUIRE_METAL"):
            raise
        pytest.skip(f"needs the ziglang package: {missing}")


@pytest.mark.parametrize(("kernel", "head_dim"), CASES)
def test_a_kernel_fits_into_the_registers(clang: Clang, kernel: str, head_dim: int) -> None:
    figures, _ = gpu_backend.compiled(kernel, head_dim, clang)
    assert figures.scratch == 0
    assert figures.registers <= Tiling.of(head_dim).registers(kernel)
    assert figures.products == Tiling.of(head_dim).products(
        kernel
    )  # all loops around them unrolled
    assert figures.branches <= MOST_BRANCHES
    assert figures.divisions == 0


@pytest.mark.parametrize("option", ["has_softcap", "has_window", "accumulate"])
@pytest.mark.parametrize(("kernel", "head_dim"), CASES)
def test_other_options_want_little_more(
    clang: Clang, kernel: str, head_dim: int, option: str
) -> None:
    switches = (*gpu_backend.SWITCHES, option)
    figures, _ = gpu_backend.compiled(kernel, head_dim, clang, switches=switches)
    assert figures.scratch <= MOST_SCRATCH_OF_OPTIONS
    assert figures.products == Tiling.of(head_dim).products(kernel)
    assert figures.branches <= MOST_BRANCHES


@pytest.mark.parametrize("halves", [gpu_backend.HALVES[:-1], gpu_backend.HALVES])
@pytest.mark.parametrize(("kernel", "head_dim"), CASES)
def test_half_precision_wants_little_more(
    clang: Clang, kernel: str, head_dim: int, halves: tuple[str, ...]
) -> None:
    switches = (*gpu_backend.SWITCHES, *halves)
    figures, _ = gpu_backend.compiled(kernel, head_dim, clang, switches=switches)
    assert figures.scratch <= MOST_SCRATCH_OF_HALVES
    assert figures.products == Tiling.of(head_dim).products(kernel)
    assert figures.branches <= MOST_BRANCHES
    assert figures.divisions == 0
    if kernel != "decode":
        assert figures.loads >= Tiling.of(head_dim).staging_turns(kernel)


@pytest.mark.parametrize(("kernel", "head_dim"), STAGING)
def test_no_load_is_waited_for_before_the_next_is_sent(
    clang: Clang, kernel: str, head_dim: int
) -> None:
    figures, _ = gpu_backend.compiled(kernel, head_dim, clang)
    assert figures.loads >= Tiling.of(head_dim).staging_turns(kernel)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_decode_has_several_loads_on_their_way(clang: Clang, head_dim: int) -> None:
    figures, _ = gpu_backend.compiled("decode", head_dim, clang)
    assert figures.loads >= 8


@pytest.mark.parametrize(("kernel", "head_dim"), STAGING)
def test_staging_costs_a_fifth_of_the_products_at_most(
    clang: Clang, kernel: str, head_dim: int
) -> None:
    tile = paper.tile_of(kernel, head_dim, clang)
    assert tile.products == Tiling.of(head_dim).products_a_tile(kernel)
    assert 0 < tile.staging_cycles <= paper.PRODUCT * tile.products / 5


@pytest.mark.parametrize(("kernel", "head_dim"), STAGING)
def test_half_of_the_peak_is_possible_on_paper(clang: Clang, kernel: str, head_dim: int) -> None:
    top = paper.Ceilings.of(paper.tile_of(kernel, head_dim, clang))
    least = 0.5 if kernel == "forward" else 0.4
    assert top.share(top.issue) >= least
    assert top.share(top.side_by_side) >= least


def test_docs_have_the_tables(clang: Clang) -> None:
    text = paper.PAGE.read_text(encoding="utf-8")
    for name, rows in paper.tables(clang).items():
        found = paper.renewed(text, name, rows)
        assert found == text, f"python tests/gpu_backend/paper.py --renew: {name} of {paper.PAGE}"


def test_a_spill_and_a_rolled_loop_are_seen(clang: Clang, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are those of the text: fewer registers do not do, nor does a loop left alone."""
    monkeypatch.setattr(gpu_backend, "REGISTERS", 64)
    assert gpu_backend.compiled("forward", 64, clang)[0].scratch > 0
    whole = gpu_backend.source
    monkeypatch.setattr(
        gpu_backend,
        "source",
        lambda *given: whole(*given).replace("unroll(full)", "unroll(disable)"),
    )
    figures, _ = gpu_backend.compiled("forward", 64, clang)
    assert figures.products < Tiling.of(64).products("forward")
