"""``deepspeed_bamboo.initialize``: stock's function, with the plugin's engine where the configuration asks for it."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

from deepspeed_bamboo.config.requirements import ModelKind, ModelShape, validate_deepspeed_settings
from deepspeed_bamboo.config.section import SECTION, BambooConfig, load_deepspeed_settings, parse_bamboo_section
from deepspeed_bamboo.coordination import connect
from deepspeed_bamboo.core.seating import Seat
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.protocol import CONFIG
from deepspeed_bamboo.runtime.job.session import WorkerIdentity, WorkerSession
from deepspeed_bamboo.runtime.job.standalone import is_standalone, standalone_job
from deepspeed_bamboo.runtime.stock.given_parameters import GivenParameters
from deepspeed_bamboo.runtime.stock.meeting_layers import meeting_layers
from deepspeed_bamboo.runtime.stock.patches.entry_points import engine_class
from deepspeed_bamboo.runtime.stock.patches.full_values import count_full_values
from deepspeed_bamboo.runtime.stock.root_modules import modules_of_its_own
from deepspeed_bamboo.runtime.stock.script_groups import ScriptGroups
from deepspeed_bamboo.runtime.stock.scripted_layers import scripted_layers
from deepspeed_bamboo.runtime.stock.start_block import StartBlock, block_of
from deepspeed_bamboo.runtime.stock.strangers import listed, problem_with_strangers
from deepspeed_bamboo.runtime.stock.symbols import require_symbols
from deepspeed_bamboo.runtime.stock.world import has_engine

if TYPE_CHECKING:
    from deepspeed_bamboo.runtime.engine import BambooPipelineEngine

Initialize = Callable[..., Any]


def initialize(*args: Any, **kwargs: Any) -> Any:
    """Same arguments and result as ``deepspeed.initialize``: (engine, optimizer, dataloader, lr_scheduler).

    Without a "bamboo" section, or with ``"enabled": false`` in it, this is ``deepspeed.initialize``. With it
    the engine is a :class:`BambooPipelineEngine`. Raises ConfigError for settings, models and optimizers that
    cannot be recovered after a loss, and UpgradeError for a DeepSpeed or torch that lacks what the plugin needs, both
    before anything is built.
    """
    return initialize_with(deepspeed.initialize, ScriptGroups(), *args, **kwargs)


def initialize_with(stock: Initialize, groups: ScriptGroups, *args: Any, **kwargs: Any) -> Any:
    """As :func:`initialize`, on top of ``stock`` (DeepSpeed's own function, which a launcher may have replaced).

    ``groups``: those that the script has made so far, and will make.
    """
    call = inspect.signature(stock).bind(*args, **kwargs)
    settings = _settings(call.arguments)
    section = None if settings is None else settings.get(SECTION, _section_of_environment())
    config = None if section is None else parse_bamboo_section(section)
    block = block_of(call.arguments.get("model"))
    if settings is None or config is None or not config.enabled:
        if block is not None:
            raise _needs_the_plugin(block.seat)
        return stock(*args, **kwargs)
    require_symbols()
    if call.arguments.get("model_parameters") is not None:
        call.arguments["model_parameters"] = listed(call.arguments["model_parameters"])
    _validate(settings, call.arguments, config, seat=None if block is None else block.seat)
    if has_engine():
        raise ConfigError(
            "this process has a bamboo engine already, and its workers come and go together with that one's stages; "
            'train the second model in a job of its own, or give it a configuration without the "bamboo" section '
            "before the first engine is made"
        )
    environment, etcd = dict(os.environ), None
    if is_standalone(os.environ):
        environment, etcd = standalone_job(os.environ)
    identity = WorkerIdentity.from_environment(environment)
    start = None if block is None else block.start
    session = WorkerSession(identity, coordinator=connect(environment), config=config, etcd=etcd, start=start)
    _take_apart(block, call.arguments)
    count_full_values()
    with engine_class(partial(_kind_of_engine(session), session=session, script_groups=groups)):
        return stock(*call.args, **call.kwargs)


def _section_of_environment() -> Any:
    """The section in the file that BAMBOO_CONFIG names, for scripts whose own configuration has none."""
    named = os.environ.get(CONFIG)
    return load_deepspeed_settings(named).get(SECTION) if named else None


def _needs_the_plugin(seat: Seat) -> ConfigError:
    return ConfigError(
        f"{seat.workers} workers can't train {seat.grid.pipelines} x {seat.grid.stages} (pipelines x stages) without "
        f'the plugin, and this configuration has no enabled "bamboo" section; start {len(seat.grid)} workers, or add '
        "the section"
    )


def _take_apart(block: StartBlock | None, arguments: dict[str, Any]) -> None:
    """Leave one stage of the block in the model, and its parameters in what is to be trained; collective."""
    model, given = arguments["model"], arguments.get("model_parameters")
    parameters = None if given is None else GivenParameters.of(given, model)
    if block is not None:
        block.given = parameters
        block.take_apart(model)
    if given is not None and parameters is not None:
        arguments["model_parameters"] = parameters.left_in(model, given)


def _kind_of_engine(session: WorkerSession) -> type[BambooPipelineEngine]:
    # Not before the check: what these import of DeepSpeed may be missing.
    from deepspeed_bamboo.runtime.catching_up_engine import CatchingUpEngine
    from deepspeed_bamboo.runtime.engine import BambooPipelineEngine

    begins_elsewhere = session.identity.joining or session.config.checkpoint.dir is not None
    return CatchingUpEngine if begins_elsewhere else BambooPipelineEngine


def is_bamboo_engine(engine: Any) -> bool:
    """Whether ``engine`` is one of the plugin's."""
    module = sys.modules.get("deepspeed_bamboo.runtime.engine")
    return module is not None and isinstance(engine, module.BambooPipelineEngine)


def _settings(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """The DeepSpeed configuration, found where stock looks for it; None leaves the complaint to stock."""
    source = arguments.get("config")
    if source is None:
        source = arguments.get("config_params")
    if source is None:
        source = getattr(arguments.get("args"), "deepspeed_config", None)
    return None if source is None else load_deepspeed_settings(source)


def _validate(
    settings: Mapping[str, Any], arguments: Mapping[str, Any], config: BambooConfig, *, seat: Seat | None
) -> None:
    model = arguments.get("model")
    kind = ModelKind.OTHER
    if isinstance(model, DualPipeVModule):
        kind = ModelKind.DUALPIPEV
    elif isinstance(model, PipelineModule):
        kind = ModelKind.PIPELINE
    validate_deepspeed_settings(
        settings,
        model=kind,
        model_name=type(model).__name__,
        stages=model.num_pipeline_stages() if isinstance(model, PipelineModule) else None,
        world_size=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        shape=_shape(model) if isinstance(model, PipelineModule) else None,
        further=(
            *_problems_with_pipelines(model, config),
            *_problems_with_layers(model, config, seat),
            *_problems_with_optimizer(arguments.get("optimizer"), seat, configured=bool(settings.get("optimizer"))),
            *_problems_with_parameters(model, arguments.get("model_parameters"), arguments.get("optimizer"), seat),
        ),
    )


def _shape(model: PipelineModule) -> ModelShape:
    topology = model._topo
    axes = {name: topology.get_dim(name) for name in topology.get_axis_names()}
    coordinates = [topology.get_coord(rank) for rank in range(topology.world_size())]
    places = tuple((getattr(c, "data", 0), getattr(c, "pipe", 0)) for c in coordinates)
    return ModelShape(axes, places, tuple(model.parts))


def _problems_with_pipelines(model: Any, config: BambooConfig) -> Iterator[str]:
    """Where the module was made for another number of pipelines than the section says."""
    wanted = config.topology.pipelines
    if wanted is None or not isinstance(model, PipelineModule) or model._topo.get_dim("data") == wanted:
        return
    yield (
        f"topology.pipelines is {wanted}, but this script's PipelineModule was made for "
        f"{model._topo.get_dim('data')}. The module is made before the configuration is passed, so the number must be "
        "in the configuration that the launcher finds: name its file by --deepspeed_config, or by --bamboo_config "
        "before the script"
    )


def _problems_with_layers(model: Any, config: BambooConfig, seat: Seat | None) -> Iterator[str]:
    """Where layers of different workers meet within an iteration, or can't be made on another worker."""
    if not isinstance(model, PipelineModule):
        return
    yield from meeting_layers(model, ranks=model._topo.world_size())
    if config.redundancy.mode != "off" or (seat is not None and seat.workers < len(seat.grid)):
        yield from scripted_layers(model)
        yield from modules_of_its_own(model)


def _problems_with_optimizer(optimizer: Any, seat: Seat | None, *, configured: bool) -> Iterator[str]:
    """Where a worker hosts several stages from the start."""
    if seat is not None and seat.workers < len(seat.grid) and optimizer is None and not configured:
        yield (
            "there is no optimizer, neither in the configuration nor given to initialize, where "
            f"{seat.workers} workers host {len(seat.grid)} stages: one made later would be that of one stage of each "
            "worker. Name one in the configuration, pass a function (parameters -> optimizer), or start "
            f"{len(seat.grid)} workers"
        )
    if seat is not None and isinstance(optimizer, torch.optim.Optimizer):
        yield (
            f"optimizer is an object with the parameters of all stages of a worker, where {seat.workers} workers "
            f"host {len(seat.grid)} stages; pass a function (parameters -> optimizer), which makes one for each"
        )


def _problems_with_parameters(model: Any, given: Any, optimizer: Any, seat: Seat | None) -> Iterator[str]:
    """Where some of what is to be trained belongs to no stage."""
    if not isinstance(model, PipelineModule):
        return
    if given is not None:
        yield from problem_with_strangers(given, model, where="model_parameters")
    if isinstance(optimizer, torch.optim.Optimizer) and seat is None:  # else it is refused anyway
        yield from problem_with_strangers(optimizer.param_groups, model, where="the optimizer")
