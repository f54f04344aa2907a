"""What is wrong in a cluster's file, before it costs anything.

That is what Ray's launcher or KubeRay refuses, and what both take without a word: a port that is open to the world, Ray
without a token, a password, an output folder that nothing mounts.
"""

import contextlib
import importlib.metadata
import importlib.resources
import io
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jsonschema.validators import validator_for
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from rayfl.config import ConfigError, nearest
from rayfl.plain import LARGEST_TEXT, joined, read_yaml, shown

TOP = re.compile(rb"^(provider|kind)\s*:", re.MULTILINE)
"""What stands at the top of a cluster's file, and of no experiment's."""
DOCUMENT = re.compile(rb"^---(?=\s)", re.MULTILINE)

COMMANDS = ("initialization_commands", "setup_commands")
"""Of all nodes; each kind has its own besides."""
OF_KIND = {"head": ("head_setup_commands", "head_start_ray_commands"),
           "worker": ("worker_setup_commands", "worker_start_ray_commands")}  # fmt: skip
"""Kind of node -> its own commands."""
TOKEN = ".ray/auth_token"

PLAIN_TYPES = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "object": "a section",
    "string": "text",
}
BOUNDS = {
    "minimum": "at least",
    "maximum": "at most",
    "minItems": "a length of at least",
    "maxItems": "a length of at most",
}

NOBODYS = re.compile(r"(?<![\d.])0\.0\.0\.0/0|(?<![\w:])::/0")
"""Addresses of everybody."""
LISTENS = re.compile(r"--(?:dashboard-)?host[= ]['\"]?(?:0\.0\.0\.0|::|\*)(?![\w.:])")
PUBLISHES = re.compile(r"(?:^|\s)(?:-p|--publish)[= ]?(?!127\.|localhost|\[::1\])\S*\d")
"""docker's option, in docker's command or options alone: mkdir and ssh have a -p too."""

MOUNTS = re.compile(r"(?:^|[\s;&|(])(?:mount|mountpoint|exportfs)\s|/etc/fstab", re.MULTILINE)
KEYS = re.compile(r"(?:AKIA|ASIA)[A-Z0-9]{16}|-----BEGIN [A-Z ]*PRIVATE KEY-----|\bhf_\w{30,}|\bgh[pousr]_\w{30,}")
NAMED_SECRET = re.compile(
    r"(?:^|[_-])(?:password|passwd|token|secret|credentials|(?:api|access|secret|flask)[_-]?key)$", re.I
)
ASSIGNED = re.compile(
    r"\b(\w*(?:PASSWORD|PASSWD|TOKEN|SECRET|API_KEY|ACCESS_KEY|SECRET_KEY))=(?!['\"]?[$~/'\"]|\s|$)", re.I
)
IN_ADDRESS = re.compile(r"://[^/\s:@$]+:[^/\s@$]+@")

RAY_VERSION = re.compile(r"(?<![\w-])ray(?:\[[\w,]*\])?\s*==\s*([\w.]+)|rayproject/ray:([\w.]+)|[-:]ray(\d[\w.]*)")

WORLD = ("LoadBalancer", "NodePort")


def is_cluster(path: Path) -> bool:
    """Whether a file is one of Ray's launcher or of Kubernetes, by a key at its top; not whether it is a good one."""
    try:
        with path.open("rb") as file:
            return TOP.search(file.read(LARGEST_TEXT)) is not None
    except OSError:
        return False


def check_cluster(path: Path) -> str:
    """What a cluster's file holds, in one line. A ConfigError has a line for each thing that is wrong in it."""
    documents = list(_documents(path))
    if "provider" in documents[0]:
        problems, found = list(_launcher(documents[0])), _summary(documents[0])
    else:
        problems, found = list(_kubernetes(documents)), f"for Kubernetes: {', '.join(map(_title, documents))}"
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in dict.fromkeys(problems)))
    return found


def _documents(path: Path) -> Iterator[dict[str, Any]]:
    text = path.read_bytes()
    starts = [0, *(found.start() for found in DOCUMENT.finditer(text)), len(text)]
    for start, end in zip(starts, starts[1:], strict=False):
        # the lines before it, so that an error names the line of the file
        before = b"\n" * text.count(b"\n", 0, start)
        try:
            document = read_yaml(before + text[start:end])
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None
        if isinstance(document, dict):
            yield _merged(document)
        elif document is not None:
            raise ConfigError(f"{path}: given {shown(document)}; allowed: a mapping of sections")


