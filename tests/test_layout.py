"""The directions of imports (architecture 3), and what the package offers at its top."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
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


def _names(node: ast.Import | ast.ImportFrom) -> set[str]:
    return {node.module or ""} if isinstance(node, ast.ImportFrom) else {alias.name for alias in node.names}
