"""`ray up clusters/aws.yaml` against moto's AWS, with machines that are folders; and what its provider refuses."""

import json
import stat
from base64 import b64decode
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import parse_qsl

import boto3
import pytest
import yaml
from fakes import Machines, commands
from moto import mock_aws, settings
from moto.iam.models import SERVICE_NAME_CONVERSION
from moto.moto_api import recorder
from moto.server import ThreadedMotoServer
from ray.autoscaler._private.aws.config import _get_subnets_or_die
from ray.autoscaler._private.aws.utils import client_cache, resource_cache
from ray.autoscaler._private.util import prepare_config

from rayfl.clusters import aws
from rayfl.clusters.aws import Provider, caller_address
from rayfl.config import ConfigError

FILE = "clusters/aws.yaml"
REGION = "us-west-2"
HOME, CAFE = "198.51.100.7", "203.0.113.9"
INSIDE = "172.31.0.9"
KNOWN = {
    "partition": "aws",
    "account": "123456789012",
    "region": REGION,
    "cluster": "rayfl",
    "worker": f"ray-rayfl-{REGION}-worker",
    "bucket": "results",
}


def policy(name: str) -> dict[str, Any]:
    return json.loads(Template(Path(f"clusters/aws_{name}_policy.json").read_text()).substitute(KNOWN))


# from `ray up` to `ray down`


