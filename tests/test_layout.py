"""The directions of imports (architecture 3), and what the package offers at its top."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import deepspeed_bamboo

PACKAGE = Path(deepspeed_bamboo.__file__).parent
REPOSITORY = PACKAGE.parent
NAME = PACKAGE.name

OFFERED = ["BambooPipelineEngine", "__version__", "initialize"]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, with its line, wherever in the file and however it is written."""
    package = path.relative_to(REPOSITORY).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module, node.lineno
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def part_of(path: Path) -> str:
    """The sub-package that a file belongs to, or the file's own name at the top."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def offences(parts: set[str], forbidden: set[str], *, allowed: tuple[str, ...] = ()) -> list[str]:
    """Imports in ``parts`` (all others when empty) of ``forbidden`` modules or what is below them."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if part_of(path) not in parts:
            continue
        for module, line in imports(path):
            below = any(module == name or module.startswith(f"{name}.") for name in forbidden)
            if below and not any(module == name or module.startswith(f"{name}.") for name in allowed):
                found.append(f"{path.relative_to(REPOSITORY)}:{line} imports {module}")
    return found


# The rooms of runtime/: a room may import those before it. Files beside the rooms may import all of them.
ROOMS = ("comm", "job", "stock", "iteration", "recovery", "membership", "checkpoint")
ENGINE = f"{NAME}.runtime.engine"
# These name the whole engine, for its type alone: what ties them into one circle. To be emptied; add nothing.
NAMES_THE_ENGINE = {
    "runtime/stock/built_state.py",
    "runtime/stock/hosting.py",
}
MOST_LINES_OF_A_FILE = 450
MOST_LINES_OF_A_FUNCTION = 50

ALL_PARTS = {part_of(path) for path in PACKAGE.rglob("*.py")}
OWN = {f"{NAME}.{part}" for part in ALL_PARTS}


def test_core_imports_only_itself_and_the_standard_library() -> None:
    found = []
    for path in sorted((PACKAGE / "core").rglob("*.py")):
        for module, line in imports(path):
            top = module.split(".")[0]
            if top not in sys.stdlib_module_names and not f"{module}.".startswith(f"{NAME}.core."):
                found.append(f"{path.relative_to(REPOSITORY)}:{line} imports {module}")
    assert found == []


@pytest.mark.parametrize(("one", "other"), [("elastic", "runtime"), ("runtime", "elastic")])
def test_elastic_and_runtime_never_import_each_other(one: str, other: str) -> None:
    assert offences({one}, {f"{NAME}.{other}"}) == []


def test_torch_and_deepspeed_stay_in_runtime_and_models() -> None:
    others = ALL_PARTS - {"runtime", "models", "elastic", "testing", "config", "__init__"}
    assert offences(others, {"torch", "deepspeed"}) == []


def test_elastic_uses_of_torch_only_the_elastic_agent() -> None:
    allowed = ("torch.distributed.elastic",)
    assert offences({"elastic", "testing"}, {"torch", "deepspeed"}, allowed=allowed) == []


def test_config_uses_only_deepspeeds_loader_and_only_when_called() -> None:
    tree = ast.parse((PACKAGE / "config" / "section.py").read_text(encoding="utf-8"))
    at_the_top = {
        alias for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for alias in _names(node)
    }
    assert not {name for name in at_the_top if name.split(".")[0] in ("torch", "deepspeed")}
    everywhere = {
        module
        for module, _ in imports(PACKAGE / "config" / "section.py")
        if module.split(".")[0] in ("torch", "deepspeed")
    }
    assert all("tensor_parallel.init_utils" in module for module in everywhere)


def test_trust_stands_on_the_standard_library() -> None:
    assert offences({"trust"}, OWN - {f"{NAME}.trust", f"{NAME}.errors", f"{NAME}.protocol"}) == []
    assert offences({"trust"}, {"torch", "deepspeed", "msgpack", "grpc", "psutil"}) == []


def test_models_are_usable_without_the_rest() -> None:
    assert offences({"models"}, OWN - {f"{NAME}.models", f"{NAME}.errors", f"{NAME}.suggest"}) == []


def runtime_imports() -> dict[str, set[str]]:
    """By module of runtime/, the modules of runtime/ that it imports, for types too; without packages themselves."""
    files = {module_of(path): path for path in (PACKAGE / "runtime").rglob("*.py") if path.name != "__init__.py"}
    return {
        module: {imported for imported, _ in imports(path) if imported in files and imported != module}
        for module, path in files.items()
    }


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)


