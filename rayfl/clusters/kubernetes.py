"""A file of Kubernetes: what the schemas of KubeRay and Kubernetes refuse, and what they take without a word."""

import importlib.resources
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rayfl.clusters.faults import by_schema, leaves, secrets, texts, versions
from rayfl.config import nearest
from rayfl.config.plain import joined, shown

WORLD = ("LoadBalancer", "NodePort")


def problems(documents: list[dict[str, Any]]) -> Iterator[str]:
    """A sentence for each thing that is wrong."""
    kinds = json.loads((importlib.resources.files("rayfl.clusters") / "kuberay.json").read_text())
    wrong = False
    for given in documents:
        kind, title = given.get("kind"), _title(given)
        if kind in kinds["kinds"]:
            schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": kinds["$defs"]}
            found = [f"{title}: {problem}" for problem in by_schema(schema | kinds["kinds"][kind], given)]
            wrong = wrong or bool(found)
            yield from found
        elif not isinstance(kind, str) or str(given.get("apiVersion")).startswith("ray.io/"):
            wrong = True
            yield f"kind: given {shown(kind)}; {nearest(kind, kinds['kinds'])}"
        elif kind == "Secret":
            yield f"{title}: given a secret in a file; allowed: `kubectl create secret`, and its name here"
        elif kind == "Ingress":
            yield f"{title}: given an Ingress, a port open to the world; allowed: `kubectl port-forward`"
        for problem in (*secrets(given), *_exposed(given), *versions(dict(texts(given)))):
            yield f"{title}: {problem}"
    if not wrong:
        yield from _workloads(documents)


def _title(given: Mapping[str, Any]) -> str:
    metadata = given.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return f"{given.get('kind')} {name}" if name else str(given.get("kind"))


def _exposed(given: Any) -> Iterator[str]:
    """What makes a port of a pod one of the nodes or of the internet."""
    for path, value in leaves(given):
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


def summary(documents: list[dict[str, Any]]) -> str:
    """What a good file holds."""
    return f"for Kubernetes: {', '.join(map(_title, documents))}"
