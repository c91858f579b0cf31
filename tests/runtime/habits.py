"""Scripts that change model, optimizer and scheduler by themselves, as public ones do; with stock's engine and ours.

A habit is a class with what it does at each point of a script. Nothing in one knows the plugin.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import numpy
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.lr_scheduler import ConstantLR

from tests.runtime.scenarios import fresh_process_group, wait_for_joiners

WIDTH = 8
OUTPUTS = 4


class Block(nn.Module):
    """x + tanh(Linear) + Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)) + self.scale * self.outer(x)


class Last(nn.Module):
    """A layer of which each model has one."""

    def __init__(self) -> None:
        super().__init__()
        self.to_outputs = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.to_outputs(x)


class Habit:
    """A script that does nothing by itself."""

    dtype = torch.float32
    module_class: type[PipelineModule] = PipelineModule
    reused = False
    """Whether the script's loader writes each batch into the same tensors."""

    def layers(self) -> list[Any]:
        return [*(LayerSpec(Block) for _ in range(5)), LayerSpec(Last)]

    def built(self, module: PipelineModule) -> None:
        """After the PipelineModule is made."""

    def arguments(self, module: PipelineModule) -> dict[str, Any]:
        """Of ``deepspeed.initialize``."""
        return {"model_parameters": [p for p in module.parameters() if p.requires_grad]}

    def optimizer(self) -> dict[str, Any] | None:
        """The configuration's."""
        return {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}

    def started(self, engine: Any, optimizer: Any) -> None:
        """After ``initialize``."""

    def stepped(self, engine: Any, step: int) -> None:
        """After each ``train_batch``."""


class RatesByHand(Habit):
    """Two groups with values of their own, which change in every step, a torch scheduler besides."""

    def optimizer(self) -> None:
        return None

    def arguments(self, module: PipelineModule) -> dict[str, Any]:
        def make(parameters: Any) -> torch.optim.Optimizer:
            listed = list(parameters)
            groups = [
                {"params": [p for p in listed if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in listed if p.dim() < 2], "weight_decay": 0.0},
            ]
            return torch.optim.AdamW(groups, lr=0.01)

        return {"optimizer": make}

    def started(self, engine: Any, optimizer: Any) -> None:
        self.held = optimizer
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    def stepped(self, engine: Any, step: int) -> None:
        self.scheduler.step()
        self.held.param_groups[0]["weight_decay"] = 0.1 / (step + 2)
        self.held.param_groups[1]["betas"] = (0.9 - step / 20, 0.99)


class RatesByFunction(RatesByHand):
    """The same, with an optimizer that the function given to ``initialize`` keeps."""

    def arguments(self, module: PipelineModule) -> dict[str, Any]:
        make = super().arguments(module)["optimizer"]

        def keep(parameters: Any) -> torch.optim.Optimizer:
            self.held = make(parameters)
            return self.held

        return {"optimizer": keep}

    def started(self, engine: Any, optimizer: Any) -> None:
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.held, 0.8)


class Estimating(torch.optim.SGD):
    """Estimates in its own step, from the gradients of a stage, how far a step goes."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            squares = sum(float(p.grad.square().sum()) for p in group["params"] if p.grad is not None)
            group["lr"] *= 1.0 + 0.1 * squares / (1.0 + squares)
        return super().step(closure)


class EstimatedRate(Habit):
    """Its optimizer changes its own groups."""

    def optimizer(self) -> None:
        return None

    def arguments(self, module: PipelineModule) -> dict[str, Any]:
        return {"optimizer": lambda parameters: Estimating(parameters, lr=0.01)}


class TwoRates(Habit):
    """Two groups with rates of their own, which a scheduler reads and changes as it is made."""

    def arguments(self, module: PipelineModule) -> dict[str, Any]:
        weights = [p for p in module.parameters() if p.dim() > 1]
        rest = [p for p in module.parameters() if p.dim() <= 1]
        return {"model_parameters": [{"params": weights, "lr": 0.01}, {"params": rest, "lr": 0.003}]}


class OneRate(Habit):
    """One group, with another rate than the configuration's."""

    def arguments(self, module: PipelineModule) -> dict[str, Any]:
        return {"model_parameters": [{"params": list(module.parameters()), "lr": 0.003}]}


