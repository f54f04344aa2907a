"""`rayfl check` of clusters' files: a shipped one passes, and each thing that is wrong in it has its sentence."""

import copy
import re
import shutil
from pathlib import Path

import pytest
import yaml

from rayfl.cli import main
from rayfl.clusters.check import check_cluster, is_cluster
from rayfl.config import ConfigError

FILES = sorted(Path("clusters").glob("*.yaml"))
LAUNCHERS = [path for path in FILES if "provider" in path.read_text()]
COMMANDS = [
    *("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"),
    *("head_start_ray_commands", "worker_start_ray_commands"),
]
WORLD = "opens a port to the world. Allowed: "
TUNNEL = f"{WORLD}127.0.0.1, which `ray dashboard` or an SSH tunnel reaches"
OWN = (
    f"{WORLD}addresses of your own; without security_group the cluster has a group of its own, with SSH from your "
    "address alone"
)
MADE = "Allowed: a variable, or a file that is made on the machine"


@pytest.fixture(params=LAUNCHERS, ids=lambda path: path.stem)
def given(request):
    return yaml.safe_load(request.param.read_text())


@pytest.fixture
def aws():
    return yaml.safe_load(Path("clusters/aws.yaml").read_text())


@pytest.fixture
def wrong(tmp_path):
    """Return the errors of a changed file, one per line, without its name."""

    def said(given):
        path = tmp_path / "cluster.yaml"
        path.write_text(yaml.safe_dump(given))
        with pytest.raises(ConfigError) as error:
            check_cluster(path)
        lines = str(error.value).split("\n")
        assert all(line.startswith(f"{path}: ") for line in lines)
        return [line.removeprefix(f"{path}: ") for line in lines]

    return said


def replaced(given, folder, pattern, text):
    """The file with other words in its commands and in the scripts that it mounts."""
    given = copy.deepcopy(given)
    for key in COMMANDS:
        if key in given:
            given[key] = [re.sub(pattern, text, command) for command in given[key]]
    docker = given.get("docker", {})
    if "run_options" in docker:
        docker["run_options"] = [re.sub(pattern, text, option) for option in docker["run_options"]]
    for target, source in given["file_mounts"].items():
        if source == "clusters":
            given["file_mounts"][target] = str(shutil.copytree(source, folder / source))
            for script in (folder / source).glob("*.sh"):
                script.write_text(re.sub(pattern, text, script.read_text()))
    return given


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_file_passes(path):
    assert is_cluster(path)
    assert check_cluster(path)


@pytest.mark.parametrize("path", sorted(Path("tune_configs").glob("q*.yaml")), ids=lambda path: path.stem)
def test_an_experiment_is_no_cluster(path):
    assert not is_cluster(path)


