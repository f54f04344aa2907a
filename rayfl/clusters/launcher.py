"""Checks of a file for `ray up`: the launcher's own checks, and problems that it accepts silently."""

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
"""Commands of all nodes."""
OF_KIND = {
    "head": ("head_setup_commands", "head_start_ray_commands"),
    "worker": ("worker_setup_commands", "worker_start_ray_commands"),
}
"""Kind of node -> its additional commands."""
TOKEN = ".ray/auth_token"
NOBODYS = re.compile(r"(?<![\d.])0\.0\.0\.0/0|(?<![\w:])::/0")
"""Networks that contain every address."""
LISTENS = re.compile(r"--(?:dashboard-)?host[= ]['\"]?(?:0\.0\.0\.0|::|\*)(?![\w.:])")
PUBLISHES = re.compile(r"(?:^|\s)(?:-p|--publish)[= ]?(?!127\.|localhost|\[::1\])\S*\d")
"""Docker's option. Only searched in commands and options of docker: mkdir and ssh have a -p too."""
MOUNTS = re.compile(r"(?:^|[\s;&|(])(?:mount|mountpoint|exportfs)\s|/etc/fstab", re.MULTILINE)


def problems(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield one sentence per problem."""
    from ray import autoscaler

    schema = json.loads((importlib.resources.files(autoscaler) / "ray-schema.json").read_text(encoding="utf-8"))
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
    """Return the configuration as completed and accepted by Ray's launcher. Raise ValueError with its message."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    printed, log = io.StringIO(), logging.getLogger("ray.autoscaler._private.util")
    # it warns about its own defaults
    before, log.disabled = log.disabled, True
    # the launcher prints problems instead of raising them
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            whole = prepare_config(json.loads(json.dumps(given)))
            validate_config(whole)
        except Exception as error:
            raise ValueError(str(error) or printed.getvalue()) from None
        finally:
            log.disabled = before
    return whole


def _node_types(given: Mapping[str, Any]) -> Iterator[str]:
    types, head, most = given.get("available_node_types"), given.get("head_node_type"), given.get("max_workers", 2**31)
    if not isinstance(types, dict) or not all(isinstance(kind, dict) for kind in types.values()):
        return
    if head is None:
        yield f"head_node_type: missing. Allowed: one of {', '.join(sorted(types))}"
    elif isinstance(head, str) and head not in types:
        yield f"head_node_type: no node type is called {shown(head)}. {nearest(head, types)}"
    least = {name: kind.get("min_workers", 0) for name, kind in types.items()}
    highest = {name: kind.get("max_workers", most) for name, kind in types.items()}
    if not all(isinstance(number, int) for number in [*least.values(), *highest.values(), most]):
        return
    for name, low in least.items():
        if low > highest[name]:
            place = f"available_node_types.{name}.min_workers"
            yield f"{place}: {low} is not valid. Allowed: at most its max_workers, {highest[name]}"
    if sum(least.values()) > most:
        yield f"max_workers: {most} is not valid. Allowed: at least the sum of all min_workers, {sum(least.values())}"


def _mounts(given: Mapping[str, Any]) -> Iterator[str]:
    mounts = given.get("file_mounts", {})
    if not isinstance(mounts, dict):
        return
    for target, source in mounts.items():
        place = f"file_mounts.{target}"
        if not isinstance(source, str):
            yield f"{place}: {shown(source)} is not valid. Allowed: a path of this machine"
        elif not source.endswith(TOKEN) and not Path(source).expanduser().exists():
            yield f"{place}: {source!r} does not exist. Allowed: a file or folder, relative to {Path.cwd()}"
    if not any(target.endswith(TOKEN) for target in mounts):
        yield (
            f"file_mounts: the token is missing. Allowed: ~/{TOKEN}: ~/{TOKEN}, which `ray get-auth-token "
            "--generate` makes"
        )


def _commands(given: Mapping[str, Any], whole: Mapping[str, Any]) -> Iterator[str]:
    """Yield problems in the commands of all nodes, including Ray's defaults and mounted scripts."""
    seen: dict[str, str] = {}
    for kind, own in OF_KIND.items():
        commands = dict(_commands_of(given, whole, kind))
        seen |= commands
        text = "\n".join(commands.values())
        modes = re.findall(r"RAY_AUTH_MODE=['\"]?(\w*)", text)
        for mode in modes or ["nothing"]:
            if mode != "token":
                problem = f"RAY_AUTH_MODE={mode} is not valid" if modes else "RAY_AUTH_MODE is not set"
                yield f"{own[1]}: {problem}. Allowed: RAY_AUTH_MODE=token on every node, before `ray start`"
        yield from _shared(text, own[0])
    yield from _hidden(seen)
    for place, text in seen.items():
        yield from _open(place, text)
    yield from versions({**dict(texts(given)), **seen})


def _commands_of(given: Mapping[str, Any], whole: Mapping[str, Any], kind: str) -> Iterator[tuple[str, str]]:
    """Yield place and text, without comments, of the commands, docker options and mounted scripts of a kind of node."""
    found: dict[str, str] = {}
    for key in (*COMMANDS, *OF_KIND[kind]):
        # after preparation these two repeat the common commands
        default = [] if key in ("head_setup_commands", "worker_setup_commands") else whole.get(key, [])
        found |= {f"{key}.{i}": command for i, command in enumerate(given.get(key, default))}
    for name, node in given.get("available_node_types", {}).items() if kind == "worker" else ():
        for key in ("initialization_commands", "worker_setup_commands"):
            found |= {f"available_node_types.{name}.{key}.{i}": text for i, text in enumerate(node.get(key, []))}
    docker = given.get("docker", {})
    for key in ("run_options", f"{kind}_run_options"):
        found |= {f"docker.{key}.{i}": f"docker run {option}" for i, option in enumerate(docker.get(key, []))}
    for word in re.findall(r"[\w~./-]+\.sh\b", "\n".join(found.values())):
        for target, source in given.get("file_mounts", {}).items():
            if Path(word).is_relative_to(target):
                script = Path(source).expanduser() / Path(word).relative_to(target)
                found |= {str(script): script.read_text(encoding="utf-8")} if script.is_file() else {}
    for place, text in found.items():
        yield place, re.sub(r"^\s*#.*\n?", "", text, flags=re.MULTILINE)


def _shared(text: str, place: str) -> Iterator[str]:
    """Yield a problem if no command mounts or exports the output folder."""
    outputs = re.findall(r"(?:RAYFL_OUTPUT=|--output[= ])['\"]?([\w$~./{}-]+)", text)
    for output in dict.fromkeys(outputs) if not MOUNTS.search(text) else ():
        yield (
            f"{place}: the output folder {output} is mounted by no command. Allowed: one that all nodes see, "
            "with the command that mounts it, or that fails where it is not mounted"
        )


def _hidden(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield problems in texts anywhere in the file: secrets, and networks of all addresses."""
    yield from secrets(given)
    for place, text in texts(given):
        if NOBODYS.search(text):
            yield (
                f"{place}: {shown(text)} opens a port to the world. Allowed: addresses of your own; without "
                "security_group the cluster has a group of its own, with SSH from your address alone"
            )


def _open(place: str, text: str) -> Iterator[str]:
    through = "Allowed: 127.0.0.1, which `ray dashboard` or an SSH tunnel reaches"
    for found in LISTENS.findall(text):
        yield f"{place}: {found} opens a port to the world. {through}"
    for line in text.splitlines():
        if re.search(r"\bdocker\s+run\b", line) and (found := PUBLISHES.search(line)):
            yield f"{place}: {found.group().strip()} opens a port to the world. {through}"


def summary(given: Mapping[str, Any]) -> str:
    """Return a one-line summary of a valid file."""
    here = "" if (Path.home() / TOKEN).exists() else ". No token here: run `ray get-auth-token --generate`"
    kind = given["provider"].get("module") or given["provider"].get("type")
    return f"valid cluster of provider {kind}, up to {given.get('max_workers', 0)} workers{here}"
