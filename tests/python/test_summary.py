"""What `make test` says at its end: tests/summary.py, on reports of CTest and pytest."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("forge_test_summary", ROOT / "tests/summary.py")
summary = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = summary  # for its dataclass
spec.loader.exec_module(summary)

CTEST = """<testsuite>
<testcase name="test_mask" time="2.5" status="run"><properties>
  <property name="cmake_labels" value="cpp"/></properties></testcase>
<testcase name="{name}" time="70" status="{status}"><properties>
  <property name="cmake_labels" value="python"/></properties>{failure}</testcase>
</testsuite>"""


def ctest(build, preset, name="pytest_1", status="run", failure=""):
    folder = build / preset / "results"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ctest.xml").write_text(CTEST.format(name=name, status=status, failure=failure))
    return folder


def pytest_report(folder, name, where, code, tmp_path):
    """A real report of pytest on the module `code`; `where` is what the real conftest says."""
    tests = tmp_path / name
    tests.mkdir()
    (tests / "conftest.py").write_text(
        "import pytest\n"
        "@pytest.fixture(scope='session', autouse=True)\n"
        f"def runs_on(record_testsuite_property): record_testsuite_property('runs_on', {where!r})\n"
    )
    for module, text in code.items():
        (tests / f"{module}.py").write_text("import pytest\n" + textwrap.dedent(text))
    report = folder / f"{name}.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", tests, tests,
         "-p", "no:cacheprovider", f"--junitxml={report}"],
        cwd=tests, check=False, capture_output=True,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip


NO_TORCH = "torch is not installed: pip install -r tests/requirements-torch.txt"
TWO = {
    "test_two": "def test_a(): pass\n@pytest.mark.skip(reason='only elsewhere')\ndef test_b(): pass"
}
TORCH = {"test_torch": f"pytest.skip({NO_TORCH!r}, allow_module_level=True)"}
METAL = {"test_two": "def test_a(): pass\ndef test_b(): pass"}


@pytest.fixture
def build(tmp_path):
    build = tmp_path / "build"
    folder = ctest(build, "dev")
    pytest_report(folder, "pytest_1", "cpu (avx2)", {**TWO, **TORCH}, tmp_path)
    folder = ctest(build, "software", "pytest_metal")
    pytest_report(folder, "pytest_metal", "metal (software)", METAL, tmp_path)
    return build


def test_the_last_line_counts_what_ran_and_names_what_did_not(build, capsys):
    (build / "left-out").write_text("NEON: missing qemu-aarch64\n")
    assert summary.main([str(build)]) == 0
    *others, last = capsys.readouterr().out.splitlines()
    assert last == (
        "all passed: 2 C++ tests, 3 Python tests on 2 targets (cpu (avx2), metal (software)); "
        "left out: NEON (missing qemu-aarch64); torch (not installed)"
    )
    assert f"skipped: 1: {NO_TORCH}" in others
    assert not any("only elsewhere" in line for line in others)  # it ran on Metal
    facts = json.loads((build / "test-summary.json").read_text())
    assert facts["ok"]
    assert facts["summary"] == last
    assert facts["python"]["metal (software)"] == {"passed": 2}
    assert facts["python_tests"] == 2
    assert facts["cpp"] == {"passed": 2}
    assert facts["left_out"] == {"NEON": "missing qemu-aarch64", "torch": "not installed"}
    assert facts["seconds"]["dev/pytest_1"] == 70


def test_a_package_that_another_run_had_is_not_left_out(build, tmp_path, capsys):
    ran = {"test_torch": "def test_c(): pass"}
    pytest_report(build / "dev/results", "pytest_2", "cpu (avx2)", ran, tmp_path)
    assert summary.main([str(build)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("; left out: nothing")


def test_what_fails_is_named_and_decides_the_exit_status(build, tmp_path, capsys):
    bad = """
        def test_wrong(): assert 0
        @pytest.fixture
        def f(): 1 / 0
        def test_g(f): pass
        """
    pytest_report(build / "dev/results", "pytest_2", "cpu (avx2)", {"test_bad": bad}, tmp_path)
    assert summary.main([str(build), "--status", "2"]) == 1
    *others, last = capsys.readouterr().out.splitlines()
    assert last.startswith("FAILED: 2 tests of 2 C++ tests, 5 Python tests on ")
    assert "failed: dev/pytest_2: test_bad::test_wrong" in others


def test_an_entry_without_a_report_of_its_own_is_judged_by_ctest(build, capsys):
    ctest(build, "macos-cross", "macos_module", "fail", "<failure message=''/>")
    assert summary.main([str(build)]) == 1
    out = capsys.readouterr().out
    assert "failed: macos-cross/macos_module" in out
    assert out.splitlines()[-1].startswith("FAILED: 1 test of 3 C++ tests, ")
    assert ", 1 other check; left out: " in out.splitlines()[-1]


def test_an_entry_that_fails_without_a_failed_test_is_named(build, capsys):
    """pytest crashed at its end, or was called wrongly."""
    ctest(build, "dev", "pytest_1", "fail", "<failure message=''/>")
    assert summary.main([str(build)]) == 1
    assert "failed: dev/pytest_1\n" in capsys.readouterr().out


def test_stopped_half_way_or_with_nothing_run_is_no_success(build, tmp_path, capsys):
    assert summary.main([str(build), "--status", "2"]) == 1
    assert "FAILED: make stopped before the end, after 2 C++ tests" in capsys.readouterr().out
    assert summary.main([str(tmp_path / "nothing")]) == 1
    assert "FAILED" in capsys.readouterr().out
