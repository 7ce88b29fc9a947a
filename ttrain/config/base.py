"""The base class of all groups of settings, with shared types and helpers."""

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from decimal import Decimal
from types import UnionType
from typing import Annotated, Any, Self, TypeVar, Union, cast, get_args, get_origin
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    model_validator,
)

from ttrain.core import redact
from ttrain.core.files import JsonDict, JsonObject

T = TypeVar("T")
NONE = "none"  # no source; a file of that name is ./none
COUNT = re.compile(r"(\d[\d_]*\.?\d*(?:e\d\d?)?)([kmbt]?)")
MULTIPLES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def need(holds: bool, message: str) -> None:
    """Raise ValueError with the message unless a rule between settings holds."""
    if not holds:
        raise ValueError(message)


class Section(BaseModel):
    """A frozen group of settings; an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        defer_build=True,
        coerce_numbers_to_str=True,
    )

    def replaced(self, changes: JsonObject) -> Self:
        """A copy with changed values, nested for sections; no rule is checked again."""
        values = {}
        for name, value in changes.items():
            section = getattr(self, name)
            values[name] = section.replaced(value) if isinstance(section, Section) else value
        return self.model_copy(update=values)

    @classmethod
    def rebuilt(cls, tree: JsonObject) -> Self:
        """Settings of a JSON tree that was validated before; nothing is checked again.

        Reading a setting that the tree lacks raises AttributeError.
        """
        section = cast("Self", cls.model_construct())
        section.__dict__.clear()
        section.__dict__.update(
            {k: _rebuilt(cls.model_fields[k].annotation, value) for k, value in tree.items()}
        )
        return section

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self.check_values()
        return self

    def check_values(self) -> None:
        """Raise ValueError where values do not go together."""


def setting(default: T, description: str, **rules: Any) -> T:
    """A field of a section: default, description, and the rules of pydantic's `Field`."""
    return cast("T", Field(default, description=description, **rules))


def types_of(kind: Any) -> list[Any]:
    """The members of a union type, without `Annotated`."""
    if get_origin(kind) is Annotated:
        return types_of(get_args(kind)[0])
    is_union = get_origin(kind) in (Union, UnionType)
    return [form for each in get_args(kind) for form in types_of(each)] if is_union else [kind]


def sections_of(kind: Any) -> list[type[Section]]:
    """The sections among the members of a union type."""
    return [form for form in types_of(kind) if inspect.isclass(form) and issubclass(form, Section)]


def takes_numbers(kind: Any) -> bool:
    """Whether a type has numbers but no bool, which pydantic would read as a number."""
    forms = types_of(kind)
    return bool not in forms and not {int, float}.isdisjoint(forms)


def as_tuple(value: object) -> object:
    """Split a text at commas."""
    if isinstance(value, str):
        return tuple(entry.strip() for entry in value.split(",") if entry.strip())
    return () if value is None else value


# One entry may stand without brackets.
Listed = BeforeValidator(lambda value: (value,) if isinstance(value, str | int) else value)


# Names a source of data. JSON, the form of all that is recorded, shown or sent to a server, hides
# the secrets of its URL.
Location = Annotated[str, PlainSerializer(redact.url, return_type=str, when_used="json")]


class Weighted(Section):
    """A source, and the weight with which its rows are drawn."""

    path: Location
    weight: float = Field(1.0, gt=0)


def _as_sources(value: object) -> object:
    if value in (NONE, [NONE], (NONE,)):
        return ()
    return (value,) if isinstance(value, Mapping) else as_tuple(value)


Source = Annotated[
    Annotated[Location, Tag("plain")] | Annotated[Weighted, Tag("weighted")],
    Discriminator(lambda value: "weighted" if isinstance(value, Mapping | Weighted) else "plain"),
]
Paths = Annotated[tuple[Source, ...], BeforeValidator(_as_sources)]


def as_count(value: object) -> object:
    """Read 1M, 2.5B, 250k, 2e6 and 1_000_000 as whole numbers."""
    if not isinstance(value, str) or not (match := COUNT.fullmatch(value.strip().lower())):
        return value
    count = Decimal(match[1].replace("_", "")) * MULTIPLES[match[2]]
    return int(count) if count == int(count) else value


Count = Annotated[int, BeforeValidator(as_count)]  # of tokens, rows or entries


Share = Annotated[float, Field(ge=0, lt=1)]


Seed = Annotated[int, Field(ge=0, lt=2**32)]


def _existing_zone(value: str) -> str:
    try:
        ZoneInfo(value)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError("must be the name of a time zone, such as Europe/Berlin") from None
    return value


TimeZone = Annotated[str, AfterValidator(_existing_zone)]


def _time_of_day(value: str) -> str:
    try:
        return f"{datetime.strptime(value, '%H:%M'):%H:%M}"
    except ValueError:
        raise ValueError(
            "must be a time of day as hour:minute, from 00:00 to 23:59, such as 06:30"
        ) from None


TimeOfDay = Annotated[str, AfterValidator(_time_of_day)]


def _rebuilt(kind: Any, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_rebuilt(kind, entry) for entry in value)
    if not isinstance(value, dict):
        return value
    # Arguments of the type, too, for a tuple of sections.
    sections = [each for form in (kind, *get_args(kind)) for each in sections_of(form)]
    return sections[0].rebuilt(value) if sections else value


def part_of(tree: JsonObject, prefixes: Collection[str]) -> JsonDict:
    """The part of a tree below dotted prefixes, such as `sft` or `sft.seed`."""
    kept: JsonDict = {}
    for key, value in flatten(tree):
        if any(f"{key}.".startswith(f"{prefix}.") for prefix in prefixes):
            assign(kept, key, value)
    return kept


def assign(tree: JsonDict, key: str, value: Any) -> None:
    """Put the value of a dotted key into a tree."""
    *parents, leaf = key.split(".")
    for parent in parents:
        if not isinstance(tree.get(parent), dict):
            tree[parent] = {}
        tree = tree[parent]
    tree[leaf] = value


def flatten(tree: JsonObject, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a nested mapping with dotted names: ("sft.optim.lr", 0.001)."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
