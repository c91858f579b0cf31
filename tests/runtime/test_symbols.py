"""``stock/symbols.py`` names all of DeepSpeed's and torch's insides that the runtime touches, and finds them."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import deepspeed_bamboo.runtime
from deepspeed_bamboo.errors import UpgradeError
from deepspeed_bamboo.runtime.stock.symbols import SYMBOLS, applies, check_symbols, find_missing

RUNTIME = Path(deepspeed_bamboo.runtime.__file__).parent
ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine"
OPTIMIZERS = (
    "deepspeed.runtime.bf16_optimizer:BF16_Optimizer",
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
    "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer",
    "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer",
)
# Who holds an object of stock's, by what the runtime calls the variable.
HOLDERS = {
    **dict.fromkeys(("engine", "_engine"), (ENGINE,)),
    **dict.fromkeys(("optimizer", "_optimizer"), OPTIMIZERS),
    **dict.fromkeys(("module", "template", "new_module"), ("deepspeed.runtime.pipe.module:PipelineModule",)),
    "checkpoint_engine": ("deepspeed.runtime.checkpoint_engine.checkpoint_engine:CheckpointEngine",),
    "distributed_c10d": ("torch.distributed.distributed_c10d",),
    **dict.fromkeys(("world", "_world"), ("torch.distributed.distributed_c10d:_World",)),
}
# What DeepSpeed documents for users of its engine, and what any optimizer or module of torch has.
PUBLIC = {
    *(
        "device",
        "eval_batch",
        "load_checkpoint",
        "save_checkpoint",
        "train_batch",
        "train_batch_size",
        "set_train_batch_size",
        "train_micro_batch_size_per_gpu",
        "barrier",
    ),
    *("load_state_dict", "state_dict", "state", "param_groups", "zero_grad", "register_step_pre_hook"),
    *("parameters", "buffers", "named_parameters", "named_buffers", "train", "training", "to", "init_process_group"),
}
PUBLIC_IMPORTS = {
    *("deepspeed:comm", "deepspeed.pipe:LayerSpec", "deepspeed.pipe:PipelineModule", "deepspeed.pipe:TiedLayerSpec"),
    *("deepspeed.utils:groups", "deepspeed.utils:logger"),
    *("torch.distributed:distributed_c10d", "torch:distributed", "torch:nn"),
}
# Private names of Python's.
NOT_STOCK = {"_asdict", "_exit", "_getframe", "_replace"}


@cache
def sources() -> dict[Path, ast.Module]:
    files = (path for path in sorted(RUNTIME.rglob("*.py")) if path.name != "symbols.py")
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}


def attributes(kind: type[ast.AST] = ast.Attribute) -> Iterator[tuple[Path, Any]]:
    for path, tree in sources().items():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, kind))


def holder(node: ast.expr) -> str:
    """The last name of an expression: ``optimizer`` of ``self._engine.optimizer``."""
    if isinstance(node, ast.Call):
        return f"{holder(node.func)}()"
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def engine_classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    """The classes of the runtime that stand in the place of stock's engine."""
    known = {"PipelineEngine"}
    found: dict[str, tuple[Path, ast.ClassDef]] = {}
    while True:
        more = {
            node.name: (path, node)
            for path, node in attributes(ast.ClassDef)
            if node.name not in found and known & {holder(base) for base in node.bases}
        }
        if not more:
            yield from found.values()
            return
        found.update(more)
        known.update(more)


def resolve(where: str) -> Any:
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    for part in path.split(".") if path else ():
        owner = getattr(owner, part)
    return owner


@cache
def stock_names(where: str) -> frozenset[str]:
    """What a class of stock's defines, or sets on itself; or what a module defines."""
    owner = resolve(where)
    if not isinstance(owner, type):
        return frozenset(vars(owner))
    names: set[str] = set()
    for part in owner.__mro__:
        if part.__module__.startswith("deepspeed"):
            names.update(vars(part))
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(part)))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and holder(node.value) == "self":
                    names.add(node.attr)
    return frozenset(name for name in names if not name.startswith("__"))


def used_names() -> Iterator[tuple[str, tuple[str, ...], str]]:
    """(place, owners, name) of whatever the runtime reads, sets or overrides on an object of stock's."""
    for path, node in attributes():
        owners = HOLDERS.get(holder(node.value))
        if owners is not None:
            yield f"{path.name}:{node.lineno}", owners, node.attr
    for path, definition in engine_classes():
        for part in ast.walk(definition):
            if isinstance(part, ast.Attribute) and holder(part.value) in ("self", "super()"):
                yield f"{path.name}:{part.lineno}", (ENGINE,), part.attr
        for part in definition.body:
            if isinstance(part, ast.FunctionDef):
                yield f"{path.name}:{part.lineno}", (ENGINE,), part.name


