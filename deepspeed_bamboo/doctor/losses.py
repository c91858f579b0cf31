"""Checks which machines the placement can lose."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed_bamboo.config.sections import is_on, zero_stage
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.loss_cost import loss_cost
from deepspeed_bamboo.core.placing.sites import WorkerSite
from deepspeed_bamboo.core.placing.solver import decide
from deepspeed_bamboo.doctor.finding import Finding, warning
from deepspeed_bamboo.doctor.subject import Subject

_SHOWN = 3


def check_losses(subject: Subject) -> Iterator[Finding]:
    """For several machines: those that the job can't lose without returning to a checkpoint."""
    names = [host.name for host in subject.hosts]
    if subject.grid is None or len(names) < 2 or len(set(names)) != len(names):
        return
    pipelines, stages = subject.grid
    workers = [WorkerSite(f"{host.name}/{slot}", host.name) for host in subject.hosts for slot in range(host.slots)]
    settings, mode = subject.settings, subject.section.redundancy.mode
    alike = not is_on(settings, "bf16") and not zero_stage(settings)
    decision = decide(Grid(pipelines, stages), workers, protected=mode != "off", alike=alike and pipelines > 1)
    fatal = [
        name
        for number, name in enumerate(decision.sites.nodes)
        if loss_cost(decision.placement, decision.sites.of_node(number)).fatal
    ]
    if not fatal:
        return
    shown = ", ".join(fatal[:_SHOWN]) + (f" and {len(fatal) - _SHOWN} more" if len(fatal) > _SHOWN else "")
    remedy = (
        'keep shadows (redundancy.mode "lazy")'
        if mode == "off"
        else "use more machines with fewer slots each, or more stages (ds_bamboo plan shows what lies where)"
    )
    what = f"the loss of {shown} ends the job: it would have a stage and everything that could replace it"
    if subject.section.checkpoint.dir is None:
        yield Finding(f"{what}, and checkpoint.dir is not set", f"{remedy}, and set checkpoint.dir")
    else:
        yield warning(f"{what}; started again it continues from its last checkpoint", remedy)
