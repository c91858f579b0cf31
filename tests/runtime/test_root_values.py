"""What a script sets on its PipelineModule itself, which each worker has several times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.pipe import PipelineModule

from deepspeed_bamboo.runtime.stock.one_stage_only import OneStageOnly
from deepspeed_bamboo.runtime.stock.plain_values import MovingValues, accept_plain_values
from deepspeed_bamboo.runtime.stock.root_values import RootByHand
from deepspeed_bamboo.runtime.stock.schedule_by_hand import ScheduleByHand
from deepspeed_bamboo.runtime.stock.script_writes import ScriptWrites
from deepspeed_bamboo.runtime.stock.written import NOTHING


class Own(PipelineModule):
    """With attributes of its own, as one stage's module is; no constructor, which needs processes."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.activation_checkpoint_interval, self.is_checkpointable_results_interval = 0, None
        self.stage_id, self.num_stages, self.micro_offset, self.forward_funcs = 0, 2, 0, []
        self.strength, self.calls, self.history, self.owner = 1.0, 0, [], lambda: self
        self.precomputed = 0

    def _precompute_checkpointable_values(self) -> None:
        self.precomputed += 1


def test_what_the_script_sets_reaches_all_modules_and_what_forwards_move_none() -> None:
    told: list[str] = []
    root, own, others = RootByHand(told.append), Own(), [Own(), Own()]
    everything: list[Any] = [own, *others]
    root.leave(own)
    own.strength, own.activation_checkpoint_interval, own.micro_offset = 0.5, 2, 7
    own.is_checkpointable_results_interval = 2
    root.follow(own, everything)
    assert [(part.strength, part.activation_checkpoint_interval) for part in others] == [(0.5, 2)] * 2
    assert [part.precomputed for part in others] == [1, 1]
    assert [part.micro_offset for part in others] == [0, 0] and others[0].owner() is others[0]
    own.calls += 1  # by a forward
    root.leave(own)
    assert not told
    own.calls, own.strength = 5, 0.25  # in an evaluation; by the script
    root.follow(own, everything)
    assert [(part.calls, part.strength) for part in others] == [(0, 0.25)] * 2
    own.history.append(1)  # by a forward
    root.leave(own)
    [line] = told
    assert "history of the PipelineModule (Own)" in line
    root.follow(others[0], everything)  # another stage is shown now
    assert own.calls == 5


def test_what_is_set_on_what_the_script_gave_reaches_all_also_when_its_stage_is_elsewhere() -> None:
    """As long as the script has it; and the script reads there what it has set through the engine."""
    root, given, first, second = RootByHand(lambda text: None), Own(), Own(), Own()
    root.leave(given)
    modules: list[Any] = [first, second]
    assert root.follow(first, modules) == ()
    root.leave(first)
    given.strength, given.owner = 0.5, lambda: given
    first.activation_checkpoint_interval = first.is_checkpointable_results_interval = 2
    changes = root.follow(first, modules)
    assert sorted(change.name for change in changes) == ["activation_checkpoint_interval", "owner", "strength"]
    assert [(its.strength, its.owner()) for its in (given, *modules)] == [(0.5, its) for its in (given, *modules)]
    assert [its.activation_checkpoint_interval for its in (given, *modules)] == [2, 2, 2]
    assert [its.precomputed for its in (given, *modules)] == [1, 0, 1] and root.follow(first, modules) == ()
    root.restored(first, modules, changes)
    assert [its.strength for its in (given, *modules)] == [1.0] * 3
    root.write_again(first, modules, changes)
    assert [its.strength for its in (given, *modules)] == [0.5] * 3 and root.follow(first, modules) == ()
    given.strength = 0.25
    assert root.follow(first, []) != () and first.strength == 0.25, "a worker that stands by, for what it gets later"
    first.calls += 1
    root.leave(first)
    given.calls = 7
    assert root.follow(first, modules) == () and first.calls == 1, "forwards move it"


def test_on_its_way_to_the_jobs_step_a_script_sets_what_the_jobs_state_lacks() -> None:
    root, own, other = RootByHand(lambda text: None), Own(), Own()
    root.leave(own)
    own.history = [1]  # before its first call
    for module, calls in ((own, 3), (other, 8)):  # by the job's state
        module.strength, module.calls = 0.5, calls
    of_the_job = [(own, {"strength": 0.5, "calls": 3}), (other, {"strength": 0.5, "calls": 8})]
    own.strength, own.bend = 0.125, (2.0,)
    root.come_back(own, [own, other], of_the_job)
    assert [(its.strength, its.calls, its.history) for its in (own, other)] == [(0.5, 3, [1]), (0.5, 8, [1])]
    assert other.bend == (2.0,)
    own.strength = 0.25
    root.follow(own, [own, other])
    assert other.strength == 0.25


def test_a_loss_that_is_a_module_reaches_all_modules() -> None:
    """torch keeps it where a function is not. One with weights is each stage's own; all go back to what was before."""
    root, modules = RootByHand(lambda text: None), [Own(), Own()]
    own, other = modules
    for module in modules:
        module.loss_fn = torch.nn.functional.mse_loss
    root.leave(own)
    smooth, weighed = torch.nn.CrossEntropyLoss(label_smoothing=0.1), torch.nn.CrossEntropyLoss(weight=torch.ones(3))
    changes = []
    for loss in (smooth, weighed):
        own.loss_fn = loss
        changes += root.follow(own, modules)
    assert own.loss_fn is weighed and other.loss_fn is not weighed
    assert isinstance(other.loss_fn, torch.nn.CrossEntropyLoss) and torch.equal(other.loss_fn.weight, torch.ones(3))
    root.restored(own, modules, changes[1:])
    assert own.loss_fn is smooth and other.loss_fn is smooth
    root.restored(own, modules, changes[:1])
    assert [module.loss_fn for module in modules] == [torch.nn.functional.mse_loss] * 2
    root.write_again(own, modules, changes[:1])
    assert own.loss_fn is smooth and other.loss_fn is smooth and root.follow(own, modules) == ()


def test_numbers_that_a_subclass_counts_go_with_their_stage() -> None:
    own, shadow, moving = Own(), Own(), MovingValues()
    moving.look(own)
    assert moving.all_values(own) == {}, "what never moves may be another on each worker"
    own.calls += 1
    assert moving.look(own) == {"": {"calls": 1}}
    accept_plain_values(shadow, moving.values(own))
    assert shadow.calls == 1 and shadow.strength == 1.0


def test_what_forwards_of_the_running_step_have_set_is_not_taken_for_the_scripts() -> None:
    """Writes are followed before a step, and before its gradients are mirrored, when its forwards are done."""
    followed: list[Any] = []

    def nothing(*_: Any) -> tuple[()]:
        return ()

    def follow(module: Any, modules: Any) -> tuple[()]:
        followed.append(module)
        return ()

    writes: Any = SimpleNamespace(
        _of_the_job=False,
        _written=NOTHING,
        _detached=lambda: False,
        _host=SimpleNamespace(replicas=list, shown=nothing, owners=list),
        _alone=OneStageOnly(),
        _schedule=ScheduleByHand(),
        _shown=lambda: None,
        _root=lambda: "shown",
        _roots=SimpleNamespace(follow=follow),
        **dict.fromkeys(("_refuse_replaced_scheduler", "_find_scheduler", "_place_scheduler"), nothing),
        _follow_optimizers=nothing,
    )
    ScriptWrites.follow(writes)
    assert not followed
    ScriptWrites.follow(writes, modules=True)
    assert followed == ["shown"]
