"""The wheel as a stranger gets it: it builds, installs with what it declares, runs; no torch."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "stepwell")

LIST_HEAVY_MODULES = """
import importlib.util, sys
import stepwell, stepwell.cli
assert "site-packages" in stepwell.__file__, stepwell.__file__
loaded = sorted(set(sys.modules) & {"torch", "vllm", "transformers", "pytest", "hypothesis"})
installed = [name for name in ("torch", "vllm") if importlib.util.find_spec(name)]
print(stepwell.__version__, loaded, installed)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command outside the checkout, so that only what is installed can be imported."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build in place would leave files in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignore)
        else:
            shutil.copy2(ROOT / name, source / name)
    # fmt: off
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation",
        "--wheel-dir", folder / "out", source, cwd=folder)
    # fmt: on
    (built,) = (folder / "out").glob("*.whl")
    return built


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"stepwell", f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"}
    assert "stepwell/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "stepwell").rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert sources <= set(names), sorted(sources - set(names))


@pytest.mark.slow
def test_wheel_runs_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-input", wheel, cwd=tmp_path)

    version = wheel.name.split("-")[1]
    assert version in run(tmp_path / "venv" / "bin" / "stepwell", "--version", cwd=tmp_path)
    found = run(python, "-c", LIST_HEAVY_MODULES, cwd=tmp_path)
    assert found.strip() == f"{version} [] []"
