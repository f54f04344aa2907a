"""clusters/kuberay.yaml fits KubeRay's own schema, and `rayfl check` says what is wrong in a changed one."""

import importlib.metadata
import re
from pathlib import Path

import pytest
import yaml

from rayfl.clusters.check import check_cluster
from rayfl.config import ConfigError

FILE = Path("clusters/kuberay.yaml")
FORWARD = "opens a port to the world. Allowed: `kubectl port-forward`"
INSIDE = "opens a port to the world. Allowed: ClusterIP and `kubectl port-forward`"
UNSHARED = (
    "no shared volume at /mnt/rayfl/runs, the output folder. Allowed: one that all pods see, as a persistentVolumeClaim"
)
MADE_FOR = "Allowed: <2.62,>=2.60, which rayfl is made for"
GONE = object()
"""In place of a value: there is none."""


class File(list):
    """The documents of the shipped file, to be changed."""

    def of(self, kind, name=None):
        return next(d for d in self if d["kind"] == kind and name in (None, d["metadata"]["name"]))["spec"]

    def change(self, kind, path, value):
        """Changes a part of a document's spec, and says how errors call it."""
        document = next(d for d in self if d["kind"] == kind)
        *above, last = (int(part) if part.isdecimal() else part for part in path.split("."))
        section = document["spec"]
        for part in above:
            section = section[part]
        if value is GONE:
            del section[last]
        else:
            section[last] = value
        return f"{kind} {document['metadata']['name']}: spec.{path}"

    @property
    def cluster(self):
        return self.of("RayCluster")

    @property
    def head(self):
        return self.cluster["headGroupSpec"]["template"]["spec"]

    @property
    def worker(self):
        return self.cluster["workerGroupSpecs"][0]


@pytest.fixture
def given():
    return File(yaml.safe_load_all(FILE.read_text()))


@pytest.fixture
def wrong(tmp_path):
    def said(given):
        path = tmp_path / "cluster.yaml"
        path.write_text(yaml.safe_dump_all(given))
        with pytest.raises(ConfigError) as error:
            check_cluster(path)
        return str(error.value).replace(f"{path}: ", "").split("\n")

    return said


def test_what_is_in_it():
    assert check_cluster(FILE) == (
        "for Kubernetes: PersistentVolumeClaim rayfl, PersistentVolumeClaim rayfl-mlflow, Deployment rayfl-mlflow, "
        "Service rayfl-mlflow, RayCluster rayfl, RayJob rayfl-quickstart"
    )


def test_all_of_it_have_one_image(given):
    pods = [given.head, given.worker["template"]["spec"], given.of("Deployment")["template"]["spec"]]
    images = {container["image"] for pod in pods for container in pod["containers"]}
    assert images == {f"REGISTRY/rayfl:{importlib.metadata.version('rayfl')}-ray{given.cluster['rayVersion']}"}
    assert all(image in Path("clusters/Dockerfile").read_text() for image in images)