def _merged(given: Any) -> Any:
    """With what `<<` lays below a section."""
    if isinstance(given, list):
        return [_merged(entry) for entry in given]
    if not isinstance(given, dict):
        return given
    below = given.get("<<", {})
    layers = [*(reversed(below) if isinstance(below, list) else [below]), given]
    whole = {key: value for layer in layers if isinstance(layer, dict) for key, value in layer.items() if key != "<<"}
    return {key: _merged(value) for key, value in whole.items()}


def _summary(given: Mapping[str, Any]) -> str:
    here = "" if (Path.home() / TOKEN).exists() else "; here is no token yet: `ray get-auth-token --generate` makes one"
    kind = given["provider"].get("module") or given["provider"].get("type")
    return f"a cluster by {kind}, up to {given.get('max_workers', 0)} workers{here}"


# Ray's launcher


def _launcher(given: Mapping[str, Any]) -> Iterator[str]:
    from ray import autoscaler

    schema = json.loads((importlib.resources.files(autoscaler) / "ray-schema.json").read_text())
    wrong = [*_by_schema(schema, given), *_node_types(given), *_mounts(given)]
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
    yield from _versions({**dict(_texts(given)), **seen})


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
    yield from _secrets(given)
    for place, text in _texts(given):
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


# Kubernetes


def _kubernetes(documents: list[dict[str, Any]]) -> Iterator[str]:
    kinds = json.loads((importlib.resources.files("rayfl.clusters") / "kuberay.json").read_text())
    wrong = False
    for given in documents:
        kind, title = given.get("kind"), _title(given)
        if kind in kinds["kinds"]:
            schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": kinds["$defs"]}
            found = [f"{title}: {problem}" for problem in _by_schema(schema | kinds["kinds"][kind], given)]
            wrong = wrong or bool(found)
            yield from found
        elif not isinstance(kind, str) or str(given.get("apiVersion")).startswith("ray.io/"):
            wrong = True
            yield f"kind: given {shown(kind)}; {nearest(kind, kinds['kinds'])}"
        elif kind == "Secret":
            yield f"{title}: given a secret in a file; allowed: `kubectl create secret`, and its name here"
        elif kind == "Ingress":
            yield f"{title}: given an Ingress, a port open to the world; allowed: `kubectl port-forward`"
        for problem in (*_secrets(given), *_exposed(given), *_versions(dict(_texts(given)))):
            yield f"{title}: {problem}"
    if not wrong:
        yield from _workloads(documents)


def _title(given: Mapping[str, Any]) -> str:
    metadata = given.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return f"{given.get('kind')} {name}" if name else str(given.get("kind"))


def _exposed(given: Any) -> Iterator[str]:
    """What makes a port of a pod one of the nodes or of the internet."""
    for path, value in _leaves(given):
        key, place = path[-1], joined(path)
        if key in ("type", "serviceType") and value in WORLD:
            yield f"{place}: given {value}, a port open to the world; allowed: ClusterIP and `kubectl port-forward`"
        elif key == "hostPort" or key in ("hostNetwork", "enableIngress") and value is True:
            yield f"{place}: given {shown(value)}, a port open to the world; allowed: `kubectl port-forward`"


def _workloads(documents: list[dict[str, Any]]) -> Iterator[str]:
    """What no schema says of clusters and jobs, whose structure is right."""
    claims = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "PersistentVolumeClaim"}
    clusters = [d["metadata"]["name"] for d in documents if d["kind"] == "RayCluster"]
    for given in documents:
        title, spec = _title(given), given.get("spec", {})
        if given["kind"] == "RayCluster":
            yield from (f"{title}: spec.{problem}" for problem in _ray_cluster(spec, claims))
        elif given["kind"] == "RayJob":
            yield from (f"{title}: spec.{problem}" for problem in _ray_job(spec, claims, clusters))
        elif given["kind"] == "Deployment":
            pod = spec["template"].get("spec", {})
            yield from (f"{title}: spec.template.spec.{problem}" for problem in _volumes(pod))


