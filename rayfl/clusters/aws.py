"""AWS for `ray up`: Ray's provider with SSH from one address and minimal permissions.

    provider: {type: external, module: rayfl.clusters.aws.Provider, region: us-west-2, cache_stopped_nodes: false,
               head_policy: clusters/aws_head_policy.json, bucket_policy: clusters/aws_bucket_policy.json}

Ray's own provider opens SSH to the internet, grants the head all permissions in EC2 and S3, and gives workers no role.
This one creates, for node types that do not name their own:

- a security group: all traffic between nodes of the cluster, and SSH only from the caller's address. The address is
  `RAYFL_SSH_FROM` (198.51.100.7, or 198.51.100.0/24). Default: the address that AWS sees. Every `ray` command that
  connects to the cluster updates it.
- a role for the head with `head_policy`, and one for workers without permissions. With `bucket: NAME` both also have
  `bucket_policy`. Policies can use ${partition}, ${account}, ${region}, ${cluster}, ${worker} (the workers' role) and
  ${bucket}. `ray up --no-config-cache` applies a changed policy.

Both are free of charge and remain after `ray down`. Needs boto3, the extra `aws`. Tested with moto, not on AWS.
"""

import copy
import ipaddress
import json
import os
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

try:
    from ray.autoscaler._private.aws.config import _configure_subnet
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler._private.aws.utils import client_cache
except ModuleNotFoundError as error:
    raise ImportError(f"{error}; install rayfl with its extra: `uv sync --extra aws`") from None

from rayfl.config import ConfigError

WHO_AM_I = "https://checkip.amazonaws.com"
PATIENCE = 10.0
"""Time limit in seconds for `WHO_AM_I`."""
SPREADING = 15.0
"""Seconds until EC2 accepts a new instance profile, as in Ray."""
TRUST = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}],
}
SPOT_ROLE = "AWSServiceRoleForEC2Spot"


class Provider(AWSNodeProvider):
    """Nodes of one cluster, for `provider: {type: external, module: rayfl.clusters.aws.Provider}`.

    For the autoscaler on the head it behaves like `AWSNodeProvider`, because `provider.ssh_group` is absent there.
    """

    let_in = False
    """True once SSH from the caller's address is allowed."""

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Return a completed copy; create the group and roles if needed. Raise ConfigError before creating anything."""
        config = copy.deepcopy(cluster_config)
        _check(config)
        nodes = [kind["node_config"] for kind in config["available_node_types"].values()]
        needs_group = any("SecurityGroupIds" not in node for node in nodes)
        roles = _roles(config) if any("IamInstanceProfile" not in node for node in nodes) else None
        if needs_group:
            caller_address()
            _configure_subnet(config)
            config["provider"]["ssh_group"] = group = _security_group(config)
            for node in nodes:
                node.setdefault("SecurityGroupIds", [group])
        if roles:
            _give_roles(config, *roles)
        return AWSNodeProvider.bootstrap_config(config)

    def prepare_for_head_node(self, cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Return the head's configuration, without the security group for SSH."""
        config = copy.deepcopy(cluster_config)
        config["provider"].pop("ssh_group", None)
        return super().prepare_for_head_node(config)

    def get_command_runner(self, *arguments: Any, **options: Any) -> Any:
        """Allow SSH from the caller, then return the command runner, which Ray requests before every SSH."""
        group = self.provider_config.get("ssh_group")
        if group and not self.let_in:
            _let_in(_client("ec2", self.provider_config), group, caller_address())
            self.let_in = True
        return super().get_command_runner(*arguments, **options)


def caller_address() -> str:
    """Return the network that can use SSH, "198.51.100.7/32". Raise ConfigError if it is invalid or contains every
    address."""
    given = os.environ.get("RAYFL_SSH_FROM", "")
    if not given:
        try:
            with urllib.request.urlopen(WHO_AM_I, timeout=PATIENCE) as answer:
                given = answer.read(64).decode().strip()
        except OSError as error:
            raise ConfigError(
                f"RAYFL_SSH_FROM: it is not set, and {WHO_AM_I} does not answer ({error}). "
                "Hint: set it to the address from which this machine reaches AWS"
            ) from None
    try:
        network = ipaddress.IPv4Network(given, strict=False)
    except ValueError:
        network = None
    if network is None or network.prefixlen == 0:
        raise ConfigError(
            f"RAYFL_SSH_FROM: {given} is not valid. Allowed: an IPv4 address or a network other than 0.0.0.0/0, "
            "such as 198.51.100.7 or 198.51.100.0/24"
        )
    return str(network)


def _check(config: dict[str, Any]) -> None:
    """Raise ConfigError for problems that Ray would notice late or never."""
    for name, kind in config["available_node_types"].items():
        if "CPU" not in kind["resources"]:
            raise ConfigError(
                f"available_node_types.{name}: the number of CPUs of {kind['node_config'].get('InstanceType')} in "
                f"{config['provider']['region']} is unknown, so Ray would never start one. Hint: see its warning above "
                "(no credentials, another region, a wrong name), or set resources"
            )
    for source in config["file_mounts"].values():
        if not Path(source).expanduser().exists():
            do = (
                "run `ray get-auth-token --generate`"
                if source.endswith("auth_token")
                else "start ray in the folder that contains it"
            )
            raise ConfigError(f"file_mounts: {source} does not exist. Hint: {do}")


def _client(service: str, provider: dict[str, Any]) -> Any:
    return client_cache(service, provider["region"], **provider.get("aws_credentials", {}))