def test_the_image_takes_what_is_there():
    text = Path("clusters/Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY --chown=\S+ (.+)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert {"pyproject.toml", "rayfl", "tune_configs"} <= set(copied)
    assert all(Path(source).exists() for source in copied)


def test_mlflow_takes_its_accounts_from_the_secret(given):
    [container] = given.of("Deployment")["template"]["spec"]["containers"]
    taken = {variable["name"]: variable["valueFrom"]["secretKeyRef"] for variable in container["env"]}
    assert taken == {
        "MLFLOW_AUTH_ADMIN_USERNAME": {"name": "rayfl-mlflow", "key": "username"},
        "MLFLOW_AUTH_ADMIN_PASSWORD": {"name": "rayfl-mlflow", "key": "password"},
        "MLFLOW_FLASK_SERVER_SECRET_KEY": {"name": "rayfl-mlflow", "key": "flask-key"},
    }
    # whoever follows the file's first lines has each of these keys
    assert all(f"--from-literal={reference['key']}=" in FILE.read_text() for reference in taken.values())


@pytest.mark.filterwarnings("ignore:.*Any type hint:UserWarning")
def test_mlflow_is_started_with_options_that_it_has(given):
    from mlflow.cli import server

    [container] = given.of("Deployment")["template"]["spec"]["containers"]
    assert container["command"] == ["mlflow", server.name]
    context = server.make_context("server", list(container["args"]), resilient_parsing=True)
    assert context.params["app_name"] == "basic-auth"
    assert context.params["allowed_hosts"].split(",")[0] == "rayfl-mlflow:5000"
    assert not context.args


def test_the_driver_reaches_mlflow_by_its_service(given):
    environment = {variable["name"]: variable.get("value") for variable in given.head["containers"][0]["env"]}
    [port] = given.of("Service")["ports"]
    assert environment["MLFLOW_TRACKING_URI"] == f"http://rayfl-mlflow:{port['port']}"


# what KubeRay's schema finds


POD = "headGroupSpec.template.spec"
CONTAINER = f"{POD}.containers.0"
GROUP = "workerGroupSpecs.0"


@pytest.mark.parametrize(
    ("kind", "path", "value", "said"),
    [
        ("RayCluster", "autoscalerOption", {}, "Did you mean 'autoscalerOptions'? Allowed: authOptions, "),
        ("RayCluster", f"{CONTAINER}.volumeMount", [], "Did you mean 'volumeMounts'? Allowed: args, "),
        ("RayCluster", f"{GROUP}.maxReplica", 3, "Did you mean 'maxReplicas'? Allowed: "),
        ("RayJob", "entryPoint", "a", "Did you mean 'entrypoint'? Allowed: "),
        ("Deployment", "replica", 2, "Did you mean 'replicas'? Allowed: "),
        ("Service", "port", [], "Did you mean 'ports'? Allowed: "),
        ("PersistentVolumeClaim", "accessMode", [], "Did you mean 'accessModes'? Allowed: "),
    ],
)
def test_a_typo(given, wrong, kind, path, value, said):
    place = given.change(kind, path, value)
    [line] = wrong(given)
    assert line.startswith(f"{place}: unknown key '{path.split('.')[-1]}'. {said}")


@pytest.mark.parametrize(
    ("kind", "path", "value", "said"),
    [
        ("RayCluster", f"{GROUP}.maxReplicas", 0.5, "0.5 is not valid. Allowed: a whole number"),
        ("RayCluster", f"{GROUP}.groupName", GONE, "missing"),
        ("RayCluster", "autoscalerOptions.version", "v3", "'v3' is not valid. Allowed: one of v1, v2"),
        ("RayCluster", f"{CONTAINER}.resources.limits.cpu", [4], "[4] is not valid. Allowed: a whole number or text"),
        ("RayCluster", f"{CONTAINER}.env.2.value", 0, "0 is not valid. Allowed: text"),
        (
            *("RayJob", "submissionMode", "Sidecar"),
            "'Sidecar' is not valid. Allowed: one of K8sJobMode, HTTPMode, InteractiveMode, SidecarMode",
        ),
    ],
)
def test_a_value_that_is_not_allowed(given, wrong, kind, path, value, said):
    place = given.change(kind, path, value)
    assert wrong(given) == [f"{place}: {said}"]


def test_a_quantity(given, wrong):
    place = given.change("RayCluster", f"{CONTAINER}.resources.limits.cpu", "four")
    [line] = wrong(given)
    assert line.startswith(f"{place}: 'four' is not valid. Allowed: what fits ^")


def test_the_top_of_a_document(given, wrong):
    cluster, job = given[4:]
    cluster["apiVersion"] = "ray.io/v1alpha1"
    del cluster["metadata"]["name"]
    job["kind"] = "RayJbo"
    assert wrong(given) == [
        "RayCluster: apiVersion: 'ray.io/v1alpha1' is not valid. Allowed: ray.io/v1",
        "RayCluster: metadata.name: missing",
        "kind: 'RayJbo' is not valid. Did you mean 'RayJob'? Allowed: Deployment, PersistentVolumeClaim, RayCluster, "
        "RayJob, Service",
    ]


@pytest.mark.parametrize("kind", [[], ["RayCluster"], None, 3])
def test_a_kind_that_is_no_name(given, wrong, kind):
    given[4]["kind"] = kind
    [said] = wrong(given)
    assert said.startswith(f"kind: {kind!r} is not valid. ") and "Allowed: Deployment, " in said


# what it misses


@pytest.mark.parametrize(
    ("kind", "path", "value", "said"),
    [
        ("Service", "type", "LoadBalancer", f"LoadBalancer {INSIDE}"),
        ("RayCluster", "headGroupSpec.serviceType", "NodePort", f"NodePort {INSIDE}"),
        ("RayCluster", "headGroupSpec.enableIngress", True, f"True {FORWARD}"),
        ("RayCluster", f"{POD}.hostNetwork", True, f"True {FORWARD}"),
        ("RayCluster", "authOptions", GONE, "None is not valid. Allowed: {mode: token}"),
        (
            "RayCluster",
            "authOptions",
            {"mode": "disabled"},
            "{'mode': 'disabled'} is not valid. Allowed: {mode: token}",
        ),
        ("RayCluster", "rayVersion", GONE, "missing; without it KubeRay refuses a token"),
        (
            "RayCluster",
            "rayVersion",
            "2.61.0",
            "Ray 2.61.0, and 2.60.0 elsewhere in the file differ. Allowed: one version of Ray",
        ),
        ("RayCluster", f"{GROUP}.minReplicas", 5, "5 is not valid. Allowed: at most maxReplicas, 4"),
        ("RayCluster", f"{GROUP}.replicas", 5, "5 is not valid. Allowed: 0 to 4"),
        ("RayCluster", f"{GROUP}.template.spec.containers.0.volumeMounts", GONE, UNSHARED),
        (
            *("Deployment", "template.spec.containers.0.volumeMounts.1.name", "share"),
            "no volume is called 'share'. Did you mean 'shared'? Allowed: databases, shared",
        ),
        (
            *("RayJob", "clusterSelector", {"ray.io/cluster": "rayf"}),
            "no RayCluster is called 'rayf'. Did you mean 'rayfl'? Allowed: rayfl",
        ),
        ("RayJob", "clusterSelector", GONE, "neither it nor rayClusterSpec is set. Allowed: one of them"),
        (
            *("RayJob", "backoffLimit", 2),
            "has no effect with clusterSelector. Allowed: with rayClusterSpec, where each try gets a new cluster",
        ),
        (
            *("RayJob", "submissionMode", "SidecarMode"),
            "SidecarMode does not work with clusterSelector. Allowed: K8sJobMode, HTTPMode",
        ),
        (
            "Deployment",
            "template.spec.containers.0.image",
            "rayproject/ray:2.9.0-py39",
            f"Ray 2.9.0 does not match. {MADE_FOR}",
        ),
        (
            "Deployment",
            "template.spec.containers.0.image",
            "rayproject/ray:nightly",
            f"Ray nightly does not match. {MADE_FOR}",
        ),
    ],
)
def test_what_no_schema_says(given, wrong, kind, path, value, said):
    place = given.change(kind, path, value)
    assert wrong(given) == [f"{place}: {said}"]


def test_a_share_of_a_gpu(given, wrong):
    limits = f"{GROUP}.template.spec.containers.0.resources.limits"
    place = given.change("RayCluster", limits, {"nvidia.com/gpu": "0.5"})
    assert wrong(given) == [f"{place}.nvidia.com/gpu: '0.5' is not valid. Allowed: a whole number"]


def test_a_port_of_the_node(given, wrong):
    place = given.change("RayCluster", f"{CONTAINER}.ports", [{"containerPort": 8265, "hostPort": 8265}])
    assert wrong(given) == [f"{place}.0.hostPort: 8265 {FORWARD}"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("Ingress", f"an Ingress {FORWARD}"),
        ("Secret", "the file contains a secret. Allowed: `kubectl create secret`, and its name here"),
    ],
)
def test_a_document_that_has_no_place_in_the_file(given, wrong, kind, said):
    given.append({"apiVersion": "v1", "kind": kind, "metadata": {"name": "a"}})
    assert wrong(given) == [f"{kind} a: {said}"]


