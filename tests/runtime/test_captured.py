"""What is captured for a checkpoint is what DeepSpeed would have written, whatever happens to it afterwards."""

from __future__ import annotations

import io
from argparse import Namespace
from collections import OrderedDict
from typing import Any

import torch

from deepspeed_bamboo.runtime.stock.captured import CapturedFiles, host_copy


def state() -> dict[str, Any]:
    flat = torch.arange(12.0)
    weight = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    return {
        "view": flat[3:6],
        "weight": weight,
        "same": weight,
        "layers": OrderedDict(a=flat.view(3, 4).t()),
        "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}],
        "args": Namespace(steps=3),
        "empty": torch.empty(0, dtype=torch.int64),
    }


def test_a_copy_is_equal_and_keeps_nothing_of_the_original() -> None:
    original, expected = state(), state()
    copy = host_copy(original)
    original["view"].fill_(7)
    original["groups"][0]["lr"] = 0.2
    original["args"].steps = 4
    with torch.no_grad():
        original["weight"].zero_()
    assert copy["same"] is copy["weight"] and isinstance(copy["weight"], torch.nn.Parameter)
    assert list(copy) == list(expected) and isinstance(copy["layers"], OrderedDict)
    for name in ("view", "weight", "empty"):
        assert torch.equal(copy[name], expected[name]) and copy[name].dtype == expected[name].dtype
    assert torch.equal(copy["layers"]["a"], expected["layers"]["a"])
    assert copy["groups"] == expected["groups"] and copy["args"] == expected["args"]
    assert copy["view"].untyped_storage().nbytes() == 3 * 4, "a view takes its own elements, not what it is a view of"


def test_a_captured_file_is_what_torch_would_have_saved() -> None:
    captured, original = CapturedFiles(), state()
    captured.makedirs("tag", exist_ok=True)
    captured.save(original, "tag/x.pt")
    original["view"].fill_(7)
    file = io.BytesIO()
    captured.files["tag/x.pt"](file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded["view"], state()["view"]) and loaded["args"] == state()["args"]
    assert list(captured.files) == ["tag/x.pt"]