class Account:
    """Return the content of an AWS account."""

    def __init__(self, endpoint: str | None = None):
        keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": REGION}
        self.ec2 = boto3.client("ec2", endpoint_url=endpoint, **keys)
        self.iam = boto3.client("iam", endpoint_url=endpoint, **keys)

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Every instance that there ever was, by ID."""
        found = [node for one in self.ec2.describe_instances()["Reservations"] for node in one["Instances"]]
        return {node["InstanceId"]: node for node in found}

    def groups(self) -> list[dict[str, Any]]:
        return [one for one in self.ec2.describe_security_groups()["SecurityGroups"] if one["GroupName"] != "default"]

    def policies(self) -> dict[str, dict[str, Any]]:
        """Role -> name of a policy in it -> the policy."""
        found = {}
        for role in self.iam.list_roles()["Roles"]:
            name = role["RoleName"]
            assert not self.iam.list_attached_role_policies(RoleName=name)["AttachedPolicies"]
            found[name] = {
                one: self.iam.get_role_policy(RoleName=name, PolicyName=one)["PolicyDocument"]
                for one in self.iam.list_role_policies(RoleName=name)["PolicyNames"]
            }
        return found

    def ssh(self) -> list[str]:
        """The networks that may use SSH."""
        rules = [rule for group in self.groups() for rule in group["IpPermissions"] if rule.get("FromPort") == 22]
        return [span["CidrIp"] for rule in rules for span in rule["IpRanges"]]


@dataclass
class Story:
    """A cluster's life, and what it was like at each time."""

    machines: Machines
    head: dict[str, Any] = field(default_factory=dict)
    group: dict[str, Any] = field(default_factory=dict)
    ssh: dict[str, list[str]] = field(default_factory=dict)
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    printed: dict[str, str] = field(default_factory=dict)
    said: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    started: list[dict[str, str]] = field(default_factory=list)
    """Return the requested instances; moto's spot nodes lack some fields."""
    autoscaler: dict[str, list[str]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Return the files in the head's home."""
        return self.machines.folder / self.head["PublicIpAddress"]

    def workers(self) -> list[dict[str, Any]]:
        return [self.nodes["scaled"][name] for name in self.autoscaler["made"]]


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp("cluster")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(SERVICE_NAME_CONVERSION, "spot", "EC2Spot")
            patch.setattr(recorder, "_location", str(folder / "asked.jsonl"))
            recorder.start_recording()
            yield told(Machines(folder, endpoint), Account(endpoint))
    finally:
        recorder.stop_recording()
        server.stop()


def told(machines: Machines, account: Account) -> Story:
    story = Story(machines)

    def then(name: str, printed: str) -> None:
        before = sum(map(len, story.said.values()))
        story.printed[name], story.said[name] = printed, machines.said()[before:]
        story.nodes[name], story.ssh[name] = account.nodes(), account.ssh()

    then("up", machines.ray("up", "-y", FILE, RAYFL_SSH_FROM=HOME))
    [story.head] = account.nodes().values()
    [story.group] = account.groups()
    story.policies = account.policies()
    then("again", machines.ray("up", "-y", FILE, RAYFL_SSH_FROM=HOME))
    answer = machines.home / "autoscaler.json"
    program, keys = Path(__file__).with_name("autoscaler.py"), only(account, policy("head"))
    with pytest.MonkeyPatch.context() as patch:
        # moto looks at everybody's rights then
        patch.setattr(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
        printed = machines.python(program, "gpu-worker", INSIDE, str(answer), HOME=str(story.folder), **keys)
    story.autoscaler = json.loads(answer.read_text())
    then("scaled", printed)
    story.started = asked(recorder.download_recording(), "RunInstances")
    then("tunnel", machines.ray("dashboard", FILE, "--port", "8299", RAYFL_SSH_FROM=CAFE))
    then("down", machines.ray("down", "-y", FILE, RAYFL_SSH_FROM=CAFE))
    return story


def only(account: Account, may: dict[str, Any]) -> dict[str, str]:
    """Keys of somebody with the actions of a policy. moto knows no conditions, and none of EC2's resources."""
    actions = {"Action": [one for part in may["Statement"] for one in listed(part["Action"])]}
    loose = {"Version": "2012-10-17", "Statement": [actions | {"Effect": "Allow", "Resource": "*"}]}
    account.iam.create_user(UserName="head")
    account.iam.put_user_policy(UserName="head", PolicyName="head", PolicyDocument=json.dumps(loose))
    key = account.iam.create_access_key(UserName="head")["AccessKey"]
    return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}


def asked(recording: str, action: str) -> list[dict[str, str]]:
    """The parameters of every request of a kind."""
    bodies = [b64decode(json.loads(line)["body"]).decode() for line in recording.splitlines()]
    return [one for one in (dict(parse_qsl(body)) for body in bodies) if one.get("Action") == action]


def listed(actions: str | list[str]) -> list[str]:
    return [actions] if isinstance(actions, str) else actions


@pytest.mark.slow
class TestCluster:
    def test_up_goes_through_all_steps(self, story):
        assert all(f"[{step}/7]" in story.printed["up"] for step in range(1, 8))
        tags = {tag["Key"]: tag["Value"] for tag in story.nodes["up"][story.head["InstanceId"]]["Tags"]}
        assert tags["ray-node-status"] == "up-to-date" and tags["ray-user-node-type"] == "head"

    def test_head_has_cpus_of_its_type_and_an_image_with_a_driver(self, story):
        assert story.head["InstanceType"] == "m5.2xlarge" and "SpotInstanceRequestId" not in story.head
        assert story.head["ImageId"].endswith("base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id")
        assert "RAY_OVERRIDE_RESOURCES='{\"CPU\":8}'" in commands(story.said["up"], story.head["PublicIpAddress"])[-1]

    def test_head_is_installed_then_has_mlflow_then_ray(self, story):
        run = [one.rpartition("; ")[2] for one in commands(story.said["up"], story.head["PublicIpAddress"])]
        run = [one for one in run if not one.startswith(("uptime", "mkdir"))]
        assert run[:3] == ["bash ~/rayfl/clusters/node.sh head", "ray stop", "bash ~/rayfl/clusters/head.sh"]
        assert len(run) == 4 and run[3].startswith("ray start --head") and "--dashboard-host=127.0.0.1" in run[3]

    def test_workers_mount_the_heads_disk_and_join_it(self, story):
        for worker in story.workers():
            run = commands(story.said["scaled"], worker["PrivateIpAddress"])
            run = [one for one in run if not one.startswith(("uptime", "mkdir"))]
            assert run[0] == f"export RAY_HEAD_IP={INSIDE}; bash ~/rayfl/clusters/node.sh head"
            assert run[1].endswith("ray stop") and "ray start --address=$RAY_HEAD_IP:6379" in run[2] and len(run) == 3
            assert f"RAY_HEAD_IP={INSIDE};" in run[2] and '"GPU":1' in run[2]

    def test_only_the_head_runs_mlflow(self, story):
        hosts = {one["host"] for said in story.said.values() for one in said if "head.sh" in one["arguments"][-1]}
        assert hosts == {story.head["PublicIpAddress"]}

    def test_every_node_has_the_source_the_scripts_and_the_token(self, story):
        for home in (story.folder, *(story.machines.folder / one["PrivateIpAddress"] for one in story.workers())):
            assert (home / "rayfl/clusters/node.sh").read_bytes() == Path("clusters/node.sh").read_bytes()
            assert (home / "rayfl/rayfl/__init__.py").exists() and (home / "rayfl/pyproject.toml").exists()
            token = home / ".ray/auth_token"
            assert token.read_text() == story.machines.token and stat.S_IMODE(token.stat().st_mode) == 0o600

    def test_workers_are_spot_nodes_that_come_and_go(self, story):
        assert len(story.workers()) == 2 and story.autoscaler["left"] == story.autoscaler["made"][1:]
        assert all(one["InstanceType"] == "g5.4xlarge" for one in story.workers())
        assert all(one["InstanceLifecycle"] == "spot" for one in story.workers())
        states = [one["State"]["Name"] for one in story.workers()]
        assert states == ["terminated", "running"]

    def test_nodes_have_profiles_with_the_policies_that_stand_in_clusters(self, story):
        head, worker = f"ray-rayfl-{REGION}-head", f"ray-rayfl-{REGION}-worker"
        assert story.policies[head] == {"head": policy("head")} and story.policies[worker] == {}
        profiles = [one["IamInstanceProfile.Arn"].rpartition("/")[2] for one in story.started]
        assert profiles == [head, worker, worker]

    def test_nodes_give_their_roles_to_nobody_who_only_sees_their_address(self, story):
        assert {one["MetadataOptions.HttpTokens"] for one in story.started} == {"required"}

    def test_the_account_has_the_role_that_spot_nodes_need(self, story):
        assert aws.SPOT_ROLE in story.policies

    def test_only_the_callers_address_comes_in(self, story):
        inner, ssh = sorted(story.group["IpPermissions"], key=lambda rule: rule["IpProtocol"])
        assert [pair["GroupId"] for pair in inner["UserIdGroupPairs"]] == [story.group["GroupId"]]
        assert inner["IpProtocol"] == "-1" and not inner["IpRanges"] and not inner["Ipv6Ranges"]
        assert (ssh["FromPort"], ssh["ToPort"], ssh["IpProtocol"]) == (22, 22, "tcp")
        assert [span["CidrIp"] for span in ssh["IpRanges"]] == [f"{HOME}/32"] and not ssh["Ipv6Ranges"]
        for node in (story.head, *story.workers()):
            assert [one["GroupId"] for one in node["SecurityGroups"]] == [story.group["GroupId"]]

    def test_a_command_from_another_address_comes_in_at_once(self, story):
        assert story.ssh["again"] == [f"{HOME}/32"] and story.ssh["tunnel"] == [f"{CAFE}/32"]

    def test_up_again_changes_nothing(self, story):
        assert story.nodes["again"].keys() == story.nodes["up"].keys()
        assert "Configuration already up to date" in story.printed["again"]
        assert not [
            one for one in story.said["again"] if one["program"] == "rsync" or "node.sh" in one["arguments"][-1]
        ]

    def test_the_head_lets_nobody_in(self, story):
        config = yaml.safe_load((story.folder / "ray_bootstrap_config.yaml").read_text())
        assert "ssh_group" not in config["provider"] and story.ssh["scaled"] == [f"{HOME}/32"]

    def test_jobs_go_through_a_tunnel(self, story):
        [tunnel] = [one for one in story.said["tunnel"] if "-L" in one["arguments"]]
        assert "8299:localhost:8265" in tunnel["arguments"] and tunnel["host"] == story.head["PublicIpAddress"]

    def test_down_ends_all_nodes(self, story):
        assert {one["State"]["Name"] for one in story.nodes["down"].values()} == {"terminated"}

    def test_no_secret_where_others_read(self, story):
        [key] = (story.machines.home / ".ssh").glob("*.pem")
        secrets = [story.machines.token, key.read_text().splitlines()[1], "AWS_SECRET_ACCESS_KEY"]
        public = json.dumps([story.said, story.nodes["scaled"], story.started, story.printed], default=str)
        assert not [one for one in secrets if one in public] and "UserData" not in public


# the provider alone


@pytest.fixture
def account(monkeypatch, tmp_path):
    """An empty account; the caller is at home and has a token."""
    token = tmp_path / "auth_token"
    token.write_text("token")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAYFL_SSH_FROM", HOME)
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(key, "testing")
    for key in ("AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(aws, "SPREADING", 0.0)
    # moto's name is another
    monkeypatch.setitem(SERVICE_NAME_CONVERSION, "spot", "EC2Spot")
    for cache in (resource_cache, client_cache, _get_subnets_or_die):
        cache.cache_clear()
    with mock_aws():
        yield Account()


def cluster(tmp_path: Path, **provider: Any) -> dict[str, Any]:
    """Return the configuration that Ray gives the provider."""
    config = prepare_config(yaml.safe_load(Path(FILE).read_text()))
    config["provider"] |= provider
    config["file_mounts"]["~/.ray/auth_token"] = str(tmp_path / "auth_token")
    for kind in config["available_node_types"].values():
        kind["resources"] = {"CPU": 8}
    return config


def refused(account: Account, config: dict[str, Any]) -> str:
    """Return the error, after checking that nothing was made."""
    with pytest.raises(ConfigError) as error:
        Provider.bootstrap_config(config)
    assert account.groups() == [] and account.policies() == {}
    return str(error.value)


def test_a_token_that_is_not_there_is_missed_before_anything_costs(account, tmp_path):
    (tmp_path / "auth_token").unlink()
    assert refused(account, cluster(tmp_path)) == (
        f"file_mounts: {tmp_path}/auth_token does not exist. Hint: run `ray get-auth-token --generate`"
    )


def test_a_file_that_is_not_there_is_missed(account, tmp_path):
    config = cluster(tmp_path)
    config["file_mounts"]["~/rayfl/rayfl"] = "nowhere/rayfl"
    assert refused(account, config).startswith(
        "file_mounts: nowhere/rayfl does not exist. Hint: start ray in the folder"
    )


def test_a_type_that_would_never_start_is_refused(account, tmp_path):
    config = cluster(tmp_path)
    config["available_node_types"]["gpu-worker"]["resources"] = {}
    said = refused(account, config)
    assert said.startswith("available_node_types.gpu-worker: the number of CPUs of g5.4xlarge in us-")


@pytest.mark.parametrize(
    ("text", "said"), [(None, "FileNotFoundError"), ("{", "JSONDecodeError"), ('{"a": "${user}"}', "KeyError: 'user'")]
)
def test_a_policy_that_is_none_is_refused(account, tmp_path, text, said):
    file = tmp_path / "policy.json"
    if text is not None:
        file.write_text(text)
    error = refused(account, cluster(tmp_path, head_policy=str(file)))
    assert error.startswith(f"provider.head_policy: {file} is not valid (")
    assert said in error


def test_a_bucket_is_for_all_nodes_until_it_is_named_no_more(account, tmp_path):
    Provider.bootstrap_config(cluster(tmp_path, bucket="results"))
    head, worker = (account.policies()[f"ray-rayfl-{REGION}-{kind}"] for kind in ("head", "worker"))
    assert head == {"head": policy("head"), "bucket": policy("bucket")} and worker == {"bucket": policy("bucket")}
    Provider.bootstrap_config(cluster(tmp_path))
    head, worker = (account.policies()[f"ray-rayfl-{REGION}-{kind}"] for kind in ("head", "worker"))
    assert head == {"head": policy("head")} and worker == {}


def test_no_policy_is_for_everything():
    for name in ("head", "bucket"):
        for part in policy(name)["Statement"]:
            assert not [action for action in listed(part["Action"]) if "*" in action]
            assert part["Resource"] != "*" or part["Action"] == "ec2:DescribeInstances"


def test_what_a_file_names_itself_is_left_alone(account, tmp_path):
    config = cluster(tmp_path)
    [subnet, *_] = account.ec2.describe_subnets()["Subnets"]
    group = account.ec2.create_security_group(GroupName="mine", Description="mine", VpcId=subnet["VpcId"])["GroupId"]
    for kind in config["available_node_types"].values():
        kind["node_config"] |= {"SecurityGroupIds": [group], "IamInstanceProfile": {"Arn": "arn:aws:iam::1:mine"}}
    made = Provider.bootstrap_config(config)
    assert [one["GroupName"] for one in account.groups()] == ["mine"] and account.policies() == {}
    nodes = [kind["node_config"] for kind in made["available_node_types"].values()]
    assert {node["SecurityGroupIds"][0] for node in nodes} == {group}
    assert {node["IamInstanceProfile"]["Arn"] for node in nodes} == {"arn:aws:iam::1:mine"}
    assert "ssh_group" not in made["provider"]


def test_what_is_there_is_taken(account, tmp_path):
    assert Provider.bootstrap_config(cluster(tmp_path)) == Provider.bootstrap_config(cluster(tmp_path))
    [group] = account.groups()
    assert len(group["IpPermissions"]) == 1 and account.ssh() == []


def test_a_group_of_a_command_that_was_stopped_is_made_whole(account, tmp_path):
    [group] = Provider.bootstrap_config(cluster(tmp_path))["available_node_types"]["head"]["node_config"][
        "SecurityGroupIds"
    ]
    inside = account.groups()[0]["IpPermissions"]
    account.ec2.revoke_security_group_ingress(GroupId=group, IpPermissions=inside)
    Provider.bootstrap_config(cluster(tmp_path))
    assert account.groups()[0]["IpPermissions"] == inside != []


def test_everybody_who_was_let_in_before_is_out(account, tmp_path):
    config = Provider.bootstrap_config(cluster(tmp_path))
    group = config["provider"]["ssh_group"]
    for network in ("0.0.0.0/0", "192.0.2.0/24"):
        aws._let_in(account.ec2, group, network)
    # two that somebody else has added
    account.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[aws._ssh("0.0.0.0/0")])
    aws._let_in(account.ec2, group, f"{HOME}/32")
    aws._let_in(account.ec2, group, f"{HOME}/32")
    assert account.ssh() == [f"{HOME}/32"]


@pytest.mark.parametrize(
    ("given", "network"),
    [("198.51.100.7", "198.51.100.7/32"), ("198.51.100.0/24", "198.51.100.0/24"), ("10.1.2.3/8", "10.0.0.0/8")],
)
def test_addresses_and_networks(monkeypatch, given, network):
    monkeypatch.setenv("RAYFL_SSH_FROM", given)
    assert caller_address() == network


@pytest.mark.parametrize("given", ["0.0.0.0/0", "here", "2001:db8::1", "198.51.100.7/33"])
def test_what_is_no_address_or_everybodys_is_refused(monkeypatch, given):
    monkeypatch.setenv("RAYFL_SSH_FROM", given)
    with pytest.raises(ConfigError) as error:
        caller_address()
    assert str(error.value) == (
        f"RAYFL_SSH_FROM: {given} is not valid. Allowed: an IPv4 address or a network other than 0.0.0.0/0, "
        "such as 198.51.100.7 or 198.51.100.0/24"
    )


def test_the_address_is_the_one_that_aws_sees(monkeypatch, tmp_path):
    monkeypatch.delenv("RAYFL_SSH_FROM", raising=False)
    (tmp_path / "answer").write_text("198.51.100.7\n")
    monkeypatch.setattr(aws, "WHO_AM_I", (tmp_path / "answer").as_uri())
    assert caller_address() == "198.51.100.7/32"


def test_without_an_answer_the_address_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.delenv("RAYFL_SSH_FROM", raising=False)
    monkeypatch.setattr(aws, "WHO_AM_I", (tmp_path / "nothing").as_uri())
    with pytest.raises(
        ConfigError, match="^RAYFL_SSH_FROM: it is not set, and file:.* does not answer .* Hint: set it to the"
    ):
        caller_address()
