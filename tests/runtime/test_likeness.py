"""Descriptions of stages, and making one stage like another; without processes."""

from __future__ import annotations

import copy
from collections import deque
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed_bamboo.core.replica_differences import differences, without_attributes
from deepspeed_bamboo.runtime.comm.encoding import decode, encode
from deepspeed_bamboo.runtime.stock.description import describe
from deepspeed_bamboo.runtime.stock.likeness import _own, liken, take_root_hooks
from deepspeed_bamboo.runtime.stock.optimizers import made_again, maker_for, problem_with
from deepspeed_bamboo.runtime.stock.plain_forms import CodeOfTheScript, Parts, form_of, is_known, shown, value_of
from deepspeed_bamboo.runtime.stock.separate import ids_of, separate

CPU = torch.device("cpu")


class Around(nn.Module):
    """Put around a layer."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.more, self.width = layer, nn.Linear(width, width, bias=False), width

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.more(x)


class Stage(nn.Module):
    """Like a PipelineModule that holds ``layers`` by number."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        self.forward_funcs = list(layers)
        for index, layer in enumerate(layers):
            self.add_module(str(index), layer)


def stage(*widths: int) -> Stage:
    return Stage(*(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for width in widths))


def described(module: Stage, optimizer: Any = None) -> Any:
    """As it arrives at another worker."""
    return decode(encode(describe(module, optimizer)))


def test_two_stages_from_the_same_specs_are_alike() -> None:
    assert differences(described(stage(2, 3)), described(stage(2, 3))) == ()


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def test_functions_that_differ_are_named_in_words() -> None:
    owner, replica = stage(2, 3), stage(2, 3)
    owner.forward_funcs[1].forward = doubled
    line = doubled.__code__.co_firstlineno
    named = f"the function doubled (line {line} of {__name__})"
    (problem,) = differences(described(owner), described(replica))
    assert problem == f"layer 1: module 1, attributes has forward {named} with its owner and nothing in a replica"
    has, would = (["function", "here", "f", 7, checksum, ["plain", None]] for checksum in (1, 2))
    (problem,) = differences({**described(owner), "forward": has}, {**described(owner), "forward": would})
    one = "the function f (line 7 of here)"
    assert problem == (
        f"the stage has forward {one} with its owner and {one}, but of other code or with other values, in a replica"
    )


def test_attributes_can_be_left_out_of_a_comparison() -> None:
    owner, replica = stage(2, 3), stage(2, 3)
    owner.forward_funcs[0].seen = owner.forward_funcs[1][0].weight.noted = object()
    assert len(differences(described(owner), described(replica))) == 2
    assert differences(without_attributes(described(owner)), without_attributes(described(replica))) == ()
    owner.forward_funcs[0].requires_grad_(False)
    assert differences(without_attributes(described(owner)), without_attributes(described(replica))) != ()


def change(module: Stage) -> None:
    """What scripts do to a stage."""
    for index, layer in enumerate(module.forward_funcs):
        layer[0] = Around(layer[0], layer[0].in_features)
        layer.number = index
        layer.register_forward_hook(lambda _, inputs, output, index=index: output * (index + 1))
    module.bfloat16()
    for name, parameter in module.named_parameters():
        parameter.original = name
        parameter.requires_grad_("more" in name)
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient, name=name: gradient * len(name))


def test_structure_types_freezing_notes_and_hooks_are_made_again_with_their_values() -> None:
    owner, replica = stage(2, 3), stage(2, 3)
    change(owner)
    wanted = described(owner)
    assert differences(wanted, described(replica)) != ()
    liken(replica, wanted, examples=[], device=CPU)
    assert differences(wanted, described(replica)) == ()
    replica.load_state_dict(owner.state_dict())
    x = torch.randn(4, 2, dtype=torch.bfloat16)
    for module in (owner, replica):
        module.eval()
        module.forward_funcs[0](x).sum().backward()
    gradients = [
        [p.grad for p in module.forward_funcs[0].parameters() if p.requires_grad] for module in (owner, replica)
    ]
    assert gradients[0] and all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert not {id(p) for p in owner.parameters()} & {id(p) for p in replica.parameters()}


