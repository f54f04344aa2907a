"""Checks of a Kubernetes file: the schemas of KubeRay and Kubernetes, and problems that they accept silently."""

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
    """Yield one sentence per problem."""
    kinds = json.loads((importlib.resources.files("rayfl.clusters") / "kuberay.json").read_text(encoding="utf-8"))
    wrong = False
    for given in documents:
        kind, title = given.get("kind"), _title(given)
        if isinstance(kind, str) and kind in kinds["kinds"]:
            schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": kinds["$defs"]}
            found = [f"{title}: {problem}" for problem in by_schema(schema | kinds["kinds"][kind], given)]
            wrong = wrong or bool(found)
            yield from found
        elif not isinstance(kind, str) or str(given.get("apiVersion")).startswith("ray.io/"):
            wrong = True
            yield f"kind: {shown(kind)} is not valid. {nearest(kind, kinds['kinds'])}"
        elif kind == "Secret":
            yield f"{title}: the file contains a secret. Allowed: `kubectl create secret`, and its name here"
        elif kind == "Ingress":
            yield f"{title}: an Ingress opens a port to the world. Allowed: `kubectl port-forward`"
        for problem in (*secrets(given), *_exposed(given), *versions(dict(texts(given)))):
            yield f"{title}: {problem}"
    if not wrong:
        yield from _workloads(documents)


def _title(given: Mapping[str, Any]) -> str:
    metadata = given.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return f"{given.get('kind')} {name}" if name else str(given.get("kind"))


def _exposed(given: Any) -> Iterator[str]:
    """Yield a problem for every setting that exposes a pod's port on nodes or the internet."""
    for path, value in leaves(given):
        key, place = path[-1], joined(path)
        if key in ("type", "serviceType") and value in WORLD:
            yield f"{place}: {value} opens a port to the world. Allowed: ClusterIP and `kubectl port-forward`"
        elif key == "hostPort" or key in ("hostNetwork", "enableIngress") and value is True:
            yield f"{place}: {shown(value)} opens a port to the world. Allowed: `kubectl port-forward`"


def _workloads(documents: list[dict[str, Any]]) -> Iterator[str]:
    """Yield problems of structurally valid clusters and jobs that no schema finds."""
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
        both = "both it and rayClusterSpec are" if own else "neither it nor rayClusterSpec is"
        yield f"clusterSelector: {both} set. Allowed: one of them"
    if own:
        yield from (f"rayClusterSpec.{problem}" for problem in _ray_cluster(own, claims))
    if selector:
        name = selector.get("ray.io/cluster")
        if clusters and name not in clusters:
            yield f"clusterSelector: no RayCluster is called {shown(name)}. {nearest(name, clusters)}"
        if spec.get("backoffLimit"):
            yield (
                "backoffLimit: has no effect with clusterSelector. Allowed: with rayClusterSpec, where each try gets "
                "a new cluster"
            )
        if spec.get("submissionMode") == "SidecarMode":
            yield "submissionMode: SidecarMode does not work with clusterSelector. Allowed: K8sJobMode, HTTPMode"


def _ray_cluster(spec: Mapping[str, Any], claims: Mapping[str, Any]) -> Iterator[str]:
    if "authOptions" not in spec or spec["authOptions"].get("mode", "token") != "token":
        yield f"authOptions: {shown(spec.get('authOptions'))} is not valid. Allowed: {{mode: token}}"
    if "rayVersion" not in spec:
        yield "rayVersion: missing; without it KubeRay refuses a token"
    head, workers = spec["headGroupSpec"], spec.get("workerGroupSpecs", [])
    groups = {"headGroupSpec": head} | {f"workerGroupSpecs.{i}": group for i, group in enumerate(workers)}
    output = _environment(head).get("RAYFL_OUTPUT") or ""
    if not output:
        yield (
            "headGroupSpec.template.spec.containers.0.env: RAYFL_OUTPUT is missing. Allowed: a folder that all pods see"
        )
    for place, group in groups.items():
        at = f"{place}.template.spec"
        pod = group["template"].get("spec", {})
        yield from (f"{at}.{problem}" for problem in _volumes(pod))
        yield from (f"{at}.{problem}" for problem in _seen_by_all(pod, output, claims) if output)
        low, high = group.get("minReplicas", 0), group.get("maxReplicas", 2**31 - 1)
        if low > high:
            yield f"{place}.minReplicas: {low} is not valid. Allowed: at most maxReplicas, {high}"
        elif not low <= group.get("replicas", low) <= high:
            yield f"{place}.replicas: {group['replicas']} is not valid. Allowed: {low} to {high}"


def _environment(group: Mapping[str, Any]) -> dict[str, Any]:
    [first, *_] = group["template"].get("spec", {}).get("containers") or [{}]
    return {variable["name"]: variable.get("value") for variable in first.get("env", [])}


def _volumes(pod: Mapping[str, Any]) -> Iterator[str]:
    volumes = [volume["name"] for volume in pod.get("volumes", [])]
    for i, container in enumerate(pod.get("containers", [])):
        for j, mount in enumerate(container.get("volumeMounts", [])):
            if mount["name"] not in volumes:
                place = f"containers.{i}.volumeMounts.{j}.name"
                yield f"{place}: no volume is called {shown(mount['name'])}. {nearest(mount['name'], volumes)}"
        for kind in ("requests", "limits"):
            for name, number in container.get("resources", {}).get(kind, {}).items():
                if "/" in name and not re.fullmatch(r"\d+", str(number)):
                    yield (
                        f"containers.{i}.resources.{kind}.{name}: {shown(number)} is not valid. Allowed: a whole number"
                    )


def _seen_by_all(pod: Mapping[str, Any], output: str, claims: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem if the output folder is not on a volume of the first container that all nodes can write."""
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    mounts = (pod.get("containers") or [{}])[0].get("volumeMounts", [])
    over = [mount for mount in mounts if Path(output).is_relative_to(mount["mountPath"])]
    innermost = max(over, key=lambda mount: len(Path(mount["mountPath"]).parts), default=None)
    volume = volumes.get(innermost["name"], {}) if innermost else {}
    if not volume or "emptyDir" in volume or "hostPath" in volume:
        yield (
            f"containers.0.volumeMounts: no shared volume at {output}, the output folder. Allowed: one that all "
            "pods see, as a persistentVolumeClaim"
        )
    claim = volume.get("persistentVolumeClaim", {}).get("claimName")
    if claim in claims and "ReadWriteMany" not in claims[claim].get("accessModes", []):
        modes = ", ".join(claims[claim].get("accessModes", []))
        yield f"volumes: the claim {claim} with {modes or 'no access mode'} cannot be shared. Allowed: ReadWriteMany"


def summary(documents: list[dict[str, Any]]) -> str:
    """Return a one-line summary of a valid file."""
    return f"for Kubernetes: {', '.join(map(_title, documents))}"
