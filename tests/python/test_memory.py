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
    z = y.astype(np.float32)
    assert (forge.attention(z, z, z, kernel="fused") == 1).all()


def test_gradients_count_together(monkeypatch):
    x = wide(8 << 20)
    out, saved = forge.attention_forward(x, x, x, window=(0, 0), backend="cpu")
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


GiB = 1 << 30


def headroom(root, groups, folders):
    """What is left by control groups whose files read like that: {folder: {file: content}}."""
    (root / "groups").write_text(groups)
    for folder, files in folders.items():
        at = root / "mount" / folder
        at.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if isinstance(content, dict):
                content = "\n".join(f"{key} {value}" for key, value in content.items())
            (at / name).write_text(f"{content}\n")
    return _memory._cgroup_headroom(root / "groups", root / "mount")


def v2(limit, used, **stat):
    return {"memory.max": limit, "memory.current": used, "memory.stat": {"anon": used, **stat}}


def v1(limit, used, **stat):
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    return dict(zip(names, (limit, used, stat), strict=True))


def test_the_cgroup_of_the_process_and_all_above_it_count(tmp_path):
    folders = {"a/b": v2("max", 40), "a": v2(100, 90), "c": v2(1, 1)}
    assert headroom(tmp_path, "0::/a/b\n", folders) == 10
    folders = {"a/b": v2(70, 65)}
    assert headroom(tmp_path, "0::/a/b\n", folders) == 5
    assert headroom(tmp_path, "0::/c/not/there\n", {}) == 0
    assert headroom(tmp_path, "0::/elsewhere\n", {}) is None


def test_page_cache_is_free_whether_active_or_not(tmp_path):
    """Weights that are mapped and read twice are active; the limit is full of them."""
    stat = {
        "anon": GiB,
        "file": 7 * GiB,
        "shmem": 0,
        "inactive_file": GiB // 2,
        "active_file": 6 * GiB,
        "unevictable": GiB // 2,  # of the file pages
    }
    left = headroom(tmp_path, "0::/job\n", {"job": v2(8 * GiB, 8 * GiB, **stat)})
    assert left == 6 * GiB + GiB // 2


def test_shared_and_locked_memory_is_not_free(tmp_path):
    """Both count as file, and cannot be given back."""
    stat = {"anon": 10, "file": 90, "shmem": 60, "inactive_anon": 70, "unevictable": 30}
    stat |= {"inactive_file": 0, "active_file": 0}
    assert headroom(tmp_path, "0::/job\n", {"job": v2(100, 100, **stat)}) == 0


def test_in_version_1_a_group_counts_the_cache_of_its_children(tmp_path):
    own = {"cache": 5, "inactive_file": 2, "active_file": 3}
    total = {"total_cache": 60, "total_inactive_file": 20, "total_active_file": 30}
    folders = {"memory/a": v1(100, 95, **own, **total), "cpu/a": v1(1, 1)}
    assert headroom(tmp_path, "7:cpu:/a\n4:memory:/a/b\n0::/\n", folders) == 100 - (95 - 50)


def test_cache_counted_late_leaves_no_more_than_the_limit(tmp_path):
    folders = {"job": v2(100, 30, inactive_file=25, active_file=10)}
    assert headroom(tmp_path, "0::/job\n", folders) == 100


def test_the_compiled_backward_keeps_its_arrays_alive():
    """Another thread empties the dict while the call, without the GIL, still works on them."""
    x = np.random.default_rng(0).standard_normal((1, 1500, 2, 64)).astype(np.float32)
    rows = np.ones((1, 2, 1500), np.float32)
    options = {
        "causal": False,
        "window": (-1, -1),
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
            forge._forge.run("backward", arrays, False, options)

        thread = threading.Thread(target=call)
        thread.start()
        started.wait()
        arrays.clear()
        junk = [np.full(x.shape, np.nan, np.float32) for _ in range(8)]
        thread.join()
        del junk