class MomentumByHand(Habit):
    """Halves Adam's first moments after some steps: of all stages that its worker has, as the plugin offers it."""

    def stepped(self, engine: Any, step: int) -> None:
        hosted = engine.hosted_optimizers().values() if hasattr(engine, "hosted_optimizers") else [engine.optimizer]
        for state in (state for optimizer in hosted for state in optimizer.state.values() if step % 2):
            state["exp_avg"].mul_(0.5)


class MomentumOfOne(Habit):
    """The same, of the one optimizer that it knows."""

    def stepped(self, engine: Any, step: int) -> None:
        for state in engine.optimizer.state.values() if step % 2 else ():
            state["exp_avg"].mul_(0.5)


class CompiledBlock(Block):
    """A layer that compiles itself, and one of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(self.inner, backend="eager")
        self.compile(backend="eager")


class Compiled(Habit):
    """Layers that torch compiles."""

    def layers(self) -> list[Any]:
        return [*(LayerSpec(CompiledBlock) for _ in range(5)), LayerSpec(Last)]


class ClippingByHand(Habit):
    """Another bound for gradients in each step."""

    dtype = torch.bfloat16

    def optimizer(self) -> dict[str, Any]:
        return {"type": "SGD", "params": {"lr": 0.3}}  # unlike Adam, it does not even out how gradients are scaled

    def stepped(self, engine: Any, step: int) -> None:
        engine.optimizer.clip_grad = 0.01 * (5 - step)


class Counted(PipelineModule):
    """Its own forward counts its calls, and multiplies by what the script sets."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls, self.factors = 0, (1.0,)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x * self.factors[0] * (1 + 0.01 * self.calls))


class OnTheModule(Habit):
    """What it sets on its PipelineModule itself, after the third step."""

    module_class = Counted

    def stepped(self, engine: Any, step: int) -> None:
        if step == 3:
            engine.module.set_checkpoint_interval(1)
            engine.module.factors = (0.8,)


class MastersByHand(Habit):
    """fp32 weights and moments changed by DeepSpeed's own functions, once after the third step."""

    dtype = torch.bfloat16
    after = 3

    def stepped(self, engine: Any, step: int) -> None:
        if step != self.after:
            return
        for parameter in engine.module.parameters():
            value, moment = safe_get_full_fp32_param(parameter), safe_get_full_optimizer_state(parameter, "exp_avg")
            if value is not None and moment is not None:
                safe_set_full_fp32_param(parameter, value * 0.5)
                safe_set_full_optimizer_state(parameter, moment * -3, "exp_avg")


class ScaleByHand(Habit):
    """Another scale of the loss in each step after the third, which the last digits show."""

    dtype = torch.float16

    def stepped(self, engine: Any, step: int) -> None:
        if step > 2:
            engine.optimizer.cur_scale = (0.3, 500.7, 0.1, 77.7, 0.013)[step % 5]


