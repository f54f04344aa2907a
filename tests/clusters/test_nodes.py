"""The scripts that make machines nodes, on a machine that is a folder, with programs that write down what is asked."""

import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes import program

SAYS = '#!/bin/bash\necho "$(basename "$0") $*" >>"$HOME/said"\n'
UV = """
case $* in
venv*)
    python=${@: -1}/bin/python
    mkdir -p "${python%/*}" && printf '#!/bin/bash\\necho 3.12.9' >"$python" && chmod +x "$python"
    ;;
*freeze*) echo ray==2.60.0 ;;
esac
"""
CURL = """
case $* in
*/health*) [ -e "$HOME/mlflow_runs" ] ;;
*) echo "mkdir -p ~/.local/bin && cp '{uv}' ~/.local/bin/uv" ;;
esac
"""
MLFLOW = """
echo "$MLFLOW_BACKEND_STORE_URI $MLFLOW_ARTIFACTS_DESTINATION" >>"$HOME/stores"
[ -n "$MLFLOW_AUTH_ADMIN_PASSWORD" ] && [ -n "$MLFLOW_FLASK_SERVER_SECRET_KEY" ] || exit 1
[ -e "$HOME/ill" ] && echo "I am ill" && exit 1
touch "$HOME/mlflow_runs"
exec sleep 0.1
"""
TOP = "#!/bin/bash\n# Ubuntu's ends here for shells that nobody types in\nreturn\n"