def test_a_secret_in_the_environment_is_not_shown(given, wrong):
    given.head["containers"][0]["env"].append({"name": "WANDB_API_KEY", "value": "hunter2"})
    assert wrong(given) == [
        f"RayCluster rayfl: spec.{CONTAINER}.env.6.value: the file contains a secret. Allowed: a variable, or a file "
        "that is made on the machine"
    ]


def test_an_output_folder_that_a_pod_has_for_itself(given, wrong):
    place = given.change("RayCluster", f"{GROUP}.template.spec.volumes", [{"name": "shared", "emptyDir": {}}])
    assert wrong(given) == [f"{place.removesuffix('volumes')}containers.0.volumeMounts: {UNSHARED}"]


def test_the_volume_of_an_output_folder_is_the_innermost(given, wrong, tmp_path):
    """A pod's own disk at /mnt, with the shared one below, and the other way round."""
    volumes = [{"name": "shared", "persistentVolumeClaim": {"claimName": "rayfl"}}, {"name": "own", "emptyDir": {}}]
    given.change("RayCluster", f"{GROUP}.template.spec.volumes", volumes)
    for inner, outer in (("shared", "own"), ("own", "shared")):
        mounts = [{"name": outer, "mountPath": "/mnt"}, {"name": inner, "mountPath": "/mnt/rayfl"}]
        place = given.change("RayCluster", f"{GROUP}.template.spec.containers.0.volumeMounts", mounts)
        if inner == "own":
            assert wrong(given) == [f"{place}: {UNSHARED}"]
        else:
            path = tmp_path / "right.yaml"
            path.write_text(yaml.safe_dump_all(given))
            assert check_cluster(path)