class CountsEvaluations(Block):
    """On whose number its output depends."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("evaluations", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.evaluations += 1
        return super().forward(x) / (1 + 0.1 * self.evaluations)


class Evaluating(Habit):
    """An evaluation after each step, which leaves traces in the model."""

    def layers(self) -> list[Any]:
        return [*(LayerSpec(CountsEvaluations) for _ in range(5)), LayerSpec(Last)]

    def started(self, engine: Any, optimizer: Any) -> None:
        self.data = _batches(100, first=0, dtype=self.dtype)

    def stepped(self, engine: Any, step: int) -> None:
        engine.eval_batch(self.data)


class CountingHooks(Habit):
    """Hooks that share what they keep: forwards count, gradients are scaled by the average of their norms."""

    def built(self, module: PipelineModule) -> None:
        calls, norms = {"forwards": 0}, torch.zeros(2)

        def forward(_: nn.Module, inputs: Any, output: Any) -> Any:
            calls["forwards"] += 1
            return output * (1 - 0.001 * calls["forwards"])

        def gradient(value: Tensor) -> Tensor:
            norms.mul_(0.9).add_(0.1 * value.norm())
            return value * (0.5 / (1 + norms[0]))

        for parameter in module.parameters():
            parameter.register_hook(gradient)
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(forward)


class LateHooks(CountingHooks):
    """The same, registered after the first three steps."""

    def built(self, module: PipelineModule) -> None:
        pass

    def stepped(self, engine: Any, step: int) -> None:
        if step == 3:
            super().built(engine.module)


class WrappedForwards(Habit):
    """Wraps the forward of each layer once the engine is there, as scripts do that time, cast or offload."""

    def started(self, engine: Any, optimizer: Any) -> None:
        for layer in engine.module.children():
            if isinstance(layer, Block):
                layer.forward = _scaled(layer.forward)  # type: ignore[method-assign]


def _scaled(before: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: before(x) * 0.9


class RootHooked(Habit):
    """A hook on the PipelineModule itself once the engine is there, and another one later."""

    def started(self, engine: Any, optimizer: Any) -> None:
        engine.module.register_forward_hook(_damped)

    def stepped(self, engine: Any, step: int) -> None:
        if step == 3:
            engine.module.register_forward_hook(_damped)


def _damped(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 0.9


NOTED: list[float] = []


class GlobalHooks(Habit):
    """Hooks that count in a global variable, of which a worker has one for all its stages."""

    def built(self, module: PipelineModule) -> None:
        def noting(gradient: Tensor) -> Tensor:
            NOTED.append(1.0)
            return gradient / len(NOTED)

        for parameter in module.parameters():
            parameter.register_hook(noting)


class Adapter(nn.Module):
    """Around a linear layer, with a setting that only this object knows."""

    def __init__(self, layer: nn.Linear, strength: float) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)
        self.settings = {"strength": strength}
        self.activation = lambda x: x * self.settings["strength"]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.activation(self.up(self.down(x)))


class Everything(Habit):
    """Adapters of different strength, parts frozen by name, hooks with values of their own, a cast, and notes on
    parameters by which a function makes groups."""

    dtype = torch.bfloat16

    def built(self, module: PipelineModule) -> None:
        for index, layer in enumerate(module.forward_funcs, start=module._local_start):
            if isinstance(layer, Block):
                layer.inner = Adapter(layer.inner, strength=1.0 / (1 + index))
                layer.scale = 0.25 * index
        for name, parameter in module.named_parameters():
            if name.endswith("outer.bias"):
                parameter.requires_grad = False
            elif parameter.requires_grad:
                parameter.decays = "up" not in name
                factor = 0.5 if "down" in name else 2.0
                parameter.register_hook(lambda gradient, factor=factor: gradient * factor)
        for layer in module.forward_funcs:
            layer.register_forward_hook(lambda _, inputs, output: output * 0.5 if output.dim() == 2 else output)
        module.bfloat16()

    def optimizer(self) -> None:
        return None

    def arguments(self, module: PipelineModule) -> dict[str, Any]:
        def make(parameters: Any) -> torch.optim.Optimizer:
            listed = list(parameters)
            groups = [{"params": [p for p in listed if p.decays], "weight_decay": 0.1}]
            groups.append({"params": [p for p in listed if not p.decays], "weight_decay": 0.0})
            return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)

        return {"optimizer": make, **super().arguments(module)}


class Noting(Last):
    """Notes what it computed, and an object, as no other layer of the model does."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen, self.output = ByIdentity(), super().forward(x)
        return self.output


class Objects(Habit):
    """Optimizer and scheduler made by the script for its stage; a layer that notes what it computed."""

    def layers(self) -> list[Any]:
        return [*super().layers()[:-1], LayerSpec(Noting)]

    def optimizer(self) -> None:
        return None

    def arguments(self, module: PipelineModule) -> dict[str, Any]:
        named = list(module.named_parameters())
        groups = [
            {"params": [p for n, p in named if "outer" in n], "weight_decay": 0.1, "nesterov": True},
            {"params": [p for n, p in named if "outer" not in n]},
        ]
        optimizer = torch.optim.SGD([g for g in groups if g["params"]], lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)}


