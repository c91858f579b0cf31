"""Whatever bytes come over a network or out of etcd: a value of a known kind, or one clear error, and no code."""

from __future__ import annotations

import ast
import base64
import contextlib
import json
import math
import pickle
import random
import socket
import struct
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deepspeed_bamboo
from deepspeed_bamboo.coordination import EpochRecord
from deepspeed_bamboo.core.checkpointing import CheckpointNote, FileFact, Part
from deepspeed_bamboo.core.choosing import Choice
from deepspeed_bamboo.core.consensus import Report
from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.job_facts import JobFacts
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.core.reconfiguring import Target
from deepspeed_bamboo.core.schedule import Mode
from deepspeed_bamboo.elastic.boot import Boot, pack, unpack
from deepspeed_bamboo.errors import MessageError, UnsendableError
from deepspeed_bamboo.runtime.comm import store_server
from deepspeed_bamboo.runtime.comm.encoding import DTYPES, Slot, decode, encode
from deepspeed_bamboo.runtime.comm.frames import Frames
from deepspeed_bamboo.runtime.comm.header import Header
from deepspeed_bamboo.runtime.iteration.activity import decode_round, encode_round
from deepspeed_bamboo.runtime.recovery.reports import _report_of, packed, unpacked
from deepspeed_bamboo.runtime.stock.collectives import Contribution
from deepspeed_bamboo.runtime.stock.logical import GroupKey

PACKAGE = Path(deepspeed_bamboo.__file__).parent
MALFORMED = 10_000

PLACEMENT = Placement.initial(Grid(1, 2), ("w0", "w1"))
VALUES: dict[str, Any] = {
    "plain": {"a": [1, 2.5, None, True, b"\0\1", "ü"], 3: (1, (2, ())), Coordinate(1, 2): {"x"}, "f": frozenset({1})},
    "numbers": [2**70, -(2**70), float("inf"), np.float64(1.5), np.int32(-3), 1 + 0j == 1],
    "ordered": OrderedDict([("b", 1), ("a", Counter({2: 3}))]),
    "torch": [torch.bfloat16, torch.device("cpu"), Slot(3), torch.Size([1, 2])],
    "note": CheckpointNote(
        take=8,
        took=Part(8, (Coordinate(0, 1),)),
        written=Part(7, (Coordinate(0, 1),), {"layer_00-model_states.pt": FileFact(3, "ab")}),
        failure=(7, "disk full"),
    ),
    "choice": Choice(Mode.EAGER, "because"),
    "epoch": EpochRecord(3, ("w0", "w1"), PLACEMENT, "start", ("w2",), "w0", 12.5),
    "facts": JobFacts({"a": 1}, ("Linear",), {0: "abc"}),
    "target": Target(("w0",), ("w1",), (), PLACEMENT, "to join"),
}


def equal(one: Any, other: Any) -> bool:
    """Also of the same types; tensors bit by bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        same_form = one.dtype == other.dtype and one.shape == other.shape
        return same_form and one.reshape(-1).view(torch.uint8).tolist() == other.reshape(-1).view(torch.uint8).tolist()
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, float) and math.isnan(one):
        return struct.pack("d", one) == struct.pack("d", other)
    return bool(one == other)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.builds(Slot, st.integers(0)),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers() | st.tuples(), inner)
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert equal(decode(encode(value)), value)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_every_kind_of_value_comes_back(value: Any) -> None:
    found = decode(encode(value))
    assert equal(found, tuple(value) if isinstance(value, torch.Size) else value) or str(found) == str(
        [torch.bfloat16, torch.device("cpu"), Slot(3), (1, 2)]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (1, 1, 5)])
def test_tensors_come_back_bit_by_bit_and_may_be_changed(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = math.prod(shape) * dtype.itemsize
    tensor = torch.arange(count, dtype=torch.uint8).remainder(2).view(dtype).view(shape)
    found = decode(encode([tensor]))[0]
    assert equal(found, tensor)
    found.zero_()


def test_a_contribution_comes_back() -> None:
    key = GroupKey("data", (Coordinate(0, 1), Coordinate(1, 1)))
    for contribution in (Contribution(key, "sum", None), Contribution(None, "gate", None)):
        assert Contribution.from_plain(decode(encode(contribution.to_plain()))) == contribution
    with pytest.raises(MessageError):
        Contribution.from_plain(("one",))


class Own:
    """Something of a user's."""