def _security_group(config: dict[str, Any]) -> str:
    """Return the ID of the cluster's own group; create it if needed."""
    ec2 = _client("ec2", config["provider"])
    subnets = [name for kind in config["available_node_types"].values() for name in kind["node_config"]["SubnetIds"]]
    [subnet] = ec2.describe_subnets(SubnetIds=subnets[:1])["Subnets"]
    name = f"ray-{config['cluster_name']}"
    wanted = [{"Name": "vpc-id", "Values": [subnet["VpcId"]]}, {"Name": "group-name", "Values": [name]}]
    found = ec2.describe_security_groups(Filters=wanted)["SecurityGroups"]
    if found:
        group, rules = found[0]["GroupId"], found[0]["IpPermissions"]
    else:
        tags = [{"Key": "ray-cluster-name", "Value": config["cluster_name"]}]
        group, rules = (
            ec2.create_security_group(
                GroupName=name,
                Description="Nodes of a Ray cluster: everything among them, SSH from the caller",
                VpcId=subnet["VpcId"],
                TagSpecifications=[{"ResourceType": "security-group", "Tags": tags}],
            )["GroupId"],
            [],
        )
        ec2.get_waiter("security_group_exists").wait(GroupIds=[group])
    if not any(pair["GroupId"] == group for rule in rules for pair in rule["UserIdGroupPairs"]):
        inside = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
        ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[inside])
    return group


def _let_in(ec2: Any, group: str, address: str) -> None:
    """Allow SSH from one network only."""
    [found] = ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"]
    ssh = [rule for rule in found["IpPermissions"] if rule.get("FromPort") == 22]
    known = {span["CidrIp"] for rule in ssh for span in rule["IpRanges"]}
    if address not in known:
        ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[_ssh(address)])
    for other in known - {address}:
        ec2.revoke_security_group_ingress(GroupId=group, IpPermissions=[_ssh(other)])


def _ssh(address: str) -> dict[str, Any]:
    return {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": address}]}


@dataclass(frozen=True)
class Role:
    """Role of nodes, with an instance profile of the same name."""

    name: str
    policies: dict[str, str]
    """Name -> policy as JSON."""


def _roles(config: dict[str, Any]) -> tuple[Role, Role]:
    """Return the roles of the head and of workers, with policies from files."""
    provider = config["provider"]
    # roles belong to an account, not to a region
    head, worker = (f"ray-{config['cluster_name']}-{provider['region']}-{kind}" for kind in ("head", "worker"))
    caller = _client("sts", provider).get_caller_identity()
    known = {
        "partition": caller["Arn"].split(":")[1],
        "account": caller["Account"],
        "region": provider["region"],
        "cluster": config["cluster_name"],
        "worker": worker,
        "bucket": provider.get("bucket", ""),
    }
    both = {"bucket": _policy(provider, "bucket_policy", known)} if known["bucket"] else {}
    return Role(head, {"head": _policy(provider, "head_policy", known)} | both), Role(worker, both)


def _policy(provider: dict[str, Any], key: str, known: dict[str, str]) -> str:
    try:
        text = Template(Path(provider[key]).read_text(encoding="utf-8")).substitute(known)
        return json.dumps(json.loads(text))
    except (KeyError, OSError, ValueError) as error:
        raise ConfigError(
            f"provider.{key}: {provider.get(key)} is not valid ({type(error).__name__}: {error}). Allowed: a JSON file "
            f"with ${{...}} of {', '.join(known)}. Hint: start ray in the folder that contains clusters/"
        ) from None


def _profile(iam: Any, role: Role) -> tuple[str, bool]:
    """Return the ARN of the role's instance profile, and whether it is new. Create role and profile if needed, and
    update the role's policies."""
    with suppress(iam.exceptions.EntityAlreadyExistsException):
        iam.create_role(RoleName=role.name, AssumeRolePolicyDocument=json.dumps(TRUST))
    for name in set(iam.list_role_policies(RoleName=role.name)["PolicyNames"]) - set(role.policies):
        iam.delete_role_policy(RoleName=role.name, PolicyName=name)
    for name, text in role.policies.items():
        iam.put_role_policy(RoleName=role.name, PolicyName=name, PolicyDocument=text)
    with suppress(iam.exceptions.EntityAlreadyExistsException):
        iam.create_instance_profile(InstanceProfileName=role.name)
    profile = iam.get_instance_profile(InstanceProfileName=role.name)["InstanceProfile"]
    is_new = not profile["Roles"]
    if is_new:
        iam.add_role_to_instance_profile(InstanceProfileName=role.name, RoleName=role.name)
    return profile["Arn"], is_new


def _give_roles(config: dict[str, Any], head: Role, worker: Role) -> None:
    """Set the `IamInstanceProfile` of node types without one."""
    iam = _client("iam", config["provider"])
    kinds = config["available_node_types"]
    profiles = {role.name: _profile(iam, role) for role in (head, worker)}
    for name, kind in kinds.items():
        arn, _ = profiles[head.name if name == config["head_node_type"] else worker.name]
        kind["node_config"].setdefault("IamInstanceProfile", {"Arn": arn})
    if any("InstanceMarketOptions" in kind["node_config"] for kind in kinds.values()):
        _allow_spot(iam)
    if any(is_new for _, is_new in profiles.values()):
        time.sleep(SPREADING)


def _allow_spot(iam: Any) -> None:
    """Create the account's role for spot nodes, which the head is not allowed to create."""
    try:
        iam.get_role(RoleName=SPOT_ROLE)
    except iam.exceptions.NoSuchEntityException:
        iam.create_service_linked_role(AWSServiceName="spot.amazonaws.com")
