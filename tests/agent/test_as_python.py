"""A worker's script sees what it sees under ``python script.py``, and keepstep itself nothing of its folder."""

import contextlib
import dataclasses
import json
import os
import py_compile
import re
import shelve
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.agent.crew import DEADLINE_S, PYTHON, Crew

from keepstep.agent.settings import AgentSettings, NodePlace

LOOK = """
def look(at):
    return {
        "main": {name: value if isinstance(value, str) else type(value).__name__ for name, value in at.items()},
        "loader": [vars(at["__loader__"]).get(name) for name in ("name", "path", "archive")],
        "spec": at["__spec__"] and [at["__spec__"].name, at["__spec__"].origin],
        "path": sys.path[:], "argv": sys.argv[:], "typed": sys.orig_argv[:], "flags": list(sys.flags),
        "is main": vars(sys.modules["__main__"]) is globals(),
    }

found = globals().copy()
import sys
if __name__ == "__main__":
    found = look(found | {"look": None})
import atexit, json, multiprocessing, os, subprocess, threading
from pathlib import Path

def of_child():
    print(json.dumps(["a child:", sys.path[:], list(sys.flags), __name__, __file__]), flush=True)

def last():
    print(json.dumps(["at the end:", sys.modules["__main__"].__dict__ is globals(), Local.__module__]))

class Local: pass

if __name__ == "__main__":
    print(json.dumps(found))
    atexit.register(last)
    os.chdir("/")
    print(json.dumps([Path(__file__).exists(), __import__("sibling").VALUE]), flush=True)
    child = multiprocessing.get_context("spawn").Process(target=of_child)
    child.start()
    child.join()
    code = "import json, sys; print(json.dumps(['a program:', sys.path[0], list(sys.flags)]))"
    subprocess.run([sys.executable, "-c", code])
    raise SystemExit(child.exitcode)
"""
RAISES = """
import atexit, sys

def fail():
    raise ValueError("not today")

def hook(*error):
    raise TypeError("not in this way")

if sys.argv[1:] == ["at the end"]:
    atexit.register(fail)
else:
    if sys.argv[1:] == ["in a hook"]:
        sys.excepthook = hook
    fail()
"""
IMPORTS = """
import importlib, json, sys
for name in sys.argv[1:]:
    try:
        found = importlib.import_module(name).__file__
    except ImportError as error:
        found = str(error)
    print(json.dumps([name, found]))
"""
LEAVES = """
import shelve, sys, weakref, zipfile
import neighbour

class Thing:
    def __init__(self, name):
        self.file = open(name, "w")

    def __del__(self):
        self.file.write("freed")

class Fails:
    def __del__(self):
        raise ValueError("not freed")

folder = sys.argv[1]
archive = zipfile.ZipFile(f"{folder}/archive.zip", "w")
archive.writestr("member.txt", "a member")
shelf = shelve.open(f"{folder}/shelf", writeback=True)
shelf["key"] = ["value"]
shelf["key"].append("later")
text = open(f"{folder}/text.txt", "w")
text.write("without a line's end")
thing = Thing(f"{folder}/thing")
circle = [Thing(f"{folder}/in_a_circle")]
circle.append(circle)
weakref.finalize(archive, open(f"{folder}/finalized", "w").write, "finalized")
neighbour.kept = zipfile.ZipFile(f"{folder}/neighbour.zip", "w")
neighbour.kept.writestr("member.txt", "a member")
fails = Fails()
"""
SHADOWS = ("random", "copy", "socket", "json", "asyncio", "torch", "msgspec", "keepstep")
"""Modules of the library, or that keepstep needs, which the user's project has as well."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with scripts of each kind. Its root has modules that are named like others'."""
    root = tmp_path_factory.mktemp("project")
    for name in ("scripts", "tool", "package", "linked"):
        (root / name).mkdir()
        (root / name / "sibling.py").write_text(f"VALUE = {name!r}")
    (root / "scripts" / "look.py").write_text(LOOK)
    (root / "scripts" / "raises.py").write_text(RAISES)
    (root / "scripts" / "imports.py").write_text(IMPORTS)
    (root / "scripts" / "leaves.py").write_text(LEAVES)
    (root / "scripts" / "neighbour.py").touch()
    (root / "scripts" / "no_syntax.py").write_text("this is no python :")
    (root / "tool" / "__main__.py").write_text(LOOK)
    (root / "package" / "__init__.py").touch()
    (root / "package" / "__main__.py").write_text(LOOK)
    (root / "sibling.py").write_text("VALUE = 'root'")
    py_compile.compile(str(root / "scripts" / "look.py"), str(root / "scripts" / "compiled.pyc"))
    (root / "link.py").symlink_to("scripts/look.py")
    (root / "linked" / "scripts").symlink_to(root / "scripts")
    with zipfile.ZipFile(root / "tool.zip", "w") as archive:
        archive.write(root / "tool" / "__main__.py", "__main__.py")
        archive.writestr("sibling.py", "VALUE = 'archive'")
    return root