@pytest.mark.parametrize(
    "value",
    [Own(), Own, len, {"state": {0: Own()}}, [lambda: 0]],
    ids=("object", "class", "built-in", "nested", "function"),
)
def test_what_is_no_plain_data_is_refused_where_it_is_sent(value: Any) -> None:
    with pytest.raises(UnsendableError, match=r"can't be sent to another worker"):
        encode(value)


def test_a_list_in_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsendableError, match="in itself"):
        encode(loop)


# ---- malformed messages ------------------------------------------------------------------------------

PICKLED = pickle.dumps(print)


def nested(levels: int) -> bytes:
    """Tuples in tuples."""
    content = b"\x90"
    for _ in range(levels):
        content = msgpack.packb(msgpack.ExtType(1, b"\x91" + content))
    return content


def bombs() -> list[bytes]:
    """Small messages that ask for much."""
    large_tensor = msgpack.packb(msgpack.ExtType(2, struct.pack("<BBBq", 0, 1, 0, 2**62)))
    endless_tensor = msgpack.packb(msgpack.ExtType(2, struct.pack("<BBBqq", 0, 2, 0, 2**40, 2**40)))
    return [b"", PICKLED, nested(5000), b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff\xc0",
            b"\xdd\0\1\0\0" * 2000, large_tensor, endless_tensor, msgpack.packb(msgpack.ExtType(99, b"x")),
            msgpack.packb(msgpack.ExtType(5, msgpack.packb("9" * 100_000)))]  # fmt: skip


def damaged(good: list[bytes], random_numbers: random.Random) -> bytes:
    """One of ``good`` with bytes changed, left out or put in; or anything at all."""
    content = bytearray(random_numbers.choice(good))
    kind = random_numbers.randrange(5)
    if kind == 0:
        return random_numbers.randbytes(random_numbers.randrange(200))
    if kind == 1:
        return bytes(content[: random_numbers.randrange(len(content))])
    for _ in range(random_numbers.randint(1, 4)):
        place = random_numbers.randrange(len(content))
        if kind == 2:
            content[place : place + 1] = random_numbers.randbytes(random_numbers.randrange(4))
            content = content or bytearray(b"\0")
        else:
            content[place] = random_numbers.randrange(256)
    return bytes(content)


def text_of(content: bytes) -> str:
    return content.decode("latin-1")


BOOT = Boot("j", "/p", ("h:1",), "h", (3, 4), salt="s")
REPORT = Report(4, "train", rounds=("a",), progress={Coordinate(0, 1): CoordinateProgress(forwards=2)}).to_json()
ENCODED = [*map(encode, VALUES.values()), encode({"w0": {"losses": {Coordinate(0, 1): (torch.ones(2), None)}}})]
HEADERS = [
    Header("5/activation/0.1/2", data, [(torch.float32, (2, 3))], False).to_bytes() for data in (True, None, (1,))
]

DECODERS: dict[str, tuple[Callable[[bytes], Any], list[bytes]]] = {
    "values": (decode, ENCODED),
    "header": (lambda content: Header.from_bytes(content, payload_bytes=24), HEADERS),
    "round": (lambda content: decode_round(text_of(content)), [encode_round({"w0": {"a": 1}}).encode()]),
    "round, well written": (
        lambda content: decode_round(base64.b64encode(content).decode()), [encode({"w0": {"a": torch.ones(3)}})]
    ),
    "reports": (lambda content: unpacked({"zlib": text_of(content)}), [packed({"w0": REPORT})["zlib"].encode()]),
    "reports, well written": (
        lambda content: unpacked({"zlib": base64.b64encode(zlib.compress(content)).decode()}),
        [json.dumps({"w0": REPORT}).encode()],
    ),
    "start data": (unpack, [pack(BOOT)]),
    "report": (lambda content: _report_of(_mapping(content), "w0"), [json.dumps({"w0": REPORT}).encode()]),
}  # fmt: skip


