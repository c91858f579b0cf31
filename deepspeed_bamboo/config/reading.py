"""Reads settings so that all that is wrong with them is found at once, whichever kind it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from deepspeed_bamboo.config.messages import describe

_Model = TypeVar("_Model", bound=BaseModel)


def read_leniently(
    section: Mapping[str, Any], *, model: type[_Model], name: str
) -> tuple[_Model, frozenset[str], tuple[str, ...]]:
    """The settings in ``section``; which of its parts are wrong, and how, a sentence for each wrong key.

    A wrong part (a key of ``section``, with all that is below it) is replaced by its defaults, so that the others can
    be examined further. ``name`` is what sentences call the section.
    """
    try:
        return model.model_validate(dict(section)), frozenset(), ()
    except ValidationError as error:
        wrong = frozenset(str(finding["loc"][0]) for finding in error.errors(include_url=False) if finding["loc"])
        rest = {key: value for key, value in section.items() if str(key) not in wrong}
        if len(rest) == len(section):
            rest = {}
        found, more, problems = read_leniently(rest, model=model, name=name)
        return found, wrong | more, (*describe(error, model=model, section=name), *problems)
