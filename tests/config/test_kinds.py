"""Classes that a `name` chooses: ours, those of installed packages, and any by "package.module:Class"."""

import importlib.metadata
import pickle
import sys
from abc import ABC, abstractmethod
from importlib.metadata import EntryPoint
from typing import Literal

import pytest
from pydantic import Field

from rayfl.config import ConfigError, Kind, Named, parse


class Animal(Named, ABC):
    legs: int = Field(4, ge=0)

    @abstractmethod
    def sound(self) -> str:
        """Return the sound."""


class Cat(Animal):
    name: Literal["cat"] = "cat"

    def sound(self) -> str:
        return "meow"


ANIMALS = Kind("animal", Animal, {"cat": Cat}, "rayfl.animals")

SOURCE = f"""
from abc import abstractmethod
from typing import Literal

from pydantic import Field

from rayfl.config import Config
from {__name__} import Animal, Cat


class Dog(Animal):
    volume: float = Field(0.5, gt=0)

    def sound(self):
        return "woof"


class Puppy(Dog):
    name: Literal["puppy"] = "puppy"


class Kitten(Cat):
    pass


class Mute(Animal):
    @abstractmethod
    def gesture(self):
        pass


class Stone(Config):
    weight: float = 1.0


class Zoo:
    class Seal(Dog):
        pass


def make():
    return Dog()
"""


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """A user's package on the path of this process: `zoo.animals`, and modules that fail."""
    package = tmp_path / "zoo"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "animals.py").write_text(SOURCE)
    (package / "broken.py").write_text("raise RuntimeError('the first line\\nthe second line')\n")
    (package / "unreadable.py").write_text("def f(:\n")
    (package / "script.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for module in [name for name in sys.modules if name == "zoo" or name.startswith("zoo.")]:
        del sys.modules[module]


@pytest.fixture
def entry_points(zoo, monkeypatch):
    """Entry points of an installed package."""
    offered = {
        "dog": "zoo.animals:Dog",
        "puppy": "zoo.animals:Puppy",
        "whelp": "zoo.animals:Puppy",
        "kitten": "zoo.animals:Kitten",
        "stone": "zoo.animals:Stone",
        "broken": "zoo.broken:Dog",
        "cat": "zoo.animals:Dog",
    }
    points = [EntryPoint(name, value, "rayfl.animals") for name, value in offered.items()]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [point for point in points if point.group == group]
    )


def message(kind: Kind, value) -> str:
    with pytest.raises(ConfigError) as error:
        kind.read(value, "f.yaml: animal")
    return str(error.value)


# ours


@pytest.mark.parametrize("value", ["cat", {"name": "cat"}, Cat(), Cat(name="cat")])
def test_a_class_of_rayfl(value):
    cat = ANIMALS.read(value, "f.yaml: animal")
    assert cat == Cat() and cat.model_dump() == {"name": "cat", "legs": 4}
    assert ANIMALS.known() == {"cat": Cat}


def test_an_instance_is_taken_as_it_is():
    cat = Cat(legs=3)
    assert ANIMALS.read(cat, "f.yaml: animal") is cat


