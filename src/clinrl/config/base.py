"""The base class and the types of all mappings of params.yaml, and their errors as sentences."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from clinrl.errors import ParamsError, SignatureError, did_you_mean, format_value
from clinrl.signing.keys import OURS, Key, parse_key

Scale = Literal["embedded", "full"]
"""embedded: small models that this project builds itself, on a CPU. full: hub checkpoints, on a GPU."""

NAME = re.compile(r"[a-z][a-z0-9-]{1,40}")
"""The pattern of names. It is strict, since names become folders and DVC addresses."""
RESERVED = (
    "candidate", "champion", "comparisons", "data", "drafts", "exams", "external", "mine", "previous", "probe",
    "protocol", "retraining",
)  # fmt: skip
"""Folders of data/reports that are not about one version."""
RESERVED_MODES = ("alarms", "summary")
"""Files of a version's reports that are not about one mode."""

_PLACE = re.compile(r"(?![- ])[\w./+@,=() -]{1,300}(?<! )")
"""The pattern of paths: no scheme, so that DVC fetches nothing, and no character with a meaning in a shell or in DVC's
templates."""
METHODS = ("grpo", "rejection", "sft")
"""The training methods of recipes."""
MAX_TEXT = 80
"""The most characters of a text that is shown in a table."""
MAX_ROWS = 10_000_000
"""The most rows of a training."""

T = TypeVar("T")


def check_known(at: str, value: object, allowed: Collection[object], noun: str) -> None:
    """Raise ParamsError for a value that is not allowed; the message names the nearest allowed one."""
    if value not in allowed:
        if str(value) in map(str, allowed):
            quotes = "without" if isinstance(value, str) else "with"
            raise ParamsError(f"{at}: {format_value(value)} is not {noun}; write it {quotes} quotes")
        raise ParamsError(f"{at}: {format_value(value)} is not {noun}; {did_you_mean(value, allowed)}")


def check_all(at: str, values: Iterable[object], allowed: Collection[object], noun: str) -> None:
    """Raise ParamsError for the first of many values that is not allowed."""
    for value in values:
        check_known(at, value, allowed, noun)


def refusal(sentence: str, key: object = None) -> PydanticCustomError:
    """An error about a section, or about one key in it, whose text is already a sentence."""
    return PydanticCustomError("sentence", "{sentence}", {"sentence": sentence, "key": "" if key is None else str(key)})


def unless(default: object) -> Callable[[Any], bool]:
    """A function for `exclude_if` of a field, which leaves the field out of records if it has its default.

    A new option thus does not change records that are older than it.
    """
    return lambda value: bool(value == default)


def check_rows(count: int, each: int, what: str, key: str = "steps") -> None:
    """Refuse a `key` that asks for more than `MAX_ROWS` rows, `each` a time: all are drawn before the first step."""
    if count * each > MAX_ROWS:
        raise refusal(f"is {count}; {key} x {what} is {count * each:,}, and may be {MAX_ROWS:,} at most", key)


def check_keys(section: Mapping[Any, Any], meanings: Mapping[str, str], optional: Collection[str] = ()) -> None:
    """Refuse an unknown key, naming the nearest known one, and then a missing key, naming its meaning."""
    for key in section:
        if key not in meanings:
            raise refusal(f"is not a key here; {did_you_mean(key, meanings)}", key)
    for key, meaning in meanings.items():
        if key not in section and key not in optional:
            raise refusal(f"is missing; it is needed ({meaning.rstrip('.')})", key)


