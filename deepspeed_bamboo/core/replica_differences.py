"""Where a replica is not what its owner is: the two descriptions of a stage compared, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_SHOWN = 6


def differences(owner: Mapping[str, Any], replica: Mapping[str, Any]) -> tuple[str, ...]:
    """A sentence for each difference between two descriptions of one stage, the first few of them; empty: none.

    A description has ``modules``, ``parameters`` and ``buffers`` by name, each a dictionary of properties, then
    ``forward`` and ``optimizer``.
    """
    found = [
        *_named("module", owner["modules"], replica["modules"]),
        *_named("parameter", owner["parameters"], replica["parameters"]),
        *_named("buffer", owner["buffers"], replica["buffers"]),
        *_properties("the stage", {"forward": owner["forward"]}, {"forward": replica["forward"]}),
        *_optimizers(owner["optimizer"], replica["optimizer"]),
    ]
    more = [f"and {len(found) - _SHOWN} more differences"] if len(found) > _SHOWN else []
    return (*found[:_SHOWN], *more)


def without_attributes(description: Mapping[str, Any]) -> dict[str, Any]:
    """``description`` without the attributes of modules and parameters."""
    bare = {
        kind: {name: {k: v for k, v in has.items() if k != "attributes"} for name, has in description[kind].items()}
        for kind in ("modules", "parameters")
    }
    return {**description, **bare}


def strayed(states: Sequence[Mapping[str, Mapping[str, Sequence[int]]]]) -> tuple[str, ...]:
    """Of which coordinates a shadow has other ``weights`` or ``buffers`` than its owner, in words.

    ``states`` are the workers': of what they ``owned`` and of ``shadows``, by coordinate, checksums of both.
    """
    owned = {c: its for state in states for c, its in state.get("owned", {}).items()}
    found = set()
    for state in states:
        for coordinate, its in state.get("shadows", {}).items():
            pairs = zip(("weights", "buffers"), its, owned.get(coordinate, its), strict=True)
            names = [name for name, shadows, owners in pairs if shadows != owners]
            if names:
                found.add(f"{coordinate}: {' and '.join(names)}")
    return tuple(sorted(found))


def _named(kind: str, owner: Mapping[str, Any], replica: Mapping[str, Any]) -> Iterator[str]:
    for name, has in owner.items():
        if name not in replica:
            yield f"layer {_layer(name)}: {kind} {name} is with its owner only"
        else:
            yield from _properties(f"layer {_layer(name)}: {kind} {name}", has, replica[name])
    for name in replica:
        if name not in owner:
            yield f"layer {_layer(name)}: {kind} {name} is with the replica only"


def _properties(what: str, owner: Mapping[str, Any], replica: Mapping[str, Any]) -> Iterator[str]:
    for name in [*owner, *(name for name in replica if name not in owner)]:
        has, would = owner.get(name), replica.get(name)
        if repr(has) == repr(would):
            continue
        if isinstance(has, Mapping) and isinstance(would, Mapping):
            yield from _properties(f"{what}, {name}", has, would)
        else:
            owners, replicas = _shown(has), _shown(would)
            other = f"{replicas}, but of other code or with other values," if replicas == owners else replicas
            yield f"{what} has {name} {owners} with its owner and {other} in a replica"


def _optimizers(owner: Mapping[str, Any] | None, replica: Mapping[str, Any] | None) -> Iterator[str]:
    if owner is None or replica is None:
        if (owner is None) != (replica is None):
            yield "the owner has an optimizer and the replica none" if owner else "only the replica has an optimizer"
        return
    for position, (has, would) in enumerate(zip(owner["groups"], replica["groups"], strict=False)):
        if has != would:
            missing = [name for name in has if name not in would][:3]
            yield (
                f"group {position} of the optimizer has {len(has)} parameters with its owner and {len(would)} in a "
                f"replica{', which lacks ' + ', '.join(map(str, missing)) if missing else ''}"
            )
    kinds = ("class", "wrapper", "defaults", "made")
    yield from _properties("the optimizer", {k: owner[k] for k in kinds}, {k: replica[k] for k in kinds})


def _layer(name: str) -> str:
    first, _, rest = name.partition(".")
    return rest.partition(".")[0] if first == "tied_modules" else first


def _shown(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    if isinstance(value, list) and value and isinstance(value[0], str):  # a form, see runtime/stock/plain_forms.py
        text = " ".join(map(str, value[1:] if value[0] == "plain" else value))
        if value[0] == "function" and len(value) > 3:
            text = f"the function {value[2]} (line {value[3]} of {value[1]})"
    return text if len(text) <= 80 else f"{text[:77]}..."
