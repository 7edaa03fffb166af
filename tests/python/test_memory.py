"""What does not fit is refused before anything is allocated or written."""

import threading

import forge
import numpy as np
import pytest
from forge import _memory


@pytest.fixture
def little_memory(monkeypatch):
    """100 MiB are left; calls of any size ask."""
    monkeypatch.setattr(_memory, "available_memory", lambda: 100 << 20)


def wide(rows, dtype="f4"):
    """[1, rows, 1, 1], one element in memory."""
    return np.broadcast_to(np.ones((1, 1, 1, 1), dtype), (1, rows, 1, 1))


def test_outputs_and_row_statistics_count_together(little_memory):
    x = wide(10 << 20)  # out, row_max and row_sum take 40 MiB each
    with pytest.raises(MemoryError, match=r"of 125829120 in all, 104857600 are available"):
        forge.attention(x, x, x)


def test_p_is_refused_with_what_to_use_instead(little_memory):
    x = np.broadcast_to(np.float32(1), (1, 6000, 1, 1))
    with pytest.raises(MemoryError, match=r"^p of shape .* takes 144000000 .* kernel='fused'"):
        forge.attention(x, x, x, kernel="materialized")
    y = np.broadcast_to(np.float64(1), (1, 6000, 1, 1))
    with pytest.raises(MemoryError, match=r"kernel='fused' needs no p \(in float32\)"):
        forge.attention(y, y, y, kernel="materialized")


def test_gradients_count_together(monkeypatch):
    x = wide(8 << 20)
    out, saved = forge.attention_forward(x, x, x, window=(0, 0))
    monkeypatch.setattr(_memory, "available_memory", lambda: 90 << 20)
    with pytest.raises(MemoryError, match=r"^dq of shape .* of 100663296 in all"):
        forge.attention_backward(out, saved)


def test_copies_of_inputs_count(little_memory):
    x = np.broadcast_to(np.ones(1, ">f4"), (1, 30 << 20, 1, 1))
    with pytest.raises(MemoryError, match=r"^a copy of q of shape"):
        forge.attention(x, x, x)


def test_a_refused_call_leaves_out_alone(little_memory):
    x = np.broadcast_to(np.float32(1), (1, 6000, 1, 1))
    out = np.full((1, 6000, 1, 1), 7, np.float32)
    with pytest.raises(MemoryError):
        forge.attention(x, x, x, kernel="materialized", out=out)
    assert (out == 7).all()


def test_a_batch_without_rows_is_no_way_around():
    x = np.zeros((2**40, 0, 1, 1), np.float32)
    assert forge.attention(x, x, x).shape == x.shape
    with pytest.raises(MemoryError, match="key ranges"):
        forge.attention(x, x, x, query_offset=0)


def test_the_least_limit_counts(monkeypatch):
    monkeypatch.setattr(_memory, "_physical_memory", lambda: 5)
    monkeypatch.setattr(_memory, "_cgroup_headroom", lambda: None)
    monkeypatch.setattr(_memory, "_address_space_headroom", lambda: 7)
    assert _memory.available_memory() == 5
    monkeypatch.setattr(_memory, "_cgroup_headroom", lambda: 3)
    assert _memory.available_memory() == 3


def test_cgroups_count_up_to_the_root_less_page_cache(monkeypatch, tmp_path):
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for folder, limit, used, cache in ((inner, "max", 40, 0), (inner.parent, "100", 90, 30)):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(str(used))
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
    names = ("memory.max", "memory.current")
    folders = [(folder, *names) for folder in (inner, inner.parent, tmp_path)]
    monkeypatch.setattr(_memory, "_cgroup_folders", lambda: folders)
    assert _memory._cgroup_headroom() == 40  # 100 - (90 - 30); no limit on the inner one


def test_the_compiled_backward_keeps_its_arrays_alive():
    """Another thread empties the dict while the call, without the GIL, still works on them."""
    x = np.random.default_rng(0).standard_normal((1, 1500, 2, 64)).astype(np.float32)
    rows = np.ones((1, 2, 1500), np.float32)
    options = {
        "causal": False,
        "window_left": -1,
        "window_right": -1,
        "scale": 1.0,
        "softcap": 0.0,
        "ranges": None,
        "kernel": "fused",
        "backend": "cpu",
        "cpu_target": "",
    }
    for _ in range(3):
        names = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")
        arrays = {name: x.copy() for name in names}
        arrays |= {"row_max": rows.copy(), "row_sum": rows.copy()}
        started = threading.Event()

        def call(arrays=arrays, started=started):
            started.set()
            forge._forge.attention_bwd(arrays, False, options)

        thread = threading.Thread(target=call)
        thread.start()
        started.wait()
        arrays.clear()
        junk = [np.full(x.shape, np.nan, np.float32) for _ in range(8)]
        thread.join()
        del junk
