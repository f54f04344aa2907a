"""A file of Ray's cluster launcher, `ray up`: what the launcher refuses, and what it takes without a word."""

import contextlib
import importlib.resources
import io
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rayfl.clusters.faults import by_schema, secrets, texts, versions
from rayfl.config import nearest
from rayfl.config.plain import shown

COMMANDS = ("initialization_commands", "setup_commands")
"""Of all nodes; each kind has its own besides."""
OF_KIND = {
    "head": ("head_setup_commands", "head_start_ray_commands"),
    "worker": ("worker_setup_commands", "worker_start_ray_commands"),
}
"""Kind of node -> its own commands."""
TOKEN = ".ray/auth_token"
NOBODYS = re.compile(r"(?<![\d.])0\.0\.0\.0/0|(?<![\w:])::/0")
"""Addresses of everybody."""
LISTENS = re.compile(r"--(?:dashboard-)?host[= ]['\"]?(?:0\.0\.0\.0|::|\*)(?![\w.:])")
PUBLISHES = re.compile(r"(?:^|\s)(?:-p|--publish)[= ]?(?!127\.|localhost|\[::1\])\S*\d")
"""docker's option, in docker's command or options alone: mkdir and ssh have a -p too."""
MOUNTS = re.compile(r"(?:^|[\s;&|(])(?:mount|mountpoint|exportfs)\s|/etc/fstab", re.MULTILINE)