def own_private_names() -> set[str]:
    """Private names that the runtime itself defines."""
    names = {node.name for kind in (ast.FunctionDef, ast.ClassDef) for _, node in attributes(kind)}
    names |= {node.attr for _, node in attributes() if isinstance(node.ctx, ast.Store) and holder(node.value) == "self"}
    return names | {node.id for _, node in attributes(ast.Name) if isinstance(node.ctx, ast.Store)}


def listed(*owners: str) -> set[str]:
    return {name for where in owners or SYMBOLS for name in SYMBOLS[where]}


def test_everything_is_there_and_found_quickly() -> None:
    check_symbols()
    started = time.process_time()
    check_symbols()
    assert time.process_time() - started < 0.02


def test_what_is_used_of_stocks_objects_is_listed() -> None:
    missing = {
        f"{place}: {name} of {owners[0]}"
        for place, owners, name in used_names()
        if name not in PUBLIC | listed(*owners) and any(name in stock_names(owner) for owner in owners)
    }
    assert missing == set()


def test_private_names_are_the_runtimes_own_or_listed() -> None:
    allowed = own_private_names() | NOT_STOCK | listed()
    strangers = {
        f"{path.name}:{node.lineno} {node.attr}"
        for path, node in attributes()
        if node.attr.startswith("_") and not node.attr.endswith("__") and node.attr not in allowed
    }
    assert strangers == set()


def test_private_names_of_others_are_listed_whatever_they_are_called_here() -> None:
    """A name that the runtime defines too, on an object that is not its own."""
    own = {"self", "cls", "super()", "other"}
    strangers = {
        f"{path.name}:{node.lineno} {holder(node.value)}.{node.attr}"
        for path, node in attributes()
        if node.attr.startswith("_") and not node.attr.endswith("__") and holder(node.value) not in own
    }
    assert {stranger for stranger in strangers if stranger.split(".")[-1] not in listed() | NOT_STOCK} == set()


def test_what_is_imported_is_listed() -> None:
    known = PUBLIC_IMPORTS | set(SYMBOLS) | {f"{where}:{name}" for where, names in SYMBOLS.items() for name in names}
    strangers = set()
    for path, node in attributes(ast.ImportFrom):
        module = node.module or ""
        if module.split(".")[0] in ("deepspeed", "torch"):
            strangers |= {f"{path.name}: {module}:{alias.name}" for alias in node.names} - {
                f"{path.name}: {name}" for name in known
            }
    assert strangers == set()


def test_everything_that_is_listed_is_used() -> None:
    mentioned = {node.attr for _, node in attributes()}
    mentioned |= {node.value for _, node in attributes(ast.Constant) if isinstance(node.value, str)}
    mentioned |= {node.name for _, node in attributes(ast.FunctionDef)}
    mentioned |= {alias.name for _, node in attributes(ast.ImportFrom) for alias in node.names}
    assert listed() - mentioned == set()


def test_no_name_of_the_engines_own_is_stocks_by_accident() -> None:
    """A new version of stock's engine may set a name that the plugin's engine has for something else."""
    overridden = PUBLIC | listed(ENGINE) | {"global_steps"}
    own = {
        part.attr
        for _, definition in engine_classes()
        for part in ast.walk(definition)
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and holder(part.value) == "self"
    }
    own |= {
        part.name for _, definition in engine_classes() for part in definition.body if isinstance(part, ast.FunctionDef)
    }
    assert (own & stock_names(ENGINE)) - overridden == set()


def test_a_missing_name_is_said_with_its_place_and_the_versions() -> None:
    symbols = {
        ENGINE: {"_exec_forward_pass": "is there", "_exec_backward_walk": "the backward"},
        "deepspeed.runtime.elsewhere:Thing": {"_a": "a", "_b": "b"},
        "torch.distributed": {"_abort_everything": "lets go"},
    }
    with pytest.raises(UpgradeError) as caught:
        check_symbols(symbols)
    assert caught.value.missing == (
        f"{ENGINE}._exec_backward_walk (the backward)",
        "deepspeed.runtime.elsewhere:Thing (all of it)",
        "torch.distributed:_abort_everything (lets go)",
    )
    for part in ("0.19.8", "2.11", "Install", "_exec_backward_walk"):
        assert part in str(caught.value)


def test_an_attribute_of_instances_is_found_without_one() -> None:
    assert list(find_missing({ENGINE: {"pipe_buffers": "set by the constructor", "pipe_bufferz": "nowhere"}})) == [
        f"{ENGINE}.pipe_bufferz (nowhere)"
    ]


def test_what_only_gpus_have_is_looked_for_there_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    assert not applies("torch.distributed:ProcessGroupNCCL")
    monkeypatch.setattr("torch.version.cuda", "12.8")
    assert applies("torch.distributed:ProcessGroupNCCL")
    assert all(applies(where) for where in SYMBOLS)


def test_each_has_a_reason() -> None:
    assert all(why for names in SYMBOLS.values() for why in names.values())