def halve_gradient(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


class Late(Habit):
    """Weights, optimizer, hooks and scheduler come after ``initialize``."""

    def optimizer(self) -> None:
        return None

    def started(self, engine: Any, optimizer: Any) -> None:
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(0.5)
        engine._configure_optimizer(lambda listed: torch.optim.AdamW(listed, lr=0.02), list(engine.module.parameters()))
        engine.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.7)
        engine._support_torch_style_backward = True  # as scripts set it for a pipeline without an optimizer
        for parameter in engine.module.parameters():
            parameter.register_post_accumulate_grad_hook(halve_gradient)


class Gradual(Habit):
    """Half of each layer is frozen at first; later it is trained, too, with a hook, and the other half is frozen.

    Then biases go to a parameter group of their own.
    """

    def built(self, module: PipelineModule) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("inner" not in name)

    def arguments(self, module: PipelineModule) -> dict[str, Any]:
        return {"model_parameters": list(module.parameters())}

    def stepped(self, engine: Any, step: int) -> None:
        if step == 3:
            for name, parameter in engine.module.named_parameters():
                if "inner" in name:
                    parameter.requires_grad_(True)
                    parameter.register_post_accumulate_grad_hook(halve_gradient)
                elif "outer" in name:
                    parameter.requires_grad_(False)
            optimizer = engine.basic_optimizer
            moved = {id(p): p for name, p in engine.module.named_parameters() if name.endswith("bias")}
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in moved]
            optimizer.add_param_group({"params": list(moved.values()), "lr": 0.05})


class Rescheduled(Habit):
    """In place of the scheduler of the configuration comes another one while it trains."""

    def arguments(self, module: PipelineModule) -> dict[str, Any]:
        return {**super().arguments(module), "lr_scheduler": lambda optimizer: ConstantLR(optimizer, 0.5, 2)}

    def stepped(self, engine: Any, step: int) -> None:
        if step == 1:
            engine.lr_scheduler = ConstantLR(engine.optimizer, 0.1, 2)


class Shared(nn.Module):
    """A part of a model that is whole on every rank: a block of its own, and one that all layers use."""

    def __init__(self, model: nn.ModuleDict, index: int) -> None:
        super().__init__()
        self.block, self.shared = model["blocks"][index], model["shared"]

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.shared(x)


class OneModel(Habit):
    """Every rank loads the whole model, and the layers of a stage take their parts of it."""

    def layers(self) -> list[Any]:
        blocks = nn.ModuleList([Block() for _ in range(5)])
        model = nn.ModuleDict({"blocks": blocks, "shared": nn.Linear(WIDTH, WIDTH), "last": Last()})
        return [*(LayerSpec(Shared, model, index) for index in range(5)), model["last"]]


class ByIdentity:
    """A setting of a layer of which nobody else can know what is in it."""


class Unknown(Habit):
    """One layer of the model gets an object that no other has, and an adapter around it besides."""

    def built(self, module: PipelineModule) -> None:
        for layer in module.forward_funcs:
            if isinstance(layer, Last):
                layer.mark = ByIdentity()


class Uncallable(torch.optim.SGD):
    """Its constructor can't be called with what the object tells of itself."""

    def __init__(self, parameters: Any, secret: int) -> None:
        super().__init__(parameters, lr=0.1 * secret)


class UncallableObject(Habit):
    """An optimizer object that nobody can make again."""

    def optimizer(self) -> None:
        return None

    def arguments(self, module: PipelineModule) -> dict[str, Any]:
        return {"optimizer": Uncallable(module.parameters(), 1)}


