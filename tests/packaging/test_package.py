"""What is installed: from the checkout, an editable install, a source distribution and a wheel in a fresh environment.

``elastictrain/callbacks`` is a symlink to the top-level ``callbacks/``. Each way of installing must turn it into
``elastictrain.callbacks`` and nothing else. Builds run offline, on a copy, with the tools of this environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import elastictrain

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = ("elastictrain", "callbacks", "examples", "tests", "pyproject.toml", "README.md", "LICENSE")


def run(*command: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command without this process' PYTHONPATH, so that only what is installed is found."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=150
    )
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources, symlink and all, where building leaves nothing in the checkout."""
    target = tmp_path_factory.mktemp("copy")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, target)
    assert (target / "elastictrain" / "callbacks").is_symlink()
    return target


def build(kind: str, source: Path, into: Path) -> Path:
    """A ``sdist`` or ``wheel`` by the project's own build backend."""
    code = f"import setuptools.build_meta as backend; print(backend.build_{kind}({str(into)!r}))"
    run(sys.executable, "-c", code, cwd=source)
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", copy, tmp_path_factory.mktemp("wheel"))


def environment(folder: Path, *install: str | Path, libraries: bool = True) -> Path:
    """A fresh virtual environment with only ``install`` of its own, and this one's libraries behind it."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--quiet")
    if libraries:
        # A path in a .pth file makes its packages importable, and leaves its own .pth files (editable installs) alone.
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(*pip, "--no-deps", "--no-index", "--no-build-isolation", *install, cwd=folder)
    return python


def check_import(python: Path, *, cwd: Path, inside: Path) -> None:
    """``elastictrain.callbacks`` is importable, lies inside a folder, and answers under no other name."""
    code = (
        "import elastictrain.callbacks as c, elastictrain.callbacks.ema as e\n"
        "print(c.__file__); print(e.EMA.__module__, e.EMA.__name__)"
    )
    file, name = run(python, "-c", code, cwd=cwd).stdout.splitlines()
    assert Path(file).is_relative_to(inside), file
    assert name == "elastictrain.callbacks.ema EMA"


# ---- quick ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_checkout_is_importable_as_it_is(tmp_path: Path) -> None:
    check_import(Path(sys.executable), cwd=ROOT, inside=ROOT / "elastictrain")


def test_callbacks_under_its_own_name_is_refused() -> None:
    done = run(sys.executable, "-c", "import callbacks", cwd=ROOT, check=False)
    assert done.returncode == 1
    assert "ImportError" in done.stderr.splitlines()[-1]
    assert "elastictrain.callbacks" in done.stderr.splitlines()[-1]


def test_every_name_of_the_package_loads() -> None:
    for name in elastictrain.__all__:
        assert getattr(elastictrain, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = elastictrain.Trainr


@pytest.mark.slow
def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    task = text.split("```python\n", 1)[1].split("```", 1)[0]
    (tmp_path / "quickstart.py").write_text(task)
    main = (sys.executable, "-c", "from elastictrain.cli.main import main; main()")
    done = run(*main, "run", tmp_path / "quickstart.py", "--max-steps", "3", "--run-dir", tmp_path / "run", cwd=ROOT)
    assert (tmp_path / "run" / "run.json").exists(), done.stdout


# ---- built ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename: info for info in archive.infolist()}
        metadata = archive.read(f"elastictrain-{elastictrain.__version__}.dist-info/METADATA").decode()
        points = archive.read(f"elastictrain-{elastictrain.__version__}.dist-info/entry_points.txt").decode()
    package = {name for name in files if name.startswith("elastictrain/")}
    others = {name.split("/")[0] for name in files} - {"elastictrain"}
    assert others == {f"elastictrain-{elastictrain.__version__}.dist-info"}
    rooms = {f"elastictrain/{file.relative_to(ROOT / 'elastictrain')}" for file in ROOT.glob("elastictrain/**/*.py")}
    callbacks = {f"elastictrain/callbacks/{file.name}" for file in ROOT.glob("callbacks/*.py")}
    data = {"elastictrain/py.typed", "elastictrain/reports/page.css", "elastictrain/reports/page.js"}
    assert package == rooms | callbacks | data
    assert all(files[name].file_size > 0 for name in package if name.startswith("elastictrain/callbacks/"))
    assert not any(files[name].external_attr >> 28 == 0o12 for name in files), "a symlink in the wheel"
    assert "License-Expression: Apache-2.0" in metadata
    assert "Classifier: Typing :: Typed" in metadata
    for extra in PROJECT["optional-dependencies"]:
        assert f"Provides-Extra: {extra}" in metadata
    assert "elastictrain = elastictrain.cli.main:main" in points
    for group, registered in PROJECT["entry-points"].items():
        assert f"[{group}]" in points
        for name, target in registered.items():
            assert f"{name} = {target}" in points


@pytest.mark.slow
def test_a_wheel_built_from_the_source_distribution_is_the_same(copy: Path, wheel: Path, tmp_path: Path) -> None:
    for folder in ("sdist", "wheel", "unpacked"):
        (tmp_path / folder).mkdir()
    with tarfile.open(build("sdist", copy, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    rebuilt = build("wheel", unpacked, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(rebuilt) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())


@pytest.mark.slow
def test_the_wheel_works_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", wheel)
    check_import(python, cwd=tmp_path, inside=tmp_path / "venv")
    help_text = run(tmp_path / "venv" / "bin" / "elastictrain", "--help", cwd=tmp_path).stdout
    assert "run" in help_text
    code = (
        "from importlib.metadata import version; import elastictrain as e\n"
        "print(version('elastictrain'), e.__version__)"
    )
    assert run(python, "-c", code, cwd=tmp_path).stdout.split() == [elastictrain.__version__] * 2
    for name in ("callbacks", "tests", "examples"):
        assert run(python, "-c", f"import {name}", cwd=tmp_path, check=False).returncode == 1
    code = (
        "from importlib.metadata import entry_points\n"
        "for point in entry_points(group='elastictrain.callbacks'): print(point.name, point.load().__module__)"
    )
    loaded = dict(line.split() for line in run(python, "-c", code, cwd=tmp_path).stdout.splitlines())
    expected = PROJECT["entry-points"]["elastictrain.callbacks"]
    assert {name: loaded.get(name) for name in expected} == {
        name: target.partition(":")[0] for name, target in expected.items()
    }


@pytest.mark.slow
def test_an_editable_install_works_and_follows_the_checkout(copy: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", "--editable", copy)
    check_import(python, cwd=tmp_path, inside=copy)
    (copy / "callbacks" / "brand_new.py").write_text("WORD = 'here'\n")
    try:
        code = "from elastictrain.callbacks.brand_new import WORD; print(WORD)"
        assert run(python, "-c", code, cwd=tmp_path).stdout == "here\n"
    finally:
        (copy / "callbacks" / "brand_new.py").unlink()


@pytest.mark.slow
def test_a_type_checker_sees_the_types_of_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    python = environment(
        tmp_path / "venv", wheel, libraries=False
    )  # torch's types take a minute and prove nothing here
    (tmp_path / "user.py").write_text(
        "from elastictrain import MeshConfig\n"
        "from elastictrain.callbacks import EMA\n"
        "ema: int = EMA(decay=0.9)\n"
        "MeshConfig('auto').resolve('two')\n"
    )
    done = run(sys.executable, "-m", "mypy", "--python-executable", python, "user.py", cwd=tmp_path, check=False)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 2, done.stdout
    assert '"EMA"' in errors[0]
    assert '"str"; expected "int"' in errors[1]