def test_hooks_keep_the_options_with_which_they_were_registered() -> None:
    owner, replica = stage(2), stage(2)
    layer = owner.forward_funcs[0]
    layer.register_forward_hook(lambda _, inputs, named, output: 2 * output, with_kwargs=True, always_call=True)
    layer.register_forward_hook(lambda _, inputs, output: 3 * output)
    layer.register_forward_pre_hook(lambda _, inputs, named: ((inputs[0] + 1,), named), with_kwargs=True)
    assert differences(described(owner), described(replica)) != ()
    liken(replica, described(owner), examples=[owner], device=CPU)
    assert differences(described(owner), described(replica)) == ()
    replica.load_state_dict(owner.state_dict())
    x = torch.randn(4, 2)
    assert torch.equal(replica.forward_funcs[0](x), layer(x))
    layer.register_forward_hook(lambda _, inputs, output: output, always_call=True)
    before = described(owner)
    owner.forward_funcs[0]._forward_hooks_always_called.clear()
    assert differences(before, described(owner)) != (), "the options are compared, too"


def test_hooks_on_the_pipeline_module_itself_are_taken_over() -> None:
    template, module = stage(2), stage(2)
    template.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
    template.register_full_backward_hook(lambda *_: None)
    take_root_hooks(module, template)
    assert list(module._forward_pre_hooks.values()) == list(template._forward_pre_hooks.values())
    assert list(module._backward_hooks.values()) == list(template._backward_hooks.values())


def test_what_only_an_example_has_is_taken_from_there_and_never_its_parameters() -> None:
    owner, example, replica = stage(2), stage(5), stage(2)
    for module in (owner, example):
        change(module)
        module.forward_funcs[0][0].kept = object()
    liken(replica, described(owner), examples=[example], device=CPU)
    assert differences(described(owner), described(replica)) == ()
    assert replica.forward_funcs[0][0].kept is example.forward_funcs[0][0].kept
    assert ids_of([replica]) & ids_of([example]) == set()


def test_what_can_not_be_made_shows_with_layer_name_and_both_values() -> None:
    owner, replica = stage(2, 2), stage(2, 2)
    owner.forward_funcs[1][0].kept = object()
    liken(replica, described(owner), examples=[], device=CPU)
    (text,) = differences(described(owner), described(replica))
    assert "layer 1: module 1.0" in text and "kept" in text and "builtins.object" in text and "nothing" in text


def test_the_first_differences_are_named_and_the_rest_counted() -> None:
    owner = stage(*[2] * 9)
    for parameter in owner.parameters():
        parameter.requires_grad_(False)
    texts = differences(described(owner), described(stage(*[2] * 9)))
    assert len(texts) == 7 and texts[-1] == "and 30 more differences"


