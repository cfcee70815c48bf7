"""What TARGET means, from the source alone, and how it is loaded."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from elastictrain.cli.target import Target, load_class, resolve
from elastictrain.errors import UsageError

ONE = """
from elastictrain import Task

class Helper:
    pass

class Net(Task):
    def __init__(self, dim: int, lr: float = 0.1, name=None):
        super().__init__()
"""

TWO = """
import elastictrain as et
import torch.nn as nn
import lightning as L
from lightning.pytorch import LightningModule as LM
from somewhere import Mystery

class First(et.Task):
    pass

class Second(First):
    def __init__(self, *, deep: bool, **kw): ...

class Lit(L.LightningModule): ...
class Lit2(LM): ...
class Plain(nn.Module): ...
class Nothing: ...
class Odd(Mystery):
    def __init__(self, dim): ...

def function(): ...
Alias = First
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "one.py").write_text(ONE)
    (tmp_path / "two.py").write_text(TWO)
    (tmp_path / "plain.py").write_text("import sys\nprint(sys.argv)\n")
    (tmp_path / "pkg" / "sub").mkdir(parents=True)
    (tmp_path / "pkg" / "__init__.py").write_text("raise RuntimeError('must not run')")
    (tmp_path / "pkg" / "sub" / "tasks.py").write_text(ONE)
    return tmp_path


def test_file_and_class(here: Path) -> None:
    target, _ = resolve("one.py:Net")
    assert target == Target("one.py:Net", str(here / "one.py"), None, "Net")
    assert target.default_run_dir == "runs/net"
    assert resolve("one.py")[0] == target, "it is the only Task"
    assert resolve(f"{here}/one.py:Net")[0] == target, "run.json does not depend on where it is called from"
    for name in ("First", "Second", "Lit", "Lit2", "Odd", "Alias"):
        assert resolve(f"two.py:{name}")[0].cls == name


def test_script(here: Path) -> None:
    target, _ = resolve("plain.py")
    assert target == Target("plain.py", str(here / "plain.py"), None, None)
    assert target.default_run_dir == "runs/plain"


def test_module_is_found_without_importing_its_packages(here: Path) -> None:
    target, source = resolve("pkg.sub.tasks:Net")
    assert target == Target("pkg.sub.tasks:Net", str(here / "pkg" / "sub" / "tasks.py"), "pkg.sub.tasks", "Net")
    assert source is not None
    assert resolve("torch.nn:Linear")[0].file == sys.modules["torch.nn"].__file__


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("on.py:Net", r"on\.py does not exist; did you mean one\.py\?"),
        ("nowhere/x.py", "nowhere/x.py does not exist: check the path"),
        ("pkg", r"pkg is a directory: name a file in it, for instance pkg/train\.py"),
        ("one.py:Nett", r"one\.py has no class Nett; did you mean Net\? \(its classes are Helper, Net\)"),
        ("plain.py:Net", r"plain\.py has no class Net \(it defines none\)"),
        ("one.py:", "after the colon comes the name of a class"),
        ("one.py:a.b", "after the colon comes the name of a class"),
        ("one.py:Helper", r"one\.py:Helper is neither a Task nor a LightningModule \(its bases: none\)"),
        ("two.py:Plain", r"two\.py:Plain is neither a Task nor a LightningModule \(its bases: nn\.Module\)"),
        ("two.py:function", r"two\.py:function is a function"),
        ("two.py", r"two\.py defines 2 Tasks, First and Second: name one, for instance two\.py:First"),
        ("pkg.sub.tasks", r"there is no such file; name the class of a module, for instance pkg\.sub\.tasks:MyTask"),
        ("nopkg.tasks:Net", r"nopkg\.tasks: there is no module nopkg on the import path"),
        ("pkg.nosub:Net", r"pkg\.nosub: there is no module nosub in pkg"),
        ("pkg.sub.tasks:Ne", r"pkg\.sub\.tasks has no class Ne; did you mean Net\?"),
        ("what is this", r"TARGET is file\.py, file\.py:Class or package\.module:Class"),
    ],
)
def test_refused(here: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        resolve(text)
    assert "\n" not in str(caught.value)


def test_not_python(here: Path) -> None:
    (here / "bad.py").write_text("def f(:\n  pass\n")
    with pytest.raises(UsageError, match=r"bad\.py, line 1: not valid Python: invalid syntax"):
        resolve("bad.py:Net")


def test_signature_from_source(here: Path) -> None:
    source = resolve("one.py")[1]
    assert source is not None
    signature = source.signature("Net")
    assert signature is not None
    assert signature.convert({"dim": "3", "name": "[as it is"})["dim"] == 3
    with pytest.raises(UsageError, match="Net has no argument dims; did you mean dim"):
        signature.convert({"dims": "3"})
    with pytest.raises(UsageError, match="Net wants dim to be a whole number"):
        signature.convert({"dim": "x"})
    with pytest.raises(UsageError, match="Net needs dim: add --set dim=…"):
        signature.convert({})
    source = resolve("two.py:Lit")[1]
    assert source is not None
    for name, is_open in (("First", False), ("Second", True), ("Lit", False)):
        known = source.signature(name)
        assert known is not None and known.open is is_open, name
    assert source.signature("Alias") is None


def test_a_loaded_file_is_a_module_that_can_be_pickled(here: Path) -> None:
    guard = "import multiprocessing\nif multiprocessing.parent_process() is None:"  # lightning takes the child seconds
    task = ONE.replace("\n", "\n    ")
    (here / "one.py").write_text(f"{guard}{task}\nclass Item:\n    def __init__(self, x): self.x = x\n")
    cls = load_class(resolve("one.py:Net")[0])
    module = sys.modules["one"]
    try:
        assert cls.__module__ == "one"
        assert not (here / "__pycache__").exists()
        item = pickle.loads(pickle.dumps(module.Item(3)))
        assert item.x == 3
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # as a loader process that starts afresh
            assert pool.apply(getattr, (module.Item(4), "x")) == 4
    finally:
        del sys.modules["one"]


def test_a_file_never_takes_the_place_of_another_module(here: Path) -> None:
    import random

    (here / "random.py").write_text(ONE)
    (here / "my-task.py").write_text(ONE)
    assert load_class(resolve("random.py:Net")[0]).__module__ == "elastictrain_target_random"
    assert sys.modules["random"] is random
    assert load_class(resolve("my-task.py:Net")[0]).__name__ == "Net"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("from missing_base import Base\nclass Net(Base): pass", "missing_base"),
        ("from torch.nn import *\nclass Net(Linear): pass", "neither a Task nor a LightningModule"),
        ("import torch.nn\ndef make(): return 3\nNet = make()", "is a int that is neither"),
        ("if 0:\n    Net = 3", "Net is not defined when the module is loaded"),
        ("from .x import y\nNet = y", r"imports relative to its package .*: name it as package\.module:Class"),
    ],
)
def test_what_only_loading_can_tell(here: Path, source: str, says: str) -> None:
    (here / "late.py").write_text(source)
    target, _ = resolve("late.py:Net")
    with pytest.raises((UsageError, ImportError), match=says):
        load_class(target)
    sys.modules.pop("late", None)


def test_looking_imports_no_torch(here: Path) -> None:
    program = "import sys; from elastictrain.cli.target import resolve; resolve('two.py:Second')"
    program += "; assert 'torch' not in sys.modules"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", program], check=True, env=env)
