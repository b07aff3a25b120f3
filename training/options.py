"""Settings as frozen dataclasses that explain themselves, and the TOML that they are read from.

A field made with `option(...)` carries its help, unit and permitted range. `parse_section` turns a TOML table into such
a dataclass and names the file, the key, the value and the allowed range when something is wrong. Run specifications and
the node's own configuration are both built on it, and `--help` texts quote it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar, get_type_hints

S = TypeVar("S")

types_of: Callable[[Any], dict[str, Any]] = cache(get_type_hints)  # by field: to find them takes a millisecond


class SettingError(ValueError):
    """A setting that cannot be used. The message says where it stands, what it is, and what would be right."""


@dataclass(frozen=True)
class Option:
    """What is known about one setting beside its type and default."""

    help: str
    unit: str = ""
    between: tuple[float, float] | None = None  # the least and the greatest
    choices: tuple[str, ...] = ()
    form: tuple[str, str] = ("", "")  # regular expression that a text matches whole, and what it asks for in words

    def allowed(self) -> str:
        """The permitted values in words, for messages and documentation."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        unit = f" {self.unit}" if self.unit else ""
        return "{:g} to {:g}".format(*self.between) + unit if self.between else f"any value{unit}"


def option(default: Any = dataclasses.MISSING, help: str = "", **more: Any) -> Any:
    """A field of a settings dataclass; `more`: the other fields of Option, by name."""
    return dataclasses.field(default=default, metadata={"option": Option(help, **more)})


def describe(section: type[Any]) -> dict[str, tuple[dataclasses.Field[Any], Option]]:
    """The options of a settings dataclass, by key."""
    return {f.name: (f, f.metadata["option"]) for f in dataclasses.fields(section) if "option" in f.metadata}


def parse_section(section: type[S], table: Mapping[str, Any], *, where: str) -> S:
    """Build `section` from a TOML table.

    `where` names the file and table for messages, such as `run.toml [inner]`.
    Raises one SettingError, a line for each unknown key, wrong type, value out of range and missing required key.
    """
    known = describe(section)
    values: dict[str, Any] = {}
    wrong: list[str] = []
    for key, value in table.items():
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "known keys: " + ", ".join(known)
            wrong.append(f"{where}: unknown key {key!r}; {hint}")
            continue
        try:
            values[key] = coerce(section, key, value, where=where)
        except SettingError as error:
            wrong.append(str(error))
    required = {k for k, (f, _) in known.items() if f.default is dataclasses.MISSING}
    for key in sorted(required - table.keys()):
        wrong.append(f"{where}: {key!r} is missing; {known[key][1].help}, {known[key][1].allowed()}")
    if wrong:
        raise SettingError("\n".join(wrong))
    return section(**values)


def coerce(section: type[Any], key: str, value: Any, *, where: str) -> Any:
    """Check one value against the type and range of `section.key`; integers are accepted for floats."""
    described = describe(section)[key][1]
    wanted = types_of(section)[key]

    def wrong(expected: str) -> SettingError:
        return SettingError(f"{where}: {key} = {value!r} is not valid; expected {expected}")

    if wanted is bool:
        if not isinstance(value, bool):
            raise wrong("true or false")
        return value
    if wanted in (int, float):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong(f"a number, {described.allowed()}")
        if not abs(value) <= sys.float_info.max:  # nor are there floats for whole numbers beyond
            raise wrong(f"a finite number, {described.allowed()}")
        if wanted is int and (isinstance(value, float) and not value.is_integer()):
            raise wrong(f"a whole number, {described.allowed()}")
        number = wanted(value)
        if described.between and not described.between[0] <= number <= described.between[1]:
            raise wrong(described.allowed())
        return number
    if wanted is str:
        if not isinstance(value, str):
            raise wrong("text")
        if described.choices and value not in described.choices:
            raise wrong(described.allowed())
        pattern, expected = described.form
        if pattern and not re.fullmatch(pattern, value):
            raise wrong(expected)
        return value
    if wanted == tuple[str, ...]:
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise wrong("a list of texts")
        return tuple(value)
    raise TypeError(f"{section.__name__}.{key}: settings of type {wanted} are not supported")


# -- TOML


def read_toml(path: Path, *, hint: str = "check the path") -> dict[str, Any]:
    """The tables of a TOML file. Raises SettingError where it cannot be read, with `hint` where it is missing."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingError(f"{path}: no such file; {hint}") from None
    except IsADirectoryError:
        within = ", such as ".join(["name a file in it", *map(str, sorted(path.glob("*.toml"))[:1])])
        raise SettingError(f"{path}: is a folder and no file; {within}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or a number or nesting beyond what Python reads
        raise SettingError(f"{path}: not valid TOML: {error}") from error


def as_toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(as_toml(item) for item in value) + "]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in escaped) + '"'
    return repr(value)


def number_of(count: int, what: str) -> str:
    """`1 shard`, `2 shards`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def lacking(what: str, error: ImportError, package: str) -> str:
    """That `what` has need of a package which is not here, and how to install it."""
    return f"{what}, which cannot be imported ({error}): {installing(package)}"


def installing(package: str) -> str:
    """The command that adds a package, or an extra as in swarmnode[hf], to the environment of this program."""
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote

    python = quote(sys.executable)
    tool = f"{python} -m pip install" if find_spec("pip") else f"uv pip install --python {python}"  # as of `uv tool`
    name, *extra = package.partition("[")
    with suppress(PackageNotFoundError):
        told = json.loads(distribution(name).read_text("direct_url.json") or "{}")  # PEP 610
        if all(extra) and told.get("dir_info", {}).get("editable"):  # from a checkout, as docs/quickstart.md has it
            folder = unquote(told["url"].removeprefix("file://"))
            return f"{tool} --constraint {quote(f'{folder}/constraints.txt')} -e {quote(''.join((folder, *extra)))}"
    return f'{tool} "{package}"'
