"""Fixtures: every test that takes `backend` or `kernel` runs on all that this machine has."""

import functools
import mmap
import os

import forge
import numpy as np
import pytest
import softmetal
from hypothesis import HealthCheck, settings

KERNELS = ("materialized", "fused")

# What CTest runs beside the whole suite, which it runs once with nothing forced (CONTRIBUTING.md).
# Modules in ONCE learn nothing from another CPU target or from a device.
SCOPE = os.environ.get("FORGE_TEST_SCOPE", "all")
ONCE = [
    "test_architecture",
    "test_benchmark_models",
    "test_benchmarks",
    "test_plot",
    "test_ring",
    "test_split",
    "test_split_decode",
    "test_summary",
    "test_split_pages",
    "test_tree",
    "test_ulysses",
    "test_workflows",
]
# On a device the demo and the pages still say something, on another CPU target no more.
PROGRAMS = ["test_cli", "test_demo", "test_docs"]
PEERS = ["test_jax", "test_jax_programs", "test_mlx", "test_recommendations", "test_torch"]
PEERS += ["test_jax_ring", "test_jax_scores", "test_mpi", "test_torch_ring", "test_torch_scores"]
PEERS += ["test_transformers", "test_transformers_half", "test_transformers_models"]
PEERS += ["test_transformers_masks", "test_transformers_refusals", "test_transformers_shapes"]
STREAMS = ["test_mlx_stream", "test_torch_stream"]  # a CTest of their own runs them
IGNORED = {
    "all": [],
    "target": ONCE + PROGRAMS + PEERS + STREAMS,
    "device": ONCE + PEERS + STREAMS,
    "quick": ONCE + PROGRAMS + PEERS + STREAMS,
}
collect_ignore = [f"{module}.py" for module in IGNORED[SCOPE]]

# The software Metal device may have larger pages (SOFTMETAL_SETTINGS); then Python has them too.
if forge.build_config()["metal"] == "software" and softmetal.get("page_bytes"):
    mmap.PAGESIZE = softmetal.get("page_bytes")

settings.register_profile(
    "forge",
    derandomize=True,
    deadline=None,
    max_examples=60,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("forge")


def pytest_configure():
    target = os.environ.get("FORGE_CPU_TARGET")
    usable = forge.build_config()["cpu_targets"]
    if target and target not in usable:
        pytest.exit(f"this machine cannot run the CPU target {target!r}, only {usable}", 77)
    if target == usable[0] and SCOPE == "target":
        pytest.exit(f"{target} is what the whole suite runs on here", 77)


def pytest_collection_modifyitems(config, items):
    """FORGE_TEST_PART=2/3: of every three tests the second. CTest runs parts at a time."""
    part = os.environ.get("FORGE_TEST_PART")
    if not part:
        return
    number, parts = map(int, part.split("/"))
    chosen = items[number - 1 :: parts]
    others = set(items).difference(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item in others])
    items[:] = chosen


@pytest.fixture(scope="session", autouse=True)
def runs_on(record_testsuite_property):
    """For tests/summary.py: the devices of this run."""
    target = os.environ.get("FORGE_CPU_TARGET") or forge.build_config()["cpu_targets"][0]
    software = forge.build_config()["metal"] == "software"
    said = {"cpu": f"cpu ({target})", "metal": "metal (software)" if software else "metal"}
    for backend in chosen_backends():
        record_testsuite_property("runs_on", said[backend])


def chosen_backends():
    """The backends that work here; FORGE_TEST_BACKEND ("cpu", "cpu,metal") narrows the choice."""
    usable = [name for name, state in forge.backends().items() if state["ok"]]
    wanted = os.environ.get("FORGE_TEST_BACKEND")
    if not wanted:
        return usable
    names = wanted.split(",")
    missing = [name for name in names if name not in usable]
    if missing:
        raise pytest.UsageError(f"FORGE_TEST_BACKEND names {missing}, usable here: {usable}")
    return names


@functools.cache
def why_not_served(backend, kernel):
    """Empty when the backend has that kernel family at all."""
    x = np.zeros((1, 1, 1, 1), np.float32)
    try:
        forge.attention(x, x, x, backend=backend, kernel=kernel)
    except ValueError as error:
        return str(error)
    return ""


def skip_unless_served(backend, kernel):
    reason = why_not_served(backend, kernel)
    if reason:
        pytest.skip(reason)


@pytest.fixture(params=chosen_backends())
def backend(request):
    return request.param


@pytest.fixture(params=KERNELS)
def kernel(request):
    if "backend" in request.fixturenames:
        skip_unless_served(request.getfixturevalue("backend"), request.param)
    return request.param


@pytest.fixture(params=chosen_backends())
def fused_backend(request):
    """For calls with the default kernel."""
    skip_unless_served(request.param, "fused")
    return request.param


@pytest.fixture
def metal():
    if "metal" not in chosen_backends():
        pytest.skip("the Metal backend is not chosen or not there")
    return "metal"


@pytest.fixture
def software(metal):
    """The software Metal device under the backend, to count and to make fail."""
    if forge.build_config()["metal"] != "software":
        pytest.skip("this build drives a real GPU, which cannot be told to fail")
    softmetal.reset()
    yield softmetal
    softmetal.reset()


@pytest.fixture
def rng():
    return np.random.default_rng(20240607)


@pytest.fixture
def cpu():
    """For what only the CPU serves: float64, CPU targets, denormals, head dims above 256."""
    if "cpu" not in chosen_backends():
        pytest.skip("FORGE_TEST_BACKEND leaves the CPU out")
    return "cpu"


@pytest.fixture
def restore_threads():
    """Puts the number of threads back after a test that sets it."""
    x = np.zeros((1, 1, 1, 1), np.float32)
    forge.attention(x, x, x, backend="cpu")
    before = forge.last_run()["threads"]
    yield
    forge.set_num_threads(before)
