"""Problems for attention in a framework's Metal stream, and the check of the texts it is given."""

import sys
from pathlib import Path

# Sizes, and options. Together they take every switch of the kernels, on and off.
CASES = {
    "plain": ({"B": 2, "Tq": 37, "Tk": 45, "H": 2, "Hkv": 2, "hd": 32}, {}),
    "causal, grouped heads, channels left over": (
        {"B": 1, "Tq": 66, "Tk": 70, "H": 6, "Hkv": 2, "hd": 20},
        {"causal": True},
    ),
    "everything at once, no four channels aligned": (
        {"B": 2, "Tq": 41, "Tk": 83, "H": 4, "Hkv": 1, "hd": 33},
        {"causal": True, "window": 19, "softcap": 3.0, "scale": -0.4},
    ),
    "dead rows": (
        {"B": 3, "Tq": 40, "Tk": 36, "H": 2, "Hkv": 1, "hd": 32},
        {
            "causal": True,
            "window": (7, 2),
            "query_offset": [-9, 0, 30],
            "key_start": [0, 5, 36],
            "key_end": [36, 20, 36],
        },
    ),
    "several simdgroups a row": (
        {"B": 1, "Tq": 35, "Tk": 40, "H": 2, "Hkv": 1, "hd": 128},
        {"causal": True},
    ),
    "decode": (
        {"B": 2, "Tq": 1, "Tk": 1100, "H": 8, "Hkv": 2, "hd": 64},
        {"causal": True, "query_offset": [1099, 700], "key_end": [1100, 701]},
    ),
}
# Every kernel once.
DIALECT_CASES = {name: CASES[name] for name in ("plain", "decode")}


def check_dialect(texts):
    """Hold the texts to what Apple's compiler takes (tests/dialect)."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dialect"))
    from msl_check import Clang, check

    clang = Clang()
    assert texts
    for text in texts:
        assert not (problems := check(text, clang)), "\n".join(map(str, problems))