@dataclass
class Machine:
    """A machine of a cluster, with Ubuntu's .bashrc and what `ray up` brings."""

    home: Path
    shared: Path

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        known = {
            "HOME": str(self.home),
            "PATH": f"{self.home}/programs:/usr/bin:/bin",
            "RAYFL_SHARED": str(self.shared),
        }
        return subprocess.run(command, env=known | environment, text=True, capture_output=True, timeout=60)

    def node(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run("bash", f"{self.home}/rayfl/clusters/node.sh", *arguments, **environment)

    def head(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run("bash", f"{self.home}/rayfl/clusters/head.sh", **environment)

    def said(self, name: str) -> list[str]:
        """The arguments that a program got, call by call."""
        file = self.home / "said"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.partition(" ")[2] for line in lines if line.split(" ")[0] == name]

    def shell(self, variable: str, path: str = "/usr/bin:/bin") -> str:
        """Return a variable of a non-interactive shell."""
        return self.run("bash", "-c", f'source ~/.bashrc; echo "${variable}"', PATH=path).stdout.strip()


@pytest.fixture
def machine(tmp_path):
    home, shared = tmp_path / "home", tmp_path / "shared"
    programs = home / "programs"
    for folder in (programs, shared, home / "rayfl/clusters"):
        folder.mkdir(parents=True)
    for name in ("node.sh", "head.sh"):
        (home / "rayfl/clusters" / name).write_bytes(Path("clusters", name).read_bytes())
    (home / ".bashrc").write_text(TOP)
    program(tmp_path / "uv", SAYS + UV)
    program(programs / "curl", SAYS + CURL.replace("{uv}", str(tmp_path / "uv")))
    program(programs / "mlflow", SAYS + MLFLOW)
    program(programs / "findmnt", '#!/bin/bash\ncat "$HOME/mounted" 2>/dev/null\n')
    program(
        programs / "sudo",
        SAYS + '[ "$1" = mount ] && echo "$6" >"$HOME/mounted"\n[ "$1" = tee ] && cat >"$HOME/exports"\ntrue\n',
    )
    program(programs / "exportfs", SAYS)
    return Machine(home, shared)


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


def succeeded(done: subprocess.CompletedProcess[str]) -> bool:
    assert done.returncode == 0, done.stdout + done.stderr
    return True


# node.sh


def test_a_head_exports_its_disk_to_private_networks_alone(machine):
    assert succeeded(machine.node("head"))
    [exported] = (machine.home / "exports").read_text().splitlines()
    assert exported.split()[0] == str(machine.shared)
    networks = [one.partition("(")[0] for one in exported.split()[1:]]
    assert networks == ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"]
    assert machine.said("sudo")[-1] == "exportfs -ra" and not any("mount" in one for one in machine.said("sudo"))


def test_a_worker_mounts_the_heads_disk_once(machine):
    assert succeeded(machine.node("head"))
    (machine.home / "said").unlink()
    for _ in range(2):
        assert succeeded(machine.node("head", RAY_HEAD_IP="10.0.0.5"))
    [mounted] = [one for one in machine.said("sudo") if one.startswith("mount ")]
    assert mounted.endswith(f"10.0.0.5:{machine.shared} {machine.shared}") and "hard" in mounted
    assert "exportfs -ra" not in machine.said("sudo")


def test_a_worker_of_a_head_that_is_gone_mounts_the_new_ones_disk(machine):
    versions(machine)
    for address in ("10.0.0.5", "10.0.0.6"):
        assert succeeded(machine.node("head", RAY_HEAD_IP=address))
    said = [one.split()[0] + one.split()[-2] for one in machine.said("sudo") if "mount" in one.split()[0]]
    assert said == [f"mount10.0.0.5:{machine.shared}", "umount-fl", f"mount10.0.0.6:{machine.shared}"]


@pytest.mark.parametrize("role", [{}, {"RAY_HEAD_IP": "10.0.0.5"}])
def test_all_nodes_mount_an_efs(machine, role):
    versions(machine)
    assert succeeded(machine.node("fs-1.efs.us-west-2.amazonaws.com:/", **role))
    [mounted] = [one for one in machine.said("sudo") if one.startswith("mount ")]
    assert mounted.endswith(f",noresvport fs-1.efs.us-west-2.amazonaws.com:/ {machine.shared}")
    assert not (machine.home / "exports").exists()


def test_a_folder_that_should_be_mounted_is_missed_before_anything_is_installed(machine):
    machine.shared.rmdir()
    done = machine.node("mounted")
    assert done.returncode == 1 and f"node.sh: {machine.shared}: no such folder; mount one" in done.stderr
    assert machine.said("uv") == []


def test_a_folder_that_is_mounted_needs_no_sudo(machine):
    assert succeeded(machine.node("mounted")) and machine.said("sudo") == []


@pytest.mark.parametrize("given", ["nfs", "efs=fs-1"])
def test_what_nodes_share_is_one_of_three(machine, given):
    done = machine.node(given)
    assert done.returncode == 1 and f"node.sh: {given} is not valid. Allowed: head, HOST:/PATH, mounted" in done.stderr


def test_what_nodes_share_has_to_be_said(machine):
    assert "what all nodes see: head, HOST:/PATH or mounted" in machine.node().stderr


def test_rayfl_is_installed_and_uv_and_python_once(machine):
    for _ in range(2):
        assert succeeded(machine.node("mounted"))
    assert len([one for one in machine.said("curl") if "astral.sh/uv" in one]) == 1
    env = f"{machine.home}/env"
    assert [one for one in machine.said("uv") if one.startswith("venv")] == [f"venv --quiet --python 3.12 {env}"]
    installed = [one for one in machine.said("uv") if one.startswith("pip install")]
    assert installed == 2 * [
        f"pip install --quiet --python {env} --compile-bytecode --editable {machine.home}/rayfl[aws] mlflow[auth]"
    ]


def versions(machine: Machine) -> None:
    (machine.shared / "nodes").mkdir()
    (machine.shared / "nodes/versions.txt").write_text("ray==2.60.0\n")
    (machine.shared / "nodes/python.txt").write_text("3.12.9\n")


def test_a_worker_has_the_heads_versions(machine):
    assert succeeded(machine.node("mounted"))
    written = {path.name: path.read_text() for path in (machine.shared / "nodes").iterdir()}
    assert written == {"versions.txt": "ray==2.60.0\n", "python.txt": "3.12.9\n"}
    (machine.home / "said").unlink()
    (machine.home / "env/bin/python").unlink()
    assert succeeded(machine.node("mounted", RAY_HEAD_IP="10.0.0.5"))
    made, installed = machine.said("uv")
    assert made == f"venv --quiet --python 3.12.9 {machine.home}/env"
    assert f"--constraints {machine.shared}/nodes/versions.txt" in installed


def test_a_worker_without_the_heads_folder_says_so(machine):
    done = machine.node("mounted", RAY_HEAD_IP="10.0.0.5")
    assert done.returncode == 1 and "versions.txt: the head has not written it; is" in done.stderr


def test_every_shell_of_a_node_knows_the_environment(machine):
    versions(machine)
    for _ in range(2):
        assert succeeded(machine.node("mounted", RAY_HEAD_IP="10.0.0.5"))
    own = machine.home / ".rayfl"
    assert (machine.home / ".bashrc").read_text() == f". {own}/env.sh\n" + TOP
    assert mode(own) == "0o700"
    assert machine.shell("RAY_AUTH_MODE") == "token" and machine.shell("RAY_ENABLE_UV_RUN_RUNTIME_ENV") == "0"
    assert machine.shell("RAYFL_OUTPUT") == f"{machine.shared}/runs"
    path = f"{machine.home}/env/bin:{machine.home}/.local/bin:/usr/bin:/bin"
    assert machine.shell("PATH") == path == machine.shell("PATH", path)
    assert machine.shell("RAY_ADDRESS") == "" == machine.shell("MLFLOW_TRACKING_URI")


def test_a_head_knows_its_ray_and_its_mlflow(machine):
    assert succeeded(machine.node("mounted"))
    assert machine.shell("RAY_ADDRESS") == "auto"
    assert machine.shell("MLFLOW_TRACKING_URI") == "http://127.0.0.1:5000"


def test_a_machine_without_a_bashrc_gets_one(machine):
    (machine.home / ".bashrc").unlink()
    assert succeeded(machine.node("mounted")) and machine.shell("RAY_AUTH_MODE") == "token"


# head.sh


def test_a_heads_mlflow_starts_once_and_keeps_its_secrets(machine):
    assert succeeded(machine.node("mounted")) and succeeded(machine.head())
    kept = {path: path.read_text() for path in secret_files(machine)}
    assert succeeded(machine.head())
    assert {path: path.read_text() for path in kept} == kept
    [started] = machine.said("mlflow")
    assert started == "server --host 127.0.0.1 --port 5000 --workers 1 --app-name basic-auth"


def secret_files(machine: Machine) -> list[Path]:
    return [machine.home / ".rayfl/mlflow.env", machine.home / ".mlflow/credentials"]


def test_secrets_of_mlflow_are_read_by_nobody_else_and_are_in_no_command(machine):
    assert succeeded(machine.node("mounted"))
    done = machine.head()
    assert succeeded(done)
    secrets, credentials = (path.read_text() for path in secret_files(machine))
    assert [mode(path) for path in secret_files(machine)] == ["0o600", "0o600"]
    values = dict(line.split("=") for line in secrets.splitlines())
    assert {len(value) for value in values.values()} == {48, 64}
    assert credentials.splitlines()[1:] == [
        "mlflow_tracking_username = admin",
        f"mlflow_tracking_password = {values['MLFLOW_AUTH_ADMIN_PASSWORD']}",
    ]
    public = (machine.home / "said").read_text() + done.stdout + done.stderr
    assert not [value for value in values.values() if value in public]


def test_mlflow_keeps_its_data_on_the_heads_disk_and_artifacts_where_all_see_them(machine):
    assert succeeded(machine.node("mounted")) and succeeded(machine.head())
    own = machine.home / ".rayfl"
    assert (machine.home / "stores").read_text() == f"sqlite:///{own}/mlflow.db {machine.shared}/mlflow\n"
    assert f"database_uri = sqlite:///{own}/mlflow_users.db\n" in (own / "mlflow.ini").read_text()


def test_mlflow_keeps_its_data_where_it_is_told(machine):
    assert succeeded(machine.node("mounted"))
    own = machine.home / ".rayfl"
    (own / "mlflow.env").write_text("MLFLOW_BACKEND=postgresql://me:secret@db/mlflow\n")
    assert succeeded(machine.head(MLFLOW_ARTIFACTS="s3://results/mlflow"))
    assert (machine.home / "stores").read_text() == "postgresql://me:secret@db/mlflow s3://results/mlflow\n"
    assert machine.said("uv")[-1].endswith("psycopg2-binary") and mode(own / "mlflow.env") == "0o600"
    assert "secret" not in (machine.home / "said").read_text()


def test_an_mlflow_that_does_not_start_is_an_error_with_its_reason(machine):
    assert succeeded(machine.node("mounted"))
    (machine.home / "ill").touch()
    done = machine.head()
    assert done.returncode == 1 and "MLflow did not start" in done.stderr and "I am ill" in done.stderr