def _mapping(content: bytes) -> Any:
    """Of JSON, which is not what is looked at here."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = {}
    return value if isinstance(value, dict) else {"w0": value}


@pytest.mark.parametrize("name", DECODERS)
def test_malformed_messages_give_one_clear_error_each(name: str) -> None:
    read, good = DECODERS[name]
    for content in good:
        read(content)
    random_numbers = random.Random(17)
    refused = 0
    for content in [*bombs(), *(damaged(good, random_numbers) for _ in range(MALFORMED))]:
        try:
            read(content)
        except MessageError as error:
            assert str(error)
            refused += 1
    assert refused > MALFORMED / 4, "hardly anything was malformed"


def framed(value: Any) -> bytes:
    content = msgpack.packb(value)
    return len(content).to_bytes(4, "little") + content


def test_malformed_requests_to_a_store_give_one_clear_error_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "_LONGEST_WAIT_SECONDS", 0.0)
    server = store_server.StoreServer("127.0.0.1", secret="of this test")
    good = [
        framed(request) for request in (["get", "key", 5.0], ["set", "key", b"v"], ["add", "n", 1], ["check", ["a"]])
    ]
    random_numbers, refused = random.Random(17), 0
    for content in [*good, *bombs(), *(damaged(good, random_numbers) for _ in range(MALFORMED))]:
        one, other = socket.socketpair()
        with one, other, contextlib.suppress(TimeoutError):
            other.sendall(content[:100_000])
            other.shutdown(socket.SHUT_WR)
            try:
                request = Frames(one).receive()
                if request is not None:
                    server._answer(request)
            except MessageError:
                refused += 1
    server.close()
    assert refused > MALFORMED / 4


@pytest.mark.parametrize("content", bombs(), ids=range(len(bombs())))
def test_small_messages_that_ask_for_much_are_refused(content: bytes) -> None:
    with pytest.raises(MessageError):
        decode(content)


# ---- nothing of the package unpickles what it receives ---------------------------------------------------

UNPICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
OBJECT_COLLECTIVES = ("_object_list", "all_gather_object", "gather_object")
LOADERS = ("eval", "exec", "torch.load", "np.load", "yaml.load")
ALLOWED = {
    (
        "runtime/stock/captured.py",
        "pickle",
    ): "a copy inside one process: what it reads, it has written to memory itself",
    ("runtime/checkpoint/safe_loading.py", "pickle"): "the name of the error of torch.load(weights_only=True)",
}


def suspicious(path: Path) -> set[str]:
    """What in a file of the package could run code that is in data: modules by name, calls with a dot."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.split(".")[0] in UNPICKLING)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLING:
            found.add(node.module or "")
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            said = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            safe = said.get("weights_only") == "True" or said.get("allow_pickle") == "False"
            runs = called.endswith(OBJECT_COLLECTIVES) or called in (
                "eval",
                "exec",
                "torch.load",
                "np.load",
                "yaml.load",
            )
            if runs and not safe:
                found.add(called)
    return found


def test_nothing_that_is_received_is_unpickled() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), what) for path in sorted(PACKAGE.rglob("*.py")) for what in suspicious(path)
    }
    assert found == set(ALLOWED)


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    file = tmp_path / "probe.py"
    lines = ("import pickle", "from dill import loads", "torch.load(x)", "torch.load(x, weights_only=True)",
             "np.load(x, allow_pickle=False)", "c10d.broadcast_object_list(a)", "exec(y)")  # fmt: skip
    file.write_text("\n".join(lines))
    assert suspicious(file) == {"pickle", "dill", "torch.load", "c10d.broadcast_object_list", "exec"}