def file_of(module: str) -> str:
    """As in the lists above."""
    return "/".join(module.split(".")[1:]) + ".py"


def level_of(module: str) -> int:
    """The place of a module's room in their order."""
    _, _, room, *rest = module.split(".")
    return ROOMS.index(room) if rest else len(ROOMS)


def test_every_folder_of_runtime_has_its_place_in_the_order() -> None:
    folders = {path.parent.relative_to(PACKAGE / "runtime").parts[:1] for path in (PACKAGE / "runtime").rglob("*.py")}
    assert folders == {(), *((room,) for room in ROOMS)}


def test_rooms_import_only_the_rooms_before_them() -> None:
    found = {
        f"{file_of(module)} imports {imported}"
        for module, others in runtime_imports().items()
        for imported in others
        if level_of(module) < level_of(imported) and not (imported == ENGINE and file_of(module) in NAMES_THE_ENGINE)
    }
    assert found == set()


def test_those_that_name_the_engine_do_so_for_its_type_alone() -> None:
    named = {
        file_of(module)
        for module, others in runtime_imports().items()
        if ENGINE in others and level_of(module) < len(ROOMS)
    }
    assert named - NAMES_THE_ENGINE == set(), "say what it uses as arguments or in a protocol"
    for name in named:
        tree = ast.parse((PACKAGE / name).read_text(encoding="utf-8"))
        at_run_time = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == ENGINE]
        assert not at_run_time, f"{name} imports the engine when it runs"


def test_no_import_circle_in_runtime_but_through_the_engines_type() -> None:
    graph = runtime_imports()
    beside = "runtime/owner_changes.py"
    rooms = [module for module in graph if module.split(".")[2] in ROOMS or file_of(module) == beside]
    assert {file_of(module) for module in rooms if ENGINE in graph[module]} == NAMES_THE_ENGINE
    for module, others in graph.items():
        if file_of(module) in NAMES_THE_ENGINE:
            others.discard(ENGINE)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


def test_two_levels_and_a_kind_stand_above_stocks_engine() -> None:
    stock = importlib.import_module("deepspeed.runtime.pipe.engine").PipelineEngine
    importlib.import_module(f"{NAME}.runtime.catching_up_engine")
    own = [kind for kind in subclasses(stock) if kind.__module__.startswith(f"{NAME}.")]
    levels = {kind.__name__: [level.__name__ for level in kind.__mro__[: kind.__mro__.index(stock)]] for kind in own}
    two = ["BambooPipelineEngine", "ScriptEngine"]
    assert levels == {
        "ScriptEngine": two[1:],
        "BambooPipelineEngine": two,
        "CatchingUpEngine": ["CatchingUpEngine", *two],
    }, "make a part of it that gets what it uses as arguments"


def test_every_class_above_stocks_engine_is_among_these() -> None:
    """The test before sees only what is imported."""
    based = {
        node.name
        for path in (PACKAGE / "runtime").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id.endswith("Engine") for base in node.bases)
        and not any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
    }
    assert based == {"ScriptEngine", "BambooPipelineEngine", "CatchingUpEngine", "CapturedFiles"}


def test_files_are_short() -> None:
    long = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if len(path.read_text(encoding="utf-8").splitlines()) > MOST_LINES_OF_A_FILE
    }
    assert long == set(), "split what is too long"


def test_functions_are_short() -> None:
    long = {
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MOST_LINES_OF_A_FUNCTION
    }
    assert long == set(), "split what is too long"


def test_imports_are_found_in_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "REPOSITORY", tmp_path)
    file = tmp_path / NAME / "core" / "probe.py"
    file.parent.mkdir(parents=True)
    file.write_text("import torch.nn as nn\ndef f():\n    from ..runtime import engine\n    from . import grid\n")
    found = {module for module, _ in imports(file)}
    assert found == {
        "torch.nn",
        f"{NAME}.runtime",
        f"{NAME}.runtime.engine",
        f"{NAME}.core",
        f"{NAME}.core.grid",
    }


def test_what_the_package_offers() -> None:
    offered = getattr(deepspeed_bamboo, "__all__", [])
    assert sorted(offered) == sorted(OFFERED)
    for name in offered:
        assert hasattr(deepspeed_bamboo, name)


def subclasses(kind: type) -> Iterator[type]:
    """All classes below ``kind``."""
    for below in kind.__subclasses__():
        yield below
        yield from subclasses(below)


def _names(node: ast.Import | ast.ImportFrom) -> set[str]:
    return {node.module or ""} if isinstance(node, ast.ImportFrom) else {alias.name for alias in node.names}