FILE = ("scripts/look.py", "one", "--two")
KINDS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "file": (FILE, {}),
    "dots": (("./scripts/../scripts/look.py",), {}),
    "link": (("link.py",), {}),
    "linked folder": (("linked/scripts/look.py",), {}),
    "compiled": (("scripts/compiled.pyc",), {}),
    "folder": (("tool", "one"), {}),
    "archive": (("tool.zip",), {}),
    "module": (("-m", "package.__main__", "one"), {}),
    "package": (("-m", "package"), {}),
    "safe path": (FILE, {"PYTHONSAFEPATH": "1"}),
    "error": (("scripts/raises.py",), {}),
    "error in an exit handler": (("scripts/raises.py", "at the end"), {}),
    "error in a hook": (("scripts/raises.py", "in a hook"), {}),
    "no syntax": (("scripts/no_syntax.py",), {}),
    "no module": (("-m", "package.nowhere"), {}),
}


@contextlib.contextmanager
def shadowed(project: Path) -> Iterator[None]:
    """Puts modules into the project's root that end the process that imports them."""
    for name in SHADOWS:
        (project / f"{name}.py").write_text("raise SystemExit('this is not the library')")
    try:
        yield
    finally:
        for name in SHADOWS:
            (project / f"{name}.py").unlink()


@pytest.fixture(scope="module", params=["fork", "spawn"])
def crew(request: pytest.FixtureRequest, project: Path) -> Iterator[Crew]:
    """Workers in the project's root. What has started them has imported nothing from there."""
    with shadowed(project):
        found = Crew(request.param == "fork", project)
    yield found
    found.close()


def under_python(root: Path, command: tuple[str, ...], environment: dict[str, str]) -> list[Any]:
    """What plain Python prints, and its exit code."""
    ended = subprocess.run(
        [PYTHON, *command], cwd=root, env=os.environ | environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    return told(ended.stdout, ended.stderr, ended.returncode)


VARYING = r"0x[0-9a-f]+|tracker_fd=\d+, pipe_handle=\d+\)\n[ ~^]+\n"
"""Addresses, and the descriptors of a process of multiprocessing, which Python 3.13 shows and underlines."""


def told(stdout: str, stderr: str, status: int) -> list[Any]:
    return [*map(json.loads, stdout.splitlines()), re.sub(VARYING, "...", stderr), status]


def test_the_script_sees_what_python_shows_it(crew: Crew, project: Path) -> None:
    kinds = KINDS if crew.fork else {name: KINDS[name] for name in ("link", "folder", "package")}
    workers = {}
    for name, (command, environment) in kinds.items():
        module = command[0] == "-m"
        workers[name] = crew.spawn(*command[module:], module=module, **environment)
    for name, worker in workers.items():
        command, environment = kinds[name]
        expected = under_python(project, command, environment)
        assert told(worker.stdout, worker.stderr, worker.status) == expected, name


def contents(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                found[path.name] = {name: archive.read(name) for name in archive.namelist()}
        elif not path.name.startswith("shelf"):
            found[path.name] = path.read_text()
    with shelve.open(str(folder / "shelf"), "r") as shelf:
        return found | {"shelf": dict(shelf)}


def test_files_that_the_script_leaves_open_are_complete(crew: Crew, project: Path, tmp_path: Path) -> None:
    """Also those that are completed when Python frees the object."""
    python, keepstep = tmp_path / "python", tmp_path / "keepstep"
    python.mkdir()
    keepstep.mkdir()
    *_printed, status = under_python(project, ("scripts/leaves.py", str(python)), {})
    worker = crew.spawn("scripts/leaves.py", str(keepstep))
    assert (worker.status, contents(keepstep)) == (status, contents(python))
    assert contents(python)["archive.zip"] == {"member.txt": b"a member"}
    assert len(contents(python)) == 7
    assert worker.stderr.count("ValueError: not freed") == 1


def test_modules_of_the_working_directory_are_in_nobodys_way(crew: Crew, project: Path) -> None:
    """As with ``python scripts/imports.py``, which does not look there."""
    names = ("random", "copy", "package", "nowhere")
    with shadowed(project):
        worker = crew.spawn("scripts/imports.py", *names)
        assert told(worker.stdout, worker.stderr, worker.status) == under_python(
            project, ("scripts/imports.py", *names), {}
        )


def test_what_is_loaded_ahead_is_found_as_the_script_finds_it(project: Path) -> None:
    """And not in the working directory, unless Python looks there."""
    (project / "scripts" / "ahead.py").write_text(
        "import json, sys; print(json.dumps([sys.modules['sibling'].VALUE, sys.path.count(sys.path[0])]))"
    )
    of_job = AgentSettings(
        ("scripts/ahead.py",), False, False, True, NodePlace.alone(1, 0), project,
        preload=("sibling",), working_dir=project,
    )  # fmt: skip
    assert dataclasses.replace(of_job, module=True).spawner.preload_path == str(project)
    crew = Crew(True, project, preload=of_job.spawner.preload, preload_path=of_job.spawner.preload_path)
    try:
        worker = crew.spawn(*of_job.command)
        assert told(worker.stdout, worker.stderr, worker.status) == [["scripts", 1], "", 0]
    finally:
        crew.close()