class MovingBlock(Block):
    """Counts its forwards; the script sets its temperature, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.temperature = 0, 1.0
        self.register_buffer("share", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.temperature * self.share + 0.01 * self.calls


class Smoothing(nn.Module):
    """A loss that is another one at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(outputs, labels, label_smoothing=max(0.0, 0.3 - 0.02 * self.calls))


class Momentum(torch.optim.Optimizer):
    """Home-made: few defaults, and a count that is in no state_dict."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept = self.state[parameter].setdefault("kept", torch.zeros_like(parameter))
                    kept.mul_(0.9).add_(parameter.grad)
                    parameter.add_(kept / (1 - 0.9**self.count), alpha=-group["lr"])


class Moving(Habit):
    """What layers, loss and optimizer keep as plain attributes moves; the script anneals some, and writes buffers."""

    def layers(self) -> list[Any]:
        return [*(LayerSpec(MovingBlock) for _ in range(5)), LayerSpec(Last)]

    def built(self, module: PipelineModule) -> None:
        module.loss_fn = Smoothing()

    def optimizer(self) -> None:
        return None

    def arguments(self, module: PipelineModule) -> dict[str, Any]:
        return {"optimizer": Momentum}

    def stepped(self, engine: Any, step: int) -> None:
        for part in engine.module.modules():
            if isinstance(part, MovingBlock):
                part.temperature = 1.0 - 0.1 * step
                part.share.fill_(0.9 - 0.1 * step)


class Tally:
    """An object of the script's own."""

    def __init__(self) -> None:
        self.calls = 0


class KeepingBlock(Block):
    """Keeps what it has seen in a list, a dictionary, tensors, an array and an object, on which its output depends."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: deque[float] = deque(maxlen=3)
        self.counts = {"forwards": 0}
        self.average: Tensor | None = None
        self.spread, self.last = numpy.zeros(2), numpy.float64(0)
        self.tally = Tally()
        self.projection = torch.rand(WIDTH)  # drawn once, and no buffer
        self.rank_scale, self.turn = 1.0, 1j

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        self.seen.append(float(mean.mean()))
        self.counts["forwards"] += 1
        self.average = mean if self.average is None else 0.9 * self.average + 0.1 * mean
        self.spread = self.spread * 0.9 + float(mean.std())
        self.last = self.last * 0.5 + len(self.seen)
        self.tally.calls += 1
        self.rank_scale *= 0.99
        self.turn *= 1j
        kept = (
            sum(self.seen)
            + self.counts["forwards"]
            + float(self.spread.sum() + self.last)
            + self.tally.calls
            + self.turn.real
        )
        return (super().forward(x) + 0.1 * self.average * self.projection + 0.001 * kept) * self.rank_scale


class Lookahead(torch.optim.SGD):
    """Slow weights that are in no state_dict."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.count += 1
        fast = [p for group in self.param_groups for p in group["params"]]
        for slow, parameter in zip(self.slow, fast, strict=True):
            if self.count % 2 == 0:
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


def warming_up() -> Any:
    """A loss with a count and an average in its closure."""
    count, average = {"calls": 0}, torch.zeros(())

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        count["calls"] += 1
        plain = nn.functional.cross_entropy(outputs, labels)
        average.mul_(0.9).add_(0.1 * plain.detach())
        return plain * (1 + 0.05 * count["calls"]) / (1 + average)

    return loss


class Keeping(Moving):
    """What layers, loss and optimizer keep in lists, tensors and objects; another loss in a second phase."""

    def layers(self) -> list[Any]:
        return [*(LayerSpec(KeepingBlock) for _ in range(5)), LayerSpec(Last)]

    def built(self, module: PipelineModule) -> None:
        module.loss_fn = warming_up()

    def arguments(self, module: PipelineModule) -> dict[str, Any]:
        return {"optimizer": Lookahead}

    def stepped(self, engine: Any, step: int) -> None:
        if step == 2:
            engine.module.loss_fn = nn.functional.cross_entropy