def test_the_command_line_says_what_each_file_is(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["rayfl", "check", "clusters/local.yaml", "tune_configs/quickstart.yaml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    first, second = capsys.readouterr().out.splitlines()
    assert first == (
        "clusters/local.yaml: valid cluster of provider local, up to 2 workers. No token here: run `ray get-auth-token "
        "--generate`"
    )
    assert second.startswith("tune_configs/quickstart.yaml: valid sweep with 4 rows: fedavg")


def test_the_command_line_refuses_a_wrong_one(monkeypatch, capsys, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("cluster_name: a\nprovider: {type: aws, regiom: us-west-2}\nmax_worker: 2\n")
    monkeypatch.setattr("sys.argv", ["rayfl", "check", str(path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"error: {path}: max_worker: unknown key 'max_worker'. Did you mean 'max_workers'? " in (
        " ".join(capsys.readouterr().err.split())
    )


def test_broken_yaml_has_its_line(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("kind: Service\nspec: {}\n---\nkind: Service\nkind: Service\n")
    with pytest.raises(ConfigError, match=f"^{path}: kind \\(line 5\\): the key is already on line 4. Allowed: once$"):
        check_cluster(path)


def test_a_section_that_is_laid_below_another(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("kind: Service\nspec: &a {type: NodePort, b: 1}\nmetadata: {<<: [*a, {b: 2}], type: mine}\n")
    with pytest.raises(ConfigError) as error:
        check_cluster(path)
    said = str(error.value)
    assert "metadata.b: unknown key 'b'" in said and "spec.type: NodePort opens" in said
    assert "metadata.type: NodePort" not in said and "<<" not in said


def test_documents_are_sections(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("kind: Service\n---\n- a\n")
    with pytest.raises(ConfigError, match=r": \['a'\] is not valid. Allowed: a mapping of sections$"):
        check_cluster(path)


# what Ray's own check finds, too


def test_a_typo_at_the_top(given, wrong):
    [said] = wrong(given | {"max_worker": 3})
    assert said.startswith("max_worker: unknown key 'max_worker'. Did you mean 'max_workers'? Allowed: auth, ")


def test_a_typo_in_a_node_type(aws, wrong):
    head = aws["head_node_type"]
    aws["available_node_types"][head]["min_worker"] = 0
    [said] = wrong(aws)
    assert said == (
        f"available_node_types.{head}.min_worker: unknown key 'min_worker'. Did you mean 'min_workers'? Allowed: "
        "docker, idle_timeout_s, initialization_commands, labels, max_workers, min_workers, node_config, priority, "
        "resources, worker_setup_commands"
    )


def test_the_name_of_the_head(aws, wrong):
    head = aws["head_node_type"]
    aws["head_node_type"] = f"{head}d"
    known = ", ".join(sorted(aws["available_node_types"]))
    assert wrong(aws) == [f"head_node_type: no node type is called '{head}d'. Did you mean '{head}'? Allowed: {known}"]
    del aws["head_node_type"]
    assert wrong(aws) == [f"head_node_type: missing. Allowed: one of {known}"]


def test_a_head_that_is_no_name(aws, wrong):
    assert wrong(aws | {"head_node_type": ["head"]}) == ["head_node_type: ['head'] is not valid. Allowed: text"]


def test_what_may_be_text_or_null(wrong):
    gcp = yaml.safe_load(Path("clusters/gcp.yaml").read_text())
    gcp["provider"]["project_id"] = []
    assert wrong(gcp) == ["provider.project_id: [] is not valid. Allowed: text or null"]


def test_what_a_node_type_must_have(aws, wrong):
    del aws["available_node_types"][aws["head_node_type"]]["node_config"]
    assert wrong(aws) == [f"available_node_types.{aws['head_node_type']}.node_config: missing"]


def test_shares_of_a_resource(aws, wrong):
    head = aws["head_node_type"]
    aws["available_node_types"][head]["resources"] = {"GPU": 0.5}
    assert wrong(aws) == [
        f"available_node_types.{head}.resources.GPU: 0.5 is not valid. Allowed: a whole number; fractions of a GPU are "
        "set by `run.gpus` of an experiment"
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_workers": "4"}, "max_workers: '4' is not valid. Allowed: a whole number"),
        ({"max_workers": -1}, "max_workers: -1 is not valid. Allowed: at least 0"),
        ({"setup_commands": "pip"}, "setup_commands: 'pip' is not valid. Allowed: a list"),
        ({"auth": {"ssh_usr": "me"}}, "auth.ssh_usr: unknown key 'ssh_usr'. Did you mean 'ssh_user'? Allowed: "),
    ],
)
def test_types_and_bounds(given, wrong, change, said):
    assert any(line.startswith(said) for line in wrong(given | change))


def test_what_only_rays_launcher_knows(given, wrong):
    given["provider"] = {"type": "awz"}
    given.pop("available_node_types", None)
    given.pop("head_node_type", None)
    assert wrong(given) == ["Ray's launcher refuses it: Unsupported node provider: awz"]


# what it misses


def test_fewer_workers_than_the_fewest(aws, wrong):
    worker = next(name for name in aws["available_node_types"] if name != aws["head_node_type"])
    aws["available_node_types"][worker] |= {"min_workers": 3, "max_workers": 2}
    aws["max_workers"] = 2
    assert wrong(aws) == [
        f"available_node_types.{worker}.min_workers: 3 is not valid. Allowed: at most its max_workers, 2",
        "max_workers: 2 is not valid. Allowed: at least the sum of all min_workers, 3",
    ]


def test_a_mount_of_nothing(given, wrong):
    given["file_mounts"]["~/data"] = "no/such/folder"
    given["file_mounts"]["~/more"] = 3
    assert wrong(given) == [
        f"file_mounts.~/data: 'no/such/folder' does not exist. Allowed: a file or folder, relative to {Path.cwd()}",
        "file_mounts.~/more: 3 is not valid. Allowed: a path of this machine",
    ]


def test_no_token(given, wrong):
    given["file_mounts"] = {t: s for t, s in given["file_mounts"].items() if not t.endswith("auth_token")}
    assert wrong(given) == [
        "file_mounts: the token is missing. Allowed: ~/.ray/auth_token: ~/.ray/auth_token, which `ray get-auth-token "
        "--generate` makes"
    ]


@pytest.mark.parametrize(
    ("mode", "said"),
    [("", "RAY_AUTH_MODE is not set"), ("RAY_AUTH_MODE=disabled", "RAY_AUTH_MODE=disabled is not valid")],
)
def test_ray_without_a_token(given, wrong, tmp_path, mode, said):
    assert wrong(replaced(given, tmp_path, "RAY_AUTH_MODE=token", mode)) == [
        f"{kind}_start_ray_commands: {said}. Allowed: RAY_AUTH_MODE=token on every node, before `ray start`"
        for kind in ("head", "worker")
    ]


def test_a_token_that_only_the_head_asks_for(wrong):
    given = yaml.safe_load(Path("clusters/local.yaml").read_text())
    given |= {key: [] for key in COMMANDS} | {
        "file_mounts": {"~/.ray/auth_token": "~/.ray/auth_token"},
        "head_start_ray_commands": ["RAY_AUTH_MODE=token ray start --head"],
        "worker_start_ray_commands": ["# RAY_AUTH_MODE=token\nray start --address=$RAY_HEAD_IP:6379"],
    }
    assert wrong(given) == [
        "worker_start_ray_commands: RAY_AUTH_MODE is not set. Allowed: RAY_AUTH_MODE=token on every node, before "
        "`ray start`"
    ]


@pytest.mark.parametrize(
    ("range_", "where", "address"),
    [
        ({"IpRanges": [{"CidrIp": "0.0.0.0/0"}]}, "IpRanges.0.CidrIp", "0.0.0.0/0"),
        ({"Ipv6Ranges": [{"CidrIpv6": "::/0"}]}, "Ipv6Ranges.0.CidrIpv6", "::/0"),
    ],
)
def test_a_group_that_is_open(aws, wrong, range_, where, address):
    rule = {"FromPort": 8265, "ToPort": 8265, "IpProtocol": "tcp"} | range_
    aws["provider"]["security_group"] = {"GroupName": "a", "IpPermissions": [rule]}
    assert wrong(aws) == [f"provider.security_group.IpPermissions.0.{where}: '{address}' {OWN}"]


def test_a_group_of_ones_own_addresses(aws, tmp_path):
    rule = {"FromPort": 22, "ToPort": 22, "IpProtocol": "tcp", "IpRanges": [{"CidrIp": "10.0.0.0/8"}]}
    aws["provider"]["security_group"] = {"GroupName": "a", "IpPermissions": [rule]}
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(aws))
    assert check_cluster(path)


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("ray start --head --dashboard-host=0.0.0.0", "--dashboard-host=0.0.0.0"),
        ("ray start --head --dashboard-host ::", "--dashboard-host ::"),
        ("mlflow server --host 0.0.0.0 --port 5000 &", "--host 0.0.0.0"),
        ("docker run -d -p 5000:5000 mlflow", "-p 5000:5000"),
        ("docker run --publish 0.0.0.0:5000:5000 mlflow", "--publish 0.0.0.0:5000:5000"),
    ],
)
def test_a_command_that_opens_a_port(given, wrong, command, found):
    place = f"head_start_ray_commands.{len(given['head_start_ray_commands'])}"
    given["head_start_ray_commands"].append(command)
    assert wrong(given) == [f"{place}: {found} {TUNNEL}"]


@pytest.mark.parametrize(
    "command",
    [
        "mlflow server --host 127.0.0.1",
        "mkdir -p 8265",
        "docker run -p 127.0.0.1:5000:5000 mlflow",
        "# ray start --dashboard-host=0.0.0.0",
    ],
)
def test_a_command_that_opens_none(given, tmp_path, command):
    given["head_start_ray_commands"].append(command)
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(given))
    assert check_cluster(path)


def test_an_option_of_docker_that_opens_a_port(given, wrong):
    given["docker"] = {"image": "rayproject/ray:2.60.0-py312", "container_name": "a", "run_options": ["-p 8265:8265"]}
    given["setup_commands"].append("export RAY_AUTH_MODE=token")
    assert wrong(given) == [f"docker.run_options.0: -p 8265:8265 {TUNNEL}"]


def test_a_mounted_script_that_opens_a_port(given, wrong, tmp_path):
    script = tmp_path / "serve.sh"
    script.write_text("# --host 0.0.0.0\nmlflow server --host 0.0.0.0\n")
    given["file_mounts"]["~/serve.sh"] = str(script)
    given.setdefault("head_setup_commands", []).append("bash ~/serve.sh")
    assert wrong(given) == [f"{script}: --host 0.0.0.0 {TUNNEL}"]


def test_a_port_that_rays_defaults_open(wrong):
    given = {
        "cluster_name": "a",
        "provider": {"type": "aws", "region": "us-west-2"},
        "file_mounts": {"~/.ray/auth_token": "~/.ray/auth_token"},
        "setup_commands": ["echo export RAY_AUTH_MODE=token >> ~/.bashrc"],
    }
    [said] = wrong(given)
    assert re.fullmatch(r"head_start_ray_commands\.\d: --dashboard-host=0\.0\.0\.0 " + re.escape(TUNNEL), said)


def test_secrets_are_named_and_not_shown(given, wrong):
    given["provider"] |= {"db_password": "hunter2", "aws_secret_access_key": 12345, "empty_token": ""}
    given["setup_commands"] += [
        "export MLFLOW_TRACKING_PASSWORD=hunter2",
        "export WANDB_API_KEY=$(cat ~/.wandb) HF_TOKEN=$HF_TOKEN RAY_AUTH_TOKEN_PATH=/run/t",
        "aws configure set aws_access_key_id AKIAABCDEFGHIJKLMNOP",
        "mlflow server --backend-store-uri postgresql://mlflow:hunter2@db/mlflow",
        "mlflow server --backend-store-uri postgresql://mlflow:$PASSWORD@db/mlflow",
    ]
    first = len(given["setup_commands"]) - 5
    said = wrong(given)
    assert sorted(said) == sorted(
        [
            f"provider.db_password: the file contains a secret. {MADE}",
            f"provider.aws_secret_access_key: the file contains a secret. {MADE}",
            f"setup_commands.{first}: the file contains the value of MLFLOW_TRACKING_PASSWORD. {MADE}",
            f"setup_commands.{first + 2}: the file contains a key or token. {MADE}",
            f"setup_commands.{first + 3}: the address contains a password. {MADE}",
        ]
    )
    assert "hunter2" not in " ".join(said)


def test_a_private_key(given, wrong):
    given["auth"]["ssh_private_key"] = "-----BEGIN OPENSSH PRIVATE KEY-----\nabc"
    assert f"auth.ssh_private_key: the file contains a key or token. {MADE}" in wrong(given)


def test_an_output_folder_that_nothing_mounts(given, wrong, tmp_path):
    output = "/mnt/rayfl/own"
    given["setup_commands"].append(f"echo export RAYFL_OUTPUT={output} >> ~/.bashrc")
    unmounted = replaced(given, tmp_path, r"\b(mount|mountpoint|exportfs)\b|/etc/fstab", "true")
    said = wrong(unmounted)
    assert [line for line in said if output in line] == [
        f"{kind}_setup_commands: the output folder {output} is mounted by no command. Allowed: one that all "
        "nodes see, with the command that mounts it, or that fails where it is not mounted"
        for kind in ("head", "worker")
    ]
    assert all("is mounted by no command" in line for line in said)


@pytest.mark.parametrize("command", ["sudo mount -t nfs4 a:/ /mnt/rayfl", "mountpoint -q /mnt/rayfl"])
def test_an_output_folder_that_a_command_mounts(given, tmp_path, command):
    given["setup_commands"] += ["echo export RAYFL_OUTPUT=/mnt/rayfl/runs >> ~/.bashrc", command]
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(given))
    assert check_cluster(path)


def test_a_name_is_no_version_of_ray(given, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(given | {"cluster_name": "my-ray2"}))
    assert check_cluster(path)


def test_a_ray_that_rayfl_is_not_made_for(given, wrong):
    place = f"setup_commands.{len(given['setup_commands'])}"
    given["setup_commands"].append("pip install 'ray[default,tune]==2.50.0'")
    first, *more = wrong(given)
    assert first == f"{place}: Ray 2.50.0 does not match. Allowed: <2.62,>=2.60, which rayfl is made for"
    # where the file names a Ray of its own, it differs from that too
    assert all("Allowed: one version of Ray" in line for line in more)


def test_two_versions_of_ray(wrong):
    given = yaml.safe_load(Path("clusters/local.yaml").read_text())
    given["setup_commands"] += ["pip install ray==2.60.0", "pip install ray==2.61.0"]
    place = f"setup_commands.{len(given['setup_commands']) - 1}"
    assert wrong(given) == [
        f"{place}: Ray 2.61.0, and 2.60.0 elsewhere in the file differ. Allowed: one version of Ray"
    ]


def test_all_that_is_wrong_at_once(given, wrong):
    given |= {"max_worker": 3, "idle_timeout_minutes": "5"}
    given["file_mounts"]["~/data"] = "no/such/folder"
    assert [line.partition(":")[0] for line in wrong(given)] == [
        "max_worker",
        "idle_timeout_minutes",
        "file_mounts.~/data",
    ]