def _ray_job(spec: Mapping[str, Any], claims: Mapping[str, Any], clusters: list[str]) -> Iterator[str]:
    own, selector = spec.get("rayClusterSpec"), spec.get("clusterSelector")
    if bool(own) == bool(selector):
        both = "both it and" if own else "neither it nor"
        yield f"clusterSelector: given {both} rayClusterSpec; allowed: one of them"
    if own:
        yield from (f"rayClusterSpec.{problem}" for problem in _ray_cluster(own, claims))
    if selector:
        name = selector.get("ray.io/cluster")
        if clusters and name not in clusters:
            yield f"clusterSelector: no RayCluster is called {shown(name)}; {nearest(name, clusters)}"
        if spec.get("backoffLimit"):
            yield "backoffLimit: given with clusterSelector; allowed: with rayClusterSpec, because each try has its own"
        if spec.get("submissionMode") == "SidecarMode":
            yield "submissionMode: given SidecarMode with clusterSelector; allowed: K8sJobMode, HTTPMode"


def _ray_cluster(spec: Mapping[str, Any], claims: Mapping[str, Any]) -> Iterator[str]:
    if "authOptions" not in spec or spec["authOptions"].get("mode", "token") != "token":
        yield f"authOptions: given {shown(spec.get('authOptions'))}; allowed: {{mode: token}}"
    if "rayVersion" not in spec:
        yield "rayVersion: missing; without it KubeRay refuses a token"
    head, workers = spec["headGroupSpec"], spec.get("workerGroupSpecs", [])
    groups = {"headGroupSpec": head} | {f"workerGroupSpecs.{i}": group for i, group in enumerate(workers)}
    output = _environment(head).get("RAYFL_OUTPUT") or ""
    if not output:
        yield "headGroupSpec.template.spec.containers.0.env: given no RAYFL_OUTPUT; allowed: a folder that all pods see"
    for place, group in groups.items():
        at = f"{place}.template.spec"
        pod = group["template"].get("spec", {})
        yield from (f"{at}.{problem}" for problem in _volumes(pod))
        yield from (f"{at}.{problem}" for problem in _seen_by_all(pod, output, claims) if output)
        low, high = group.get("minReplicas", 0), group.get("maxReplicas", 2**31 - 1)
        if low > high:
            yield f"{place}.minReplicas: given {low}; allowed: at most maxReplicas, {high}"
        elif not low <= group.get("replicas", low) <= high:
            yield f"{place}.replicas: given {group['replicas']}; allowed: {low} to {high}"


def _environment(group: Mapping[str, Any]) -> dict[str, Any]:
    [first, *_] = group["template"].get("spec", {}).get("containers") or [{}]
    return {variable["name"]: variable.get("value") for variable in first.get("env", [])}


def _volumes(pod: Mapping[str, Any]) -> Iterator[str]:
    volumes = [volume["name"] for volume in pod.get("volumes", [])]
    for i, container in enumerate(pod.get("containers", [])):
        for j, mount in enumerate(container.get("volumeMounts", [])):
            if mount["name"] not in volumes:
                place = f"containers.{i}.volumeMounts.{j}.name"
                yield f"{place}: no volume is called {shown(mount['name'])}; {nearest(mount['name'], volumes)}"
        for kind in ("requests", "limits"):
            for name, number in container.get("resources", {}).get(kind, {}).items():
                if "/" in name and not re.fullmatch(r"\d+", str(number)):
                    yield f"containers.{i}.resources.{kind}.{name}: given {shown(number)}; allowed: a whole number"


def _seen_by_all(pod: Mapping[str, Any], output: str, claims: Mapping[str, Any]) -> Iterator[str]:
    """The folder of the results lies on a volume, of the first container, that many nodes may write to."""
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    mounts = (pod.get("containers") or [{}])[0].get("volumeMounts", [])
    over = [mount for mount in mounts if Path(output).is_relative_to(mount["mountPath"])]
    volume = volumes.get(over[0]["name"], {}) if over else {}
    if not volume or "emptyDir" in volume or "hostPath" in volume:
        yield (
            f"containers.0.volumeMounts: given no shared volume at {output}, the output folder; allowed: one that all "
            "pods see, as a persistentVolumeClaim"
        )
    claim = volume.get("persistentVolumeClaim", {}).get("claimName")
    if claim in claims and "ReadWriteMany" not in claims[claim].get("accessModes", []):
        modes = ", ".join(claims[claim].get("accessModes", []))
        yield f"volumes: given the claim {claim} with {modes or 'no access mode'}; allowed: with ReadWriteMany"


# both