class HidingBlock(Block):
    """With a layer in a list, where nobody finds its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(WIDTH, WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.hidden[0](x)


class Hidden(Habit):
    """Layers that are not registered."""

    def layers(self) -> list[Any]:
        return [*(LayerSpec(HidingBlock) for _ in range(5)), LayerSpec(Last)]


class GrowingBlock(Block):
    """Registers a buffer in its first forward, and a longer one later."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted = 4

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "cache", None) is None or len(self.cache) < self.wanted:
            self.register_buffer("cache", torch.arange(float(self.wanted)), persistent=False)
        return super().forward(x) + 0.01 * self.cache.sum()


class Wide(Momentum):
    """Its state is of another type than the parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept = self.state[parameter].setdefault("kept", torch.zeros_like(parameter, dtype=torch.float64))
                    kept.mul_(0.9).add_(parameter.grad)
                    parameter.sub_((group["lr"] * kept).to(parameter.dtype))


def clip(part: nn.Module) -> None:
    if isinstance(part, nn.Linear):
        part.weight.data.clamp_(-0.3, 0.3)


class Helper:
    """An object of the script's own that draws."""

    def __init__(self) -> None:
        self.drawing, self.old = random.Random(3), numpy.random.RandomState(4)

    def draw(self) -> float:
        return self.drawing.random() + float(self.old.random_sample())