class Section(BaseModel):
    """A mapping of params.yaml: frozen, without coercion, and without unknown keys, NaN or infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _keys(cls, section: Any) -> Any:
        if isinstance(section, Mapping):
            fields = cls.model_fields.items()
            optional = {key for key, field in fields if not field.is_required()}
            check_keys(section, {key: field.description or key for key, field in fields}, optional)
        return section


def _scales(section: Any) -> Any:
    if isinstance(section, Mapping):
        check_keys(section, dict.fromkeys(get_args(Scale), "each scale has a block of its own"))
    return section


def is_name(value: str) -> bool:
    """Whether a text can be a name, and so part of a path, of a DVC stage and of a command line."""
    return NAME.fullmatch(value) is not None


def _name(value: str) -> str:
    if not is_name(value):
        raise refusal(f"is not a name; a name becomes a folder and must match {NAME.pattern}")
    return value


def _text(value: str) -> str:
    if not value or value != value.strip() or not value.isprintable() or len(value) > MAX_TEXT or "|" in value:
        raise refusal(
            f"is {format_value(value)}; it must be 1 to {MAX_TEXT} printable characters without | or outer spaces"
        )
    return value


def _place(value: str) -> str:
    if not _PLACE.fullmatch(value):
        raise refusal(
            f"is {format_value(value)}; it must be the path of a file or folder here, of letters, digits, spaces and "
            "./_-+@,=(), and not start with - or a space"
        )
    return value


def _distinct(values: tuple[T, ...]) -> tuple[T, ...]:
    if len(set(values)) < len(values):
        raise refusal(f"names {', '.join(map(str, values))}; each may be named once")
    return values


def _person(value: str) -> str:
    if len(value) < 2 or value == OURS:
        raise refusal(f"is no name; the name of a signer has 2 characters or more, and is not {OURS!r}")
    return value


def _public_key(value: Any) -> Key:
    if not isinstance(value, str):
        raise refusal(
            f"is {format_value(value)}; it must be a public key, as one line of OpenSSH: ecdsa-sha2-nistp256 AAAA..."
        )
    try:
        return parse_key(value)
    except SignatureError as error:
        raise refusal(f"is {format_value(value)}; {error}") from None


def _of_one_each(keys: dict[str, Key]) -> dict[str, Key]:
    owners: dict[Key, str] = {}
    for name, key in keys.items():
        if key in owners:
            raise refusal(f"has the key of {owners[key]} too; everybody listed needs a key of their own", name)
        owners[key] = name
    return keys


PerScale = Annotated[dict[Scale, T], BeforeValidator(_scales)]
Name = Annotated[str, AfterValidator(_name)]
Text = Annotated[str, AfterValidator(_text)]
PublicKey = Annotated[Key, BeforeValidator(_public_key)]
People = Annotated[dict[Annotated[Text, AfterValidator(_person)], PublicKey], AfterValidator(_of_one_each)]
"""Name to public key, each key once."""
Place = Annotated[str, AfterValidator(_place)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Share = Annotated[float, Field(ge=0, le=1)]
Distinct = Annotated[tuple[str, ...], Field(strict=False, min_length=1), AfterValidator(_distinct)]
Seeds = Annotated[tuple[Seed, ...], Field(strict=False, min_length=1), AfterValidator(_distinct)]
LearningRate = Annotated[float, Field(gt=0, lt=1)]


def _path(parts: Iterable[object]) -> str:
    """The key path of an error, without pydantic's additions: a profile's method, and the mark of a key."""
    texts = [str(part) for part in parts if part not in ("", "[key]")]
    # A key may be any text.
    kept = [text if text.isprintable() and len(text) <= MAX_TEXT else format_value(text) for text in texts]
    if kept[:1] == ["profiles"] and len(kept) > 2:
        del kept[2]
    return ".".join(kept) or "the file"


def sentence(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """The first error as one sentence. Unknown keys precede other errors, since they often explain those."""
    details: list[ErrorDetails] = error.errors(include_url=False)
    first = min(details, key=lambda detail: detail["type"] not in ("sentence", "extra_forbidden"))
    loc = (prefix, *first["loc"])
    path, value, context = _path(loc), format_value(first["input"]), first.get("ctx", {})
    match first["type"]:
        case "sentence":
            return f"{_path([*loc, context['key']])} {context['sentence']}"
        case "extra_forbidden":
            return f"{path} is not a key here; {did_you_mean(first['loc'][-1], _fields(model, first['loc'][:-1]))}"
        case "union_tag_not_found":
            return f"{path}.method is missing; allowed: {', '.join(METHODS)}"
        case "union_tag_invalid":
            return f"{path}.method is {context['tag']!r}; {did_you_mean(context['tag'], METHODS)}"
        case "model_type" | "dict_type" | "model_attributes_type":
            return f"{path} is {value}; it must be a mapping"
        case "string_type" if loc[-1] == "[key]":
            return f"{path} is not a key here; allowed: text, which needs quotes where it reads as a number"
        case "tuple_type":
            return f"{path} is {value}; it must be a list"
        case "too_short":
            return f"{path} is empty; it must hold at least one entry"
        case "missing":
            return f"{path} is missing"
    text = first["msg"].removeprefix("Value error, ")
    return f"{path} is {value}; {text.replace('Input should', 'it must').replace('String should', 'it must')}"


def _fields(model: type[BaseModel], loc: Iterable[object]) -> Collection[str]:
    """The fields of the model nested at a place of another one."""
    for part in loc:
        nested = model.model_fields[str(part)].annotation if str(part) in model.model_fields else None
        if not isinstance(nested, type) or not issubclass(nested, BaseModel):  # an optional block, or a mapping of some
            return ()
        model = nested
    return model.model_fields