def test_no_output_folder(given, wrong):
    given.head["containers"][0]["env"].pop(0)
    assert wrong(given) == [
        f"RayCluster rayfl: spec.{CONTAINER}.env: RAYFL_OUTPUT is missing. Allowed: a folder that all pods see"
    ]


def test_a_job_takes_one_cluster(given, wrong):
    place = given.change("RayJob", "rayClusterSpec", given.cluster)
    assert wrong(given) == [
        f"{place.removesuffix('rayClusterSpec')}clusterSelector: both it and rayClusterSpec are set. Allowed: one of "
        "them"
    ]


def test_a_claim_that_one_node_alone_may_write_to(given, wrong):
    given.of("PersistentVolumeClaim", "rayfl")["accessModes"] = ["ReadWriteOnce"]
    assert wrong(given) == [
        f"RayCluster rayfl: spec.{place}.template.spec.volumes: the claim rayfl with ReadWriteOnce cannot be shared. "
        "Allowed: ReadWriteMany"
        for place in ("headGroupSpec", "workerGroupSpecs.0")
    ]


def test_a_job_with_a_cluster_of_its_own_is_checked_as_one(given, wrong):
    cluster = given.cluster
    del given[4]
    cluster.pop("authOptions")
    given.of("RayJob").update(clusterSelector={}, rayClusterSpec=cluster, backoffLimit=2)
    assert wrong(given) == [
        "RayJob rayfl-quickstart: spec.rayClusterSpec.authOptions: None is not valid. Allowed: {mode: token}"
    ]


def test_documents_of_other_kinds_may_stand_beside(given, tmp_path):
    given.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"b": "c"}})
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump_all(given))
    assert check_cluster(path).endswith(", ConfigMap a")
