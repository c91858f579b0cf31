"""Turns pydantic's errors into sentences: where, the value, the rule, the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.suggest import choose_from, did_you_mean, nearest


def describe(error: ValidationError, *, model: type[BaseModel], section: str) -> tuple[str, ...]:
    """One sentence per wrong key, in the order of the document. ``model`` is what was validated."""
    sentences: dict[str, str] = {}
    for finding in error.errors(include_url=False):
        path = _keys(finding["loc"], model=model)
        name = ".".join([section, *map(str, path)])
        if finding["type"] == "extra_forbidden":
            owner = _model_at(path[:-1], model=model)
            near = _meant(str(path[-1]), owner=owner, model=model, section=section)
            sentences[name] = f"unknown key {name}{did_you_mean(near, owner.model_fields)}"
        elif name not in sentences or finding["type"] == "value_error":  # of a union's members, the one that knows why
            sentences[name] = _describe_value(finding, name=name, field=_field_at(path, model=model))
    return tuple(sentences.values())


def _meant(key: str, *, owner: type[BaseModel], model: type[BaseModel], section: str) -> str | None:
    """What the unknown ``key`` of ``owner`` was meant to be: the same key elsewhere, with its place, or a near one."""
    elsewhere = [place for place in _places(model, section) if place.rpartition(".")[2] == key]
    return elsewhere[0] if elsewhere else nearest(key, owner.model_fields)


def _places(model: type[BaseModel], name: str) -> Iterator[str]:
    """Every key there is, with the sections that it is in: ``bamboo.redundancy.mode``."""
    for key, field in model.model_fields.items():
        yield f"{name}.{key}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _places(field.annotation, f"{name}.{key}")


def _describe_value(finding: Any, *, name: str, field: FieldInfo | None) -> str:
    """A wrong value: names the valid ones where they are few, else pydantic's rule and the field's meaning."""
    value = finding["input"]
    if finding["type"] == "literal_error" and field is not None:
        return f"{name}: {choose_from(value, _literals(field.annotation))}"
    if finding["type"] == "value_error":
        cause = finding["ctx"]["error"]
        return f"{name}: {'; '.join(cause.problems) if isinstance(cause, ConfigError) else cause}"
    meaning = f" ({' '.join(field.description.split())})" if field is not None and field.description else ""
    rule = "must be an object" if finding["type"] == "model_type" else finding["msg"]
    rule = rule.replace("Input should be", "must be").replace("should have", "must have")
    if finding["type"] in ("string_too_short", "too_short") and not value:
        rule = "is empty, and must not be"
    if finding["type"] == "missing":  # pydantic gives all that is around it as the value
        return f"{name} is missing{meaning}"
    return f"{name}: {value!r} {rule[0].lower()}{rule[1:]}{meaning}"


def _literals(annotation: object) -> Iterator[str]:
    for argument in get_args(annotation):
        if isinstance(argument, str):
            yield argument
        else:
            yield from _literals(argument)


def _keys(location: Sequence[int | str], *, model: type[BaseModel]) -> tuple[int | str, ...]:
    """``location`` without what pydantic adds behind a field's name for the members of a union."""
    path: list[int | str] = []
    current: type[BaseModel] | None = model
    for part in location:
        if current is None:
            break
        path.append(part)
        field = current.model_fields.get(str(part))
        annotation = field.annotation if field else None
        current = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    return tuple(path)


def _model_at(path: Sequence[int | str], *, model: type[BaseModel]) -> type[BaseModel]:
    for part in path:
        annotation = model.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        model = annotation
    return model


def _field_at(path: Sequence[int | str], *, model: type[BaseModel]) -> FieldInfo | None:
    return _model_at(path[:-1], model=model).model_fields.get(str(path[-1])) if path else None
