"""The project's files agree with one another."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import elastictrain

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
PINS = dict(line.split("==") for line in PINNED)


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~ ]", requirement)[0].lower() for requirement in requirements}


def test_the_version_is_the_package_s_own() -> None:
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "elastictrain.__version__"}
    assert f"## [{elastictrain.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_runtime_dependency_is_pinned_and_has_its_reason() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    for name in names(PYPROJECT["project"]["dependencies"]):
        assert name in PINS, f"{name} is not in constraints.txt"
        assert f"| `{name}` |" in design, f"{name} has no reason in docs/design.md"


def test_every_tool_is_pinned() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    for extra in ("dev", "examples", "docs", "s3", "hf"):
        assert names(extras[extra]) - {"elastictrain"} <= PINS.keys()


def test_no_file_names_a_package_host() -> None:
    for path in ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run", ".pre-commit-config.yaml"):
        text = (ROOT / path).read_text()
        assert not re.search(r"https?://|--(extra-)?index-url|--find-links", text), path


def test_the_readme_names_every_extra_and_every_exit_code() -> None:
    readme = (ROOT / "README.md").read_text()
    for extra in PYPROJECT["project"]["optional-dependencies"].keys() - {"dev", "docs"}:
        assert f"`{extra}`" in readme, extra
    for code in (0, 1, 2, 75):
        assert f"| `{code}` |" in readme, code


def private_imports(file: Path) -> list[str]:
    """Imports of private names of torch and lightning in one file."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for path in paths:
            first, *rest = path.split(".")
            if first in ("torch", "lightning") and any(part.startswith("_") for part in rest):
                found.append(f"{file.relative_to(ROOT)}:{node.lineno} {path}")
    return found


def test_private_names_of_torch_and_lightning_stay_in_compat() -> None:
    files = [*ROOT.glob("elastictrain/**/*.py"), *ROOT.glob("callbacks/*.py"), *ROOT.glob("examples/*.py")]
    inside = [file for file in files if file.is_relative_to(ROOT / "elastictrain" / "compat")]
    assert any(private_imports(file) for file in inside), "the check sees none where there are some"
    assert [name for file in files if file not in inside for name in private_imports(file)] == []
