"""The hosted workflows, pyproject.toml and the files that they name agree with each other."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".github" / "workflows"
NAMES = ["ci.yml", "wheels.yml"]
BACKENDS = {"cpu", "metal"}

# An sdist has neither; a repository without its workflows fails here.
pytestmark = pytest.mark.skipif(not (ROOT / ".ci").is_dir(), reason="not in the repository")


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def workflow(name):
    return yaml.safe_load((FOLDER / name).read_text())


def steps(name):
    return [step for job in workflow(name)["jobs"].values() for step in job["steps"]]


def commands(name):
    return "\n".join(step["run"] for step in steps(name) if "run" in step)


def supported(project):
    """The Pythons that the classifiers name: 3.10, 3.11, ..."""
    prefix = "Programming Language :: Python :: 3."
    return ["3." + c.removeprefix(prefix) for c in project["project"]["classifiers"]
            if c.startswith(prefix)]  # fmt: skip


def test_the_workflows_are_all_there():
    assert sorted(path.name for path in FOLDER.iterdir()) == NAMES


def test_wheels_are_built_for_the_pythons_that_the_package_supports(project):
    pythons = supported(project)
    assert pythons == ["3.10", "3.11", "3.12", "3.13"]
    assert project["project"]["requires-python"] == f">={pythons[0]}"
    wanted = [f"cp{version.replace('.', '')}-*" for version in pythons]
    assert project["tool"]["cibuildwheel"]["build"] == wanted


def test_wheels_are_built_for_three_platforms(project):
    matrix = workflow("wheels.yml")["jobs"]["wheels"]["strategy"]["matrix"]["include"]
    assert {row["platform"]: row["runner"].split("-")[0] for row in matrix} == {
        "macosx_arm64": "macos",
        "manylinux_x86_64": "ubuntu",
        "manylinux_aarch64": "ubuntu",
    }
    for row in matrix:
        assert row["runner"].endswith("-arm") == (row["platform"] == "manylinux_aarch64")
    settings = project["tool"]["cibuildwheel"]
    assert settings["macos"]["archs"] == ["arm64"]
    assert settings["linux"]["archs"] == ["native"]
    assert settings["skip"] == ["*-musllinux_*"]


def test_a_wheel_is_tested_by_the_minimal_test_and_by_check(project):
    settings = project["tool"]["cibuildwheel"]
    assert "python -m forge check" in settings["test-command"]
    [pytest_command] = [c for c in settings["test-command"] if "pytest" in c]
    path = pytest_command.removeprefix("python -m pytest {project}/")
    assert path == "tests/python/test_minimal.py"
    assert (ROOT / path).is_file()
    assert set(settings["test-requires"]) <= set(
        project["project"]["optional-dependencies"]["test"]
    )


def test_the_sdist_is_built_installed_and_tested():
    text = commands("wheels.yml")
    for part in ("-m build --sdist", "install --disable-pip-version-check dist/*.tar.gz",
                 "tests/python/test_minimal.py", "python -m forge check"):  # fmt: skip
        assert part in text


def test_what_continuous_integration_runs_is_there():
    text = commands("ci.yml")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert re.search(r"^\.ci/run$", text, re.MULTILINE)
    for target in re.findall(r"\bmake (\S+)", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
    for path in re.findall(r"-r (\S+)", text):
        assert (ROOT / path).is_file(), path


def test_what_must_run_in_continuous_integration_is_installed_there():
    """Each FORGE_REQUIRE_ of a package puts its requirements into make test."""
    required = re.findall(r"FORGE_REQUIRE_(\w+)=1", (ROOT / ".ci" / "run").read_text())
    makefile = (ROOT / "Makefile").read_text()
    groups = {path.stem.partition("-")[2] for path in (ROOT / "tests").glob("requirements-*.txt")}
    assert groups == {"jax", "mlx", "mpi", "torch"}
    assert {name.lower() for name in required} == groups | {"metal", "neon"}
    peers = makefile.split("TEST_PEERS :=")[1].split("\n#")[0]
    for group in groups:
        assert f"$(if $(FORGE_REQUIRE_{group.upper()}),-r tests/requirements-{group}.txt)" in peers


def test_the_mac_runs_the_suite_on_every_backend():
    [job] = [j for j in workflow("ci.yml")["jobs"].values() if j["runs-on"].startswith("macos")]
    runs = "\n".join(step.get("run", "") for step in job["steps"])
    assert re.findall(r"backends=([\w,]+)", runs) == ["cpu,metal", "cpu"]
    [suite] = [step for step in job["steps"] if "FORGE_TEST_BACKEND" in step.get("env", {})]
    assert suite["env"]["FORGE_TEST_BACKEND"] == "${{ steps.gpu.outputs.backends }}"
    assert suite["run"].startswith("python -m pytest -q || {")
    assert "python -m forge check" in runs
    assert "python -m forge info" in runs


def test_the_mac_tells_the_tests_which_backends_are_usable():
    """The script in the workflow, run here."""
    [step] = [step for step in steps("ci.yml") if step.get("id") == "gpu"]
    script = step["run"].split("<<'EOF'\n", 1)[1].rsplit("EOF", 1)[0]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    [name, backends] = done.stdout.strip().split("=")
    assert name == "backends"
    assert "cpu" in backends.split(",")
    assert set(backends.split(",")) <= BACKENDS
    assert ("metal" in backends) != ("::warning title=No Metal here::" in done.stderr)


@pytest.mark.parametrize("name", NAMES)
def test_jobs_are_bounded_and_hold_no_secret(name):
    text = (FOLDER / name).read_text()
    assert "secrets." not in text
    assert workflow(name)["permissions"] == {"contents": "read"}
    for job in workflow(name)["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 90


@pytest.mark.parametrize("name", NAMES)
def test_actions_are_pinned_by_major_version(name):
    used = [step["uses"] for step in steps(name) if "uses" in step]
    assert used
    for action in used:
        assert re.fullmatch(r"actions/[\w-]+@v\d+", action), action


@pytest.mark.parametrize("name", NAMES)
def test_pythons_of_the_runners_are_supported_ones(name, project):
    for step in steps(name):
        if "setup-python" in step.get("uses", ""):
            assert step["with"]["python-version"] in supported(project)


@pytest.mark.parametrize("name", NAMES)
def test_shell_commands_parse(name):
    for step in steps(name):
        if "run" in step:
            script = re.sub(r"\$\{\{.*?\}\}", "x", step["run"])
            done = subprocess.run(
                ["bash", "-n"], input=script, capture_output=True, text=True, check=False
            )
            assert (done.returncode, done.stderr) == (0, ""), step["run"]