def test_layers_that_share_a_model_become_their_own_and_share_within_the_stage() -> None:
    model = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2), "both": nn.Linear(2, 2)})

    class Part(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.own, self.both, self.names = model[name], model["both"], [name]

    first, second = Stage(Part("one")), Stage(Part("two"), Part("one"))
    separate(second, taken=ids_of([first]))
    assert ids_of([first]) & ids_of([second]) == set()
    assert second.forward_funcs[0].both is second.forward_funcs[1].both is second.get_submodule("0.both")
    untouched = Stage(nn.Linear(2, 2))
    layer = untouched.forward_funcs[0]
    separate(untouched, taken=ids_of([first]))
    assert untouched.forward_funcs[0] is layer


def plus(value: int, *, more: int = 0) -> int:
    return value + more


@pytest.mark.parametrize(
    "value",
    [
        3,
        "text",
        [1, (2, None)],
        {"a": [1.5]},
        torch.bfloat16,
        {"at": torch.device("cpu")},
        plus,
        partial(plus, more=4),
        [plus, 1],
        {1: plus},
    ],
)
def test_values_are_made_again_from_their_forms(value: Any) -> None:
    form = decode(encode(form_of(value, Parts({}, {}))))
    made = value_of(form, Parts({}, {}), CodeOfTheScript())
    assert is_known(form) and repr(form_of(made, Parts({}, {}))) == repr(form) and shown(form)
    if isinstance(value, partial):
        assert made(1) == 5


def test_a_function_is_made_only_from_code_that_is_here() -> None:
    factor = 3
    form = form_of(lambda x, add=1: x * factor + add, Parts({}, {}))
    assert value_of(form, Parts({}, {}), CodeOfTheScript())(2) == 7
    elsewhere = [*form[:4], form[4] + 1, *form[5:]]
    with pytest.raises(LookupError, match="lambda"):
        value_of(elsewhere, Parts({}, {}), CodeOfTheScript())
    assert not is_known(form_of(object(), Parts({}, {})))


def test_an_optimizer_object_is_made_again_for_another_stage_with_its_owners_groups() -> None:
    owner, replica, own = stage(2), stage(2), stage(3)

    def made(module: Stage) -> torch.optim.Optimizer:
        weights = [p for n, p in module.named_parameters() if n.endswith("weight")]
        others = [p for n, p in module.named_parameters() if not n.endswith("weight")]
        groups = [{"params": weights, "weight_decay": 0.3}, {"params": others, "betas": (0.5, 0.6), "name": "others"}]
        return torch.optim.AdamW(groups, lr=0.02, amsgrad=True)

    wanted = described(owner, made(owner))["optimizer"]
    maker = maker_for(made(own), configured=torch.optim.SGD, described=wanted, module=replica)
    optimizer = maker(list(replica.parameters()))
    assert describe(replica, optimizer)["optimizer"] == wanted
    assert optimizer.param_groups[1]["name"] == "others" and optimizer.defaults["amsgrad"]


def test_functions_and_the_configuration_give_the_owners_groups_too() -> None:
    owner, replica = stage(2), stage(2)
    by_name = torch.optim.SGD([{"params": [p]} for p in owner.parameters()], lr=0.1)
    wanted = described(owner, by_name)["optimizer"]
    configured = partial(torch.optim.SGD, lr=0.1)
    for source in (None, configured):
        maker = maker_for(source, configured=configured, described=wanted, module=replica)
        assert describe(replica, maker(replica.parameters()))["optimizer"] == wanted
    own = maker_for(configured, configured=partial(torch.optim.Adam), described=None, module=replica)
    made = own(replica.parameters())
    assert type(made) is torch.optim.SGD
    assert list(map(id, made.param_groups[0]["params"])) == list(map(id, replica.parameters()))


def test_an_optimizer_that_can_not_be_made_again_is_found_at_the_start() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]

    class Odd(torch.optim.SGD):
        def __init__(self, parameters: Any, secret: int, lr: float = 0.5) -> None:
            super().__init__(parameters, lr=lr)

    class Hidden(torch.optim.SGD):
        def __init__(self, parameters: Any, lr: float = 0.5, how: str = "slowly") -> None:
            super().__init__(parameters, lr=lr)
            self.manner = how

    assert "Odd can't be made again" in str(problem_with(Odd(parameters, 3)))
    assert "manner" in str(problem_with(Hidden(parameters, how="fast")))
    for fine in (Hidden(parameters), torch.optim.AdamW(parameters, eps=1e-5, foreach=False), None, made_again):
        assert problem_with(fine) is None
    adam = torch.optim.Adam(copy.copy(parameters), lr=0.3, betas=(0.1, 0.2))
    assert made_again(adam, adam.param_groups).param_groups[0]["betas"] == (0.1, 0.2)


def test_data_that_an_example_holds_are_copied_wherever_they_are() -> None:
    tensor = torch.ones(2)
    held = {"by key": {1: tensor}, "list": [tensor, "text"], "tuple": (tensor, [tensor]), "queue": deque([tensor], 3)}
    own = _own(held)
    assert repr(own) == repr(held) and own["queue"].maxlen == 3
    tensor.zero_()
    assert "0." not in repr(own)