def problems(given: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each thing that is wrong."""
    from ray import autoscaler

    schema = json.loads((importlib.resources.files(autoscaler) / "ray-schema.json").read_text())
    wrong = [*by_schema(schema, given), *_node_types(given), *_mounts(given)]
    yield from wrong
    yield from _hidden(given)
    if wrong:
        return
    try:
        whole = _prepared(given)
    except Exception as error:
        yield f"Ray's launcher refuses it: {' '.join(str(error).split())}"
        return
    yield from _commands(given, whole)


def _prepared(given: Mapping[str, Any]) -> dict[str, Any]:
    """With what Ray's launcher fills in, as it accepts it."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    said, log = io.StringIO(), logging.getLogger("ray.autoscaler._private.util")
    # it warns of what its own defaults hold
    before, log.disabled = log.disabled, True
    # the launcher prints what is wrong, and raises nothing that says it
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            whole = prepare_config(json.loads(json.dumps(given)))
            validate_config(whole)
        except Exception as error:
            raise ValueError(str(error) or said.getvalue()) from None
        finally:
            log.disabled = before
    return whole


def _node_types(given: Mapping[str, Any]) -> Iterator[str]:
    types, head, most = given.get("available_node_types"), given.get("head_node_type"), given.get("max_workers", 2**31)
    if not isinstance(types, dict) or not all(isinstance(kind, dict) for kind in types.values()):
        return
    if head is None:
        yield f"head_node_type: missing; allowed: one of {', '.join(sorted(types))}"
    elif head not in types:
        yield f"head_node_type: no node type is called {shown(head)}; {nearest(head, types)}"
    least = {name: kind.get("min_workers", 0) for name, kind in types.items()}
    highest = {name: kind.get("max_workers", most) for name, kind in types.items()}
    if not all(isinstance(number, int) for number in [*least.values(), *highest.values(), most]):
        return
    for name, low in least.items():
        if low > highest[name]:
            place = f"available_node_types.{name}.min_workers"
            yield f"{place}: given {low}; allowed: at most its max_workers, {highest[name]}"
    if sum(least.values()) > most:
        yield f"max_workers: given {most}; allowed: at least the sum of all min_workers, {sum(least.values())}"


def _mounts(given: Mapping[str, Any]) -> Iterator[str]:
    mounts = given.get("file_mounts", {})
    if not isinstance(mounts, dict):
        return
    for target, source in mounts.items():
        place = f"file_mounts.{target}"
        if not isinstance(source, str):
            yield f"{place}: given {shown(source)}; allowed: a path of this machine"
        elif not source.endswith(TOKEN) and not Path(source).expanduser().exists():
            yield f"{place}: given {source!r}, which is not there; allowed: a file or folder, seen from {Path.cwd()}"
    if not any(target.endswith(TOKEN) for target in mounts):
        yield (
            f"file_mounts: given no token; allowed: ~/{TOKEN}: ~/{TOKEN}, which `ray get-auth-token --generate` makes"
        )


def _commands(given: Mapping[str, Any], whole: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong in the commands of every kind of node, Ray's defaults and mounted scripts among them."""
    seen: dict[str, str] = {}
    for kind, own in OF_KIND.items():
        said = dict(_said(given, whole, kind))
        seen |= said
        text = "\n".join(said.values())
        modes = re.findall(r"RAY_AUTH_MODE=['\"]?(\w*)", text)
        for mode in modes or ["nothing"]:
            if mode != "token":
                told = f"RAY_AUTH_MODE={mode}" if modes else "no RAY_AUTH_MODE"
                yield f"{own[1]}: given {told}; allowed: RAY_AUTH_MODE=token on every node, before `ray start`"
        yield from _shared(text, own[0])
    yield from _hidden(seen)
    for place, text in seen.items():
        yield from _open(place, text)
    yield from versions({**dict(texts(given)), **seen})


def _said(given: Mapping[str, Any], whole: Mapping[str, Any], kind: str) -> Iterator[tuple[str, str]]:
    """Place -> what runs there on nodes of a kind, without comments: commands, docker's options, mounted scripts."""
    said: dict[str, str] = {}
    for key in (*COMMANDS, *OF_KIND[kind]):
        # prepared, these two hold the common ones once more
        default = [] if key in ("head_setup_commands", "worker_setup_commands") else whole.get(key, [])
        said |= {f"{key}.{i}": command for i, command in enumerate(given.get(key, default))}
    for name, node in given.get("available_node_types", {}).items() if kind == "worker" else ():
        for key in ("initialization_commands", "worker_setup_commands"):
            said |= {f"available_node_types.{name}.{key}.{i}": text for i, text in enumerate(node.get(key, []))}
    docker = given.get("docker", {})
    for key in ("run_options", f"{kind}_run_options"):
        said |= {f"docker.{key}.{i}": f"docker run {option}" for i, option in enumerate(docker.get(key, []))}
    for word in re.findall(r"[\w~./-]+\.sh\b", "\n".join(said.values())):
        for target, source in given.get("file_mounts", {}).items():
            if Path(word).is_relative_to(target):
                script = Path(source).expanduser() / Path(word).relative_to(target)
                said |= {str(script): script.read_text()} if script.is_file() else {}
    for place, text in said.items():
        yield place, re.sub(r"^\s*#.*\n?", "", text, flags=re.MULTILINE)


def _shared(text: str, place: str) -> Iterator[str]:
    """The folder of the results has to be one that a command mounts, or that the head exports."""
    outputs = re.findall(r"(?:RAYFL_OUTPUT=|--output[= ])['\"]?([\w$~./{}-]+)", text)
    for output in dict.fromkeys(outputs) if not MOUNTS.search(text) else ():
        yield (
            f"{place}: given the output folder {output}, which no command mounts; allowed: one that all nodes see, "
            "with the command that mounts it, or that fails where it is not mounted"
        )


def _hidden(given: Mapping[str, Any]) -> Iterator[str]:
    """What may stand anywhere in a text: secrets, and everybody's addresses."""
    yield from secrets(given)
    for place, text in texts(given):
        if NOBODYS.search(text):
            yield (
                f"{place}: given {shown(text)}, a port open to the world; allowed: addresses of your own; without "
                "security_group the cluster has a group of its own, with SSH from your address alone"
            )


def _open(place: str, text: str) -> Iterator[str]:
    through = "allowed: 127.0.0.1, which `ray dashboard` or an SSH tunnel reaches"
    for found in LISTENS.findall(text):
        yield f"{place}: given {found}, a port open to the world; {through}"
    for line in text.splitlines():
        if re.search(r"\bdocker\s+run\b", line) and (found := PUBLISHES.search(line)):
            yield f"{place}: given {found.group().strip()}, a port open to the world; {through}"


def summary(given: Mapping[str, Any]) -> str:
    """What a good file holds."""
    here = "" if (Path.home() / TOKEN).exists() else "; here is no token yet: `ray get-auth-token --generate` makes one"
    kind = given["provider"].get("module") or given["provider"].get("type")
    return f"a cluster by {kind}, up to {given.get('max_workers', 0)} workers{here}"