class DrawingBlock(Block):
    """Draws from generators that it makes in its first forward, and that it has in a list and in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy: numpy.random.Generator | None = None
        self.listed, self.helper = (
            [numpy.random.default_rng(1), numpy.random.Generator(numpy.random.MT19937(2))],
            Helper(),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.lazy is None:
            self.lazy = numpy.random.default_rng(5)
        drawn = self.lazy.random() + sum(its.random() for its in self.listed) + self.helper.draw()
        return super().forward(x) * (1 + 0.1 * drawn)


class Drawing(Habit):
    """Layers that draw random numbers from generators of numpy's and Python's."""

    def layers(self) -> list[Any]:
        return [*(LayerSpec(DrawingBlock) for _ in range(5)), LayerSpec(Last)]


class Shifting(Habit):
    """Buffers that grow, layers frozen in every other step, ``apply``, a loader that uses its memory again."""

    reused = True

    def layers(self) -> list[Any]:
        return [*(LayerSpec(GrowingBlock) for _ in range(5)), LayerSpec(Last)]

    def optimizer(self) -> None:
        return None

    def arguments(self, module: PipelineModule) -> dict[str, Any]:
        return {"optimizer": Wide}

    def stepped(self, engine: Any, step: int) -> None:
        engine.module.apply(clip)
        for name, parameter in engine.module.named_parameters():
            if "inner" in name:
                parameter.requires_grad_(step % 2 == 1)
        for part in engine.module.children():
            if isinstance(part, GrowingBlock) and step == 2:
                part.wanted = 8


class Wrapped(Habit):
    """Weights decay in a step() that the script has wrapped, of which no shadow can know."""

    def started(self, engine: Any, optimizer: Any) -> None:
        step = optimizer.step

        def decaying(*args: Any, **kwargs: Any) -> None:
            step(*args, **kwargs)
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(0.99)

        optimizer.step = decaying


class HookedOptimizer(Habit):
    """A hook on the optimizer that changes weights."""

    def started(self, engine: Any, optimizer: Any) -> None:
        def decay(its: Any, *_: Any) -> None:
            with torch.no_grad():
                for group in its.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(0.99)

        optimizer.register_step_post_hook(decay)


class Pruned(Habit):
    """Layers pruned after the PipelineModule was made: a hook makes the weight anew in each forward."""

    def built(self, module: PipelineModule) -> None:
        for layer in module.forward_funcs:
            if isinstance(layer, Block):
                prune.l1_unstructured(layer.inner, "weight", amount=0.3)


_KINDS = (
    *(
        Habit,
        RatesByHand,
        RatesByFunction,
        EstimatedRate,
        TwoRates,
        MomentumByHand,
        MomentumOfOne,
        OneRate,
        Compiled,
        ClippingByHand,
        MastersByHand,
        ScaleByHand,
        OnTheModule,
        Evaluating,
        CountingHooks,
        LateHooks,
        WrappedForwards,
        RootHooked,
        GlobalHooks,
        Everything,
        Objects,
        Late,
        Gradual,
        OneModel,
        Unknown,
        UncallableObject,
    ),
    *(Moving, Keeping, Drawing, Hidden, Shifting, Wrapped, HookedOptimizer, Pruned, Rescheduled),
)
HABITS: dict[str, type[Habit]] = {kind.__name__: kind for kind in _KINDS}


def train_habit(
    habit: str,
    stages: int,
    steps: int = 5,
    faults: list[dict[str, Any]] | None = None,
    settings: dict[str, Any] | None = None,
    section: dict[str, Any] | None = None,
    waits: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Losses and the end of a script with ``habit``; with ``faults`` under the plugin, else with stock's engine."""
    job = os.environ["BAMBOO_JOB"].split("--")[0]
    os.environ["BAMBOO_JOB"] = f"{job}--{habit}"
    Path(os.environ["TEST_DIRECTORY"], "job").write_text(os.environ["BAMBOO_JOB"], encoding="utf-8")
    fresh_process_group(f"{habit}-{faults is not None}")
    torch.manual_seed(11)
    script = HABITS[habit]()
    module = script.module_class(
        script.layers(), loss_fn=nn.functional.cross_entropy, partition_method="uniform", num_stages=stages
    )
    script.built(module)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 1.0,
        "steps_per_print": 1000000,
        **(settings or {}),
    }
    if script.optimizer() is not None:
        config["optimizer"] = script.optimizer()
    if faults is not None:
        coordinator = {"suspicion_seconds": 1.0}
        config["bamboo"] = {"coordinator": coordinator, "seed": 5, **(section or {}), "faults": faults}
    engine, optimizer, _, _ = deepspeed.initialize(model=module, config=config, **script.arguments(module))
    if hasattr(engine, "set_data_source") and not script.reused:
        engine.set_data_source(lambda pipeline, step: _batches(pipeline, first=step * 3, dtype=script.dtype))
    script.started(engine, optimizer)
    data, losses = _batches(engine.grid.get_data_parallel_id(), first=0, dtype=script.dtype), []
    if script.reused:
        data = _into_the_same(data)
    for step in range(steps):
        if faults is not None and not engine.catching_up:
            wait_for_joiners(engine, (waits or {}).get(str(engine.__dict__["global_steps"]), 0))
        losses.append(float(engine.train_batch(data)))
        script.stepped(engine, step)
    rate = engine.optimizer.param_groups[0]["lr"]
    result: dict[str, Any] = {"losses": losses, "rate": float(rate)}
    if faults is not None:
        result.update(digest=engine.state_digest(), hosted=[str(r.coordinate) for r in engine.host.owners()])
        engine.close()
    return result


def compare_habit(habit: str, **arguments: Any) -> dict[str, Any]:
    """With stock's engine, and under the plugin."""
    faults = arguments.pop("faults")
    if os.environ.get("BAMBOO_JOINING") == "1":
        return {"stock": None, "plugin": train_habit(habit, faults=faults, **arguments)}
    plain = {name: value for name, value in arguments.items() if name not in ("section", "waits")}
    stock = train_habit(habit, **plain)
    return {"stock": stock, "plugin": train_habit(habit, faults=faults, **arguments)}


def _into_the_same(batches: Iterator[Any]) -> Iterator[Any]:
    kept = tuple(torch.empty_like(tensor) for tensor in next(batches))
    for batch in batches:
        for target, tensor in zip(kept, batch, strict=True):
            target.copy_(tensor)
        yield kept


def _batches(pipeline: int, *, first: int, dtype: torch.dtype) -> Iterator[Any]:
    number = first
    while True:
        generator = torch.Generator().manual_seed(1000 * pipeline + number)
        yield (
            torch.randn(2, WIDTH, generator=generator, dtype=dtype),
            torch.randint(0, OUTPUTS, (2,), generator=generator),
        )
        number += 1