MISTAKES = {
    "unknown": ("cab", "animal.name: no animal is called 'cab'. Did you mean 'cat'? Allowed: cat"),
    "unknown in a mapping": ({"name": "x"}, "animal.name: no animal is called 'x'. Allowed: cat"),
    "empty": ({"name": ""}, "animal.name: no animal is called ''. Allowed: cat"),
    "a list": ({"name": ["cat"]}, "animal.name: no animal is called ['cat']. Allowed: cat"),
    "a mapping": ({"name": {"cat": 1}}, "animal.name: no animal is called {'cat': 1}. Allowed: cat"),
    "a number": ({"name": 5}, "animal.name: no animal is called 5. Allowed: cat"),
    "nothing": ({"name": None}, "animal.name: no animal is called None. Allowed: cat"),
    "no name": ({"legs": 3}, "animal: {'legs': 3} is not valid. Allowed: a mapping with a `name`: cat"),
    "no section": (5, "animal: 5 is not valid. Allowed: a mapping with a `name`: cat"),
    "no section at all": (None, "animal: None is not valid. Allowed: a mapping with a `name`: cat"),
    "unknown option": (
        {"name": "cat", "leg": 3},
        "animal.leg: unknown key 'leg'. Did you mean 'legs'? Allowed: legs, name",
    ),
    "wrong option": ({"name": "cat", "legs": True}, "animal.legs: True is not valid. Allowed: a whole number"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    value, expected = MISTAKES[mistake]
    assert message(ANIMALS, value) == f"f.yaml: {expected}"


# a user's


def test_a_class_by_its_dotted_name(zoo):
    dog = ANIMALS.read("zoo.animals:Dog", "f.yaml: animal")
    assert dog.sound() == "woof" and dog.name == "zoo.animals:Dog"
    assert dog == type(dog)() == ANIMALS.read(dog.model_dump(mode="json"), "again")
    assert pickle.loads(pickle.dumps(dog)) == dog
    assert ANIMALS.read({"name": "zoo.animals:Dog", "volume": 1}, "f.yaml: animal").volume == 1
    assert ANIMALS.read("zoo.animals:Zoo.Seal", "f.yaml: animal").name == "zoo.animals:Zoo.Seal"
    assert ANIMALS.find(f"{__name__}:Cat", "f.yaml: animal") is Cat
    assert ANIMALS.read(f"{__name__}:Cat", "f.yaml: animal").name == "cat"


IMPORTS = {
    "no such package": ("nowhere.animals:Dog", "cannot be imported (ModuleNotFoundError: No module named 'nowhere')"),
    "no such module": ("zoo.plants:Dog", "cannot be imported (ModuleNotFoundError: No module named 'zoo.plants')"),
    "no such class": (
        "zoo.animals:Cow",
        "cannot be imported (AttributeError: module 'zoo.animals' has no attribute 'Cow')",
    ),
    "an error in the module": ("zoo.broken:Dog", "cannot be imported (RuntimeError: the first line)"),
    "not Python": ("zoo.unreadable:Dog", "cannot be imported (SyntaxError: invalid syntax (unreadable.py, line 1))"),
    "a script": ("zoo.script:Dog", "cannot be imported (SystemExit: 3)"),
    "not a name": ("zoo:animals:Dog", "cannot be imported (ValueError: invalid format: 'zoo:animals:Dog')"),
}


@pytest.mark.parametrize("case", IMPORTS)
def test_failed_imports(case, zoo):
    name, expected = IMPORTS[case]
    allowed = "package.module:Class of a package that is installed or in a folder of PYTHONPATH"
    if case in ("an error in the module", "not Python", "a script"):
        module = name.removesuffix(":Dog")
        allowed = f"a module without errors. Hint: python -c 'import {module}' shows where it is"
    assert message(ANIMALS, name) == f"f.yaml: animal.name: {name!r} {expected}. Allowed: {allowed}"


BASE = f"{__name__}:Animal"

CLASSES = {
    "another class": ("zoo.animals:Stone", f"is not a subclass of {BASE}. Allowed: its subclasses (rayfl/PLUGINS.md)"),
    "a function": ("zoo.animals:make", f"is not a subclass of {BASE}. Allowed: its subclasses (rayfl/PLUGINS.md)"),
    "a module": ("zoo.animals:", f"is not a subclass of {BASE}. Allowed: its subclasses (rayfl/PLUGINS.md)"),
    "an abstract class": (
        "zoo.animals:Mute",
        "does not define gesture, sound. Allowed: classes without abstract methods",
    ),
    "the base": (BASE, "does not define sound. Allowed: classes without abstract methods"),
    "the name of a class of ours": (
        "zoo.animals:Kitten",
        "has the field `name` with the default 'cat'. Allowed: a class without this field, or an entry point of "
        "rayfl.animals with this name",
    ),
    "a name that leads nowhere": (
        "zoo.animals:Puppy",
        "has the field `name` with the default 'puppy'. Allowed: a class without this field, or an entry point of "
        "rayfl.animals with this name",
    ),
}


@pytest.mark.parametrize("case", CLASSES)
def test_classes_of_another_kind(case, zoo):
    name, expected = CLASSES[case]
    assert message(ANIMALS, name) == f"f.yaml: animal.name: {name!r} {expected}"


def test_options_of_other_packages_are_checked(zoo):
    dog = "zoo.animals:Dog"
    assert message(ANIMALS, {"name": dog, "volume": True}) == (
        "f.yaml: animal.volume: True is not valid. Allowed: a number"
    )
    assert message(ANIMALS, {"name": dog, "volume": 0, "legs": -1}) == (
        "f.yaml: animal.legs: -1 is not valid. Allowed: at least 0\n"
        "f.yaml: animal.volume: 0 is not valid. Allowed: more than 0"
    )
    assert message(ANIMALS, {"name": dog, "volum": 1}) == (
        "f.yaml: animal.volum: unknown key 'volum'. Did you mean 'volume'? Allowed: legs, name, volume"
    )


def test_a_class_without_a_name_has_one_name(zoo):
    dog = ANIMALS.find("zoo.animals:Dog", "f.yaml: animal")
    with pytest.raises(ConfigError) as error:
        parse(dog, {"name": "rex"}, "f.yaml: animal")
    assert str(error.value) == "f.yaml: animal.name: 'rex' is not valid. Allowed: zoo.animals:Dog"
    # in Python as in a file, without pydantic's form and addresses
    with pytest.raises(ConfigError) as error:
        dog(name="rex", volume="loud")
    assert str(error.value) == (
        "Dog: name: 'rex' is not valid. Allowed: zoo.animals:Dog\nDog: volume: 'loud' is not valid. Allowed: a number"
    )


# installed


def test_entry_points(entry_points):
    assert list(ANIMALS.known()) == ["dog", "puppy", "whelp", "cat"]
    assert ANIMALS.known()["cat"] is Cat and ANIMALS.find("cat", "f.yaml: animal") is Cat
    assert ANIMALS.read("dog", "f.yaml: animal").name == "zoo.animals:Dog"
    puppy = ANIMALS.read({"name": "puppy", "volume": 0.1}, "f.yaml: animal")
    assert puppy.name == "puppy" and ANIMALS.read(puppy.model_dump(), "again") == puppy
    assert (
        ANIMALS.read("whelp", "f.yaml: animal") == ANIMALS.read("zoo.animals:Puppy", "f.yaml: animal") == type(puppy)()
    )
    assert message(ANIMALS, "pupp") == (
        "f.yaml: animal.name: no animal is called 'pupp'. Did you mean 'puppy'? Allowed: cat, dog, puppy, whelp"
    )


def test_entry_points_that_cannot_be_used(entry_points):
    assert message(ANIMALS, "broken") == (
        "f.yaml: animal.name: 'broken' cannot be imported (RuntimeError: the first line). Allowed: "
        "package.module:Class of a package that is installed or in a folder of PYTHONPATH"
    )
    assert message(ANIMALS, "stone").startswith("f.yaml: animal.name: 'stone' is not a subclass of ")
    assert message(ANIMALS, "kitten").startswith(
        "f.yaml: animal.name: 'kitten' has the field `name` with the default 'cat'. "
    )
