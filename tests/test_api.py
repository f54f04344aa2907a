"""The public Python API: every name and signature is in `tests/api.txt`, and every change of it in the changelog.

python tests/test_api.py        # write the file, and print its digest for the changelog
"""

import hashlib
import inspect
from pathlib import Path

import rayfl
from rayfl.config import Config

FILE, CHANGES = Path("tests/api.txt"), Path(".github/CHANGELOG.md")


def api() -> str:
    """Return one line per public name, setting and function, without types, whose texts depend on Python's version."""
    return "\n".join(line for name in rayfl.__all__ for line in lines(name, getattr(rayfl, name))) + "\n"


def lines(name, value):
    if inspect.isfunction(value):
        return [f"{name}{bare(value)}"]
    if not inspect.isclass(value):
        return [name]
    found = [name if issubclass(value, Config | Exception) else f"{name}{bare(value)}"]
    if issubclass(value, Config):
        found += [f"{name}.{key}{'' if field.is_required() else ' ='}" for key, field in value.model_fields.items()]
    members = {key: member for cls in reversed(value.__mro__) if ours(cls) for key, member in vars(cls).items()}
    return found + [line for key, member in sorted(members.items()) if key[0] != "_" for line in of(name, key, member)]


def ours(cls):
    return cls.__module__.startswith("rayfl") and cls.__module__ != "rayfl.config.sections"


def of(name, key, member):
    if isinstance(member, property):
        return [f"{name}.{key}"]
    function = getattr(member, "__func__", member)
    return [f"{name}.{key}{bare(function)}"] if inspect.isfunction(function) else []


def bare(function):
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty, default=shown(p)) for p in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=signature.empty)


def shown(parameter):
    """Its default, or "..." for one whose text is no Python."""
    plain = isinstance(parameter.default, int | float | str | None | tuple)
    return parameter.default if parameter.default is parameter.empty or plain else ...


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def test_the_api_changes_only_with_the_changelog():
    now = api()
    assert now.splitlines() == FILE.read_text().splitlines(), "python tests/test_api.py writes the file"
    assert f"`{digest(now)}`" in CHANGES.read_text(), "the entry of the changelog needs the new digest"


def test_every_public_name_is_documented():
    values = {name: getattr(rayfl, name) for name in rayfl.__all__}
    assert [name for name, value in values.items() if not isinstance(value, int) and not value.__doc__] == []


def test_every_public_name_has_an_example():
    """`test_layers.py` runs it."""
    values = {name: getattr(rayfl, name) for name in rayfl.__all__}
    assert [name for name, value in values.items() if not isinstance(value, int) and ">>> " not in value.__doc__] == []


if __name__ == "__main__":
    FILE.write_text(api())
    print(digest(api()))
