"""The compiled module checks everything again: no call into it crashes the process."""

from pathlib import Path

import forge
import numpy as np
import pytest
from scripts import run_script


def test_hostile_calls_are_refused_and_crash_nothing():
    done = run_script(f"""
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    import hostile
    hostile.main()
    """)
    assert done.stdout.splitlines() == ["done"], done.stdout


OPTIONS = {
    "causal": False,
    "window": (-1, -1),
    "scale": 1.0,
    "softcap": 0.0,
    "ranges": None,
    "kernel": "fused",
    "backend": "cpu",
    "cpu_target": "",
}


def test_errors_of_the_compiled_module_name_the_argument():
    q = np.zeros((1, 2, 1, 4), np.float32)
    rows = np.zeros((1, 1, 2), np.float32)
    for error, name, given in [
        (TypeError, "q", {"q": None}),
        (TypeError, "k", {"k": q.astype(np.float64), "v": q.astype(np.float64)}),
        (TypeError, "v", {"v": q.astype(np.float16)}),
        (ValueError, "v", {"v": q[:, :1]}),
        (ValueError, "o", {"o": q[..., :3]}),
        (ValueError, "row_sum", {"row_sum": rows[..., :1]}),
    ]:
        good = {
            "q": q,
            "k": q,
            "v": q,
            "o": q.copy(),
            "row_max": rows.copy(),
            "row_sum": rows.copy(),
        }
        with pytest.raises(error, match=rf"^{name}\b"):
            forge._forge.run("forward", good | given, False, OPTIONS)


def test_a_second_result_is_the_fused_familys_alone():
    """The materialized kernels would leave it as it was."""
    q, rows = np.ones((1, 2, 1, 4), np.float32), np.zeros((1, 1, 2), np.float32)
    rounded = np.full_like(q, 7)
    arrays = {"q": q, "k": q, "v": q, "o": q.copy(), "row_max": rows, "row_sum": rows.copy()}
    arrays |= {"p": np.zeros((1, 1, 2, 2), np.float32), "rounded": rounded}
    with pytest.raises(ValueError, match=r"^rounded must be left out for kernel='materialized'"):
        forge._forge.run("forward", arrays, False, OPTIONS | {"kernel": "materialized"})
    assert (rounded == 7).all()
    half = dict.fromkeys("qkv", q.astype(np.float16)) | {"rounded": rounded.astype(np.float16)}
    forge._forge.run("forward", arrays | half | {"o": rounded}, False, OPTIONS)
    assert (rounded == 1).all()
    assert (half["rounded"] == 1).all()


def test_refused_raw_calls_write_nothing():
    q = np.ones((1, 2, 1, 4), np.float32)
    o, rows = np.full_like(q, 7), np.full((1, 1, 2), 7, np.float32)
    options = OPTIONS | {"ranges": np.array([[0, 0, 3]], np.int64)}  # one key too many
    arrays = {"q": q, "k": q, "v": q, "o": o, "row_max": rows, "row_sum": rows.copy()}
    with pytest.raises(ValueError, match="key_end"):
        forge._forge.run("forward", arrays, False, options)
    assert (o == 7).all()
    assert (rows == 7).all()