def _leaves(given: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[list[Any], Any]]:
    """Path and value of everything that is no section and no list."""
    if isinstance(given, dict | list):
        for key, value in given.items() if isinstance(given, dict) else enumerate(given):
            yield from _leaves(value, (*path, key))
    elif path:
        yield list(path), given


def _texts(given: Any) -> Iterator[tuple[str, str]]:
    yield from ((joined(path), value) for path, value in _leaves(given) if isinstance(value, str))


def _secrets(given: Mapping[str, Any]) -> Iterator[str]:
    """Keys, passwords and tokens that stand in the file. No error shows one."""
    allowed = "allowed: a variable, or a file that is made on the machine"
    for path, value in _leaves(given):
        place, text = joined(path), str(value)
        # an entry of a container's environment has its name beside its value
        name = _variable(given, path) if path[-1] == "value" else str(path[-1])
        is_literal = value is not None and not isinstance(value, bool) and not re.match(r"[$~/]|$", text)
        if KEYS.search(text):
            yield f"{place}: given a key or token in the file; {allowed}"
        elif is_literal and NAMED_SECRET.search(name) and path[0] != "file_mounts":
            yield f"{place}: given a secret in the file; {allowed}"
        elif found := ASSIGNED.search(text):
            yield f"{place}: given {found.group(1)} with its value in the file; {allowed}"
        elif IN_ADDRESS.search(text):
            yield f"{place}: given an address with a password in it; {allowed}"


def _variable(given: Any, path: list[Any]) -> str:
    for key in path[:-1]:
        given = given[key]
    return str(given.get("name", ""))


def _versions(texts: Mapping[str, str]) -> Iterator[str]:
    """Ray has to be one that rayfl is made for, and the same everywhere."""
    ours = next(r for r in map(Requirement, importlib.metadata.requires("rayfl") or []) if r.name == "ray").specifier
    found: dict[str, str] = {}
    for place, text in texts.items():
        direct = [text] if place.rpartition(".")[2] == "rayVersion" else []
        for version in [*direct, *("".join(parts) for parts in RAY_VERSION.findall(text))]:
            found[version] = place
            if not _within(version, ours):
                yield f"{place}: given Ray {version}; allowed: {ours}, which rayfl is made for"
    if len(found) > 1:
        [(first, _), *others] = found.items()
        for version, place in others:
            yield f"{place}: given Ray {version}, and {first} before; allowed: one version of Ray"


def _within(version: str, allowed: Any) -> bool:
    try:
        return Version(version) in allowed
    except InvalidVersion:
        return False


def _by_schema(schema: Mapping[str, Any], given: Any) -> Iterator[str]:
    """Where `given` does not fit a JSON schema."""
    errors = validator_for(schema)(schema).iter_errors(given)
    for error in sorted(errors, key=lambda e: [str(part) for part in e.absolute_path]):
        yield from _sentences(error)


def _sentences(error: Any) -> Iterable[str]:
    path, rule = list(error.absolute_path), error.validator_value
    place = joined(path)
    if error.validator == "additionalProperties":
        known = error.schema.get("properties", {})
        for key in sorted(set(error.instance) - set(known)):
            yield f"{joined([*path, key])}: unknown key {shown(key)}; {nearest(key, known)}"
    elif error.validator == "required":
        yield from (f"{joined([*path, key])}: missing" for key in rule if key not in error.instance)
    else:
        hidden = any(NAMED_SECRET.search(str(part)) for part in path)
        yield f"{place}: given {'a value' if hidden else shown(error.instance)}; allowed: {_allowed(error, path)}"


def _allowed(error: Any, path: list[Any]) -> str:
    kind, rule = error.validator, error.validator_value
    if kind == "anyOf":
        return " or ".join(PLAIN_TYPES.get(part.get("type"), "another value") for part in rule)
    if kind == "type":
        types = " or ".join(PLAIN_TYPES[name] for name in ([rule] if isinstance(rule, str) else rule))
        of_node = "resources" in path and rule == "integer"
        return f"{types}; a share of a GPU is `run.gpus` of an experiment" if of_node else types
    if kind in BOUNDS:
        return f"{BOUNDS[kind]} {rule}"
    if kind == "enum":
        return f"one of {', '.join(map(str, rule))}"
    if kind == "const":
        return str(rule)
    return f"what fits {rule}" if kind == "pattern" else error.message
