"""The package as a user gets it: sdist, a wheel built from it, a clean environment elsewhere."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

EXAMPLE = """
import numpy as np, forge
q = np.random.default_rng(0).standard_normal((1, 70, 4, 33), dtype=np.float32)
k = v = q[:, :, :2]
options = dict(causal=True, window=9, softcap=5.0)
out, saved = forge.attention_forward(q, k, v, **options)
gradients = forge.attention_backward(out, saved)
check = forge.attention(q, k, v, kernel="materialized", **options)
assert np.abs(out - check).max() < 1e-5
assert all(np.isfinite(x).all() for x in gradients)
print(forge.__file__, forge.build_config()["version"])
"""


def run(*command, cwd):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder with the sdist and the wheel that was built from it, not from the repository."""
    folder = tmp_path_factory.mktemp("dist")
    run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(ROOT),
        cwd=ROOT,
    )
    return folder


def test_the_wheel_holds_the_package_and_nothing_else(dist):
    [wheel] = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if name.startswith("forge/")}
    [module] = [name for name in package if name.startswith("forge/_forge.") and ".pyi" not in name]
    assert module.endswith(".so")
    assert {"forge/__init__.py", "forge/_forge.pyi", "forge/py.typed"} <= package
    tree = [path for path in (ROOT / "python/forge").rglob("*") if path.is_file()]
    sources = {
        path.relative_to(ROOT / "python").as_posix()
        for path in tree
        if path.parent.name != "__pycache__"
    }
    assert package - {module, "forge/forge.metallib"} == sources
    assert all(name.split("/")[0].endswith(".dist-info") for name in names - package)
    assert any(name.endswith("LICENSE") for name in names)


def test_the_sdist_holds_what_a_build_needs(dist):
    [sdist] = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {"/".join(name.split("/")[1:]) for name in archive.getnames()}
    assert {"CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md"} <= names
    assert not {name for name in names if name.split("/")[0] in (".venv", "build", ".ci")}


def test_the_wheel_works_in_a_clean_environment(dist, tmp_path):
    [wheel] = dist.glob("*.whl")
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"), cwd=tmp_path)
    python = str(tmp_path / "venv/bin/python")
    run(python, "-m", "pip", "install", "--quiet", str(wheel), cwd=tmp_path)
    assert str(tmp_path / "venv") in run(python, "-c", EXAMPLE, cwd=tmp_path)
