"""The MLflow server of a cluster's head, as head.sh starts it: who is let in, and by which name."""

import configparser
import os
import signal
import stat
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import mlflow
import pytest
from processes import free_port, until

PAGES = ("", "api/2.0/mlflow/experiments/get?experiment_id=0", "ajax-api/2.0/mlflow/experiments/get?experiment_id=0")


@pytest.fixture
def server(tmp_path):
    """Its port and the account that head.sh made."""
    port, own = free_port(), tmp_path / ".rayfl"
    own.mkdir()
    (own / "env.sh").write_text(f"export RAYFL_SHARED={tmp_path}/shared\n")
    script = tmp_path / "head.sh"
    script.write_text(Path("clusters/head.sh").read_text().replace("5000", str(port)))
    known = {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    started = subprocess.run(["bash", str(script)], env=os.environ | known, capture_output=True, text=True)
    try:
        assert started.returncode == 0, started.stderr
        account = configparser.ConfigParser()
        account.read(tmp_path / ".mlflow" / "credentials")
        yield port, account["mlflow"]["mlflow_tracking_username"], account["mlflow"]["mlflow_tracking_password"]
    finally:
        if (own / "mlflow.pid").exists():
            os.killpg(int((own / "mlflow.pid").read_text()), signal.SIGKILL)


def answer(port: int, path: str, user: str = "", password: str = "", host: str = "") -> int:
    """The status of a request."""
    asked = Request(f"http://127.0.0.1:{port}/{path}")
    if user:
        asked.add_header("Authorization", f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}")
    if host:
        asked.add_header("Host", host)
    try:
        with urlopen(asked, timeout=60) as got:
            return got.status
    except HTTPError as refused:
        with refused:
            return refused.code


@pytest.mark.slow
def test_only_the_account_and_the_servers_own_name_are_let_in(server, tmp_path, monkeypatch):
    port, user, password = server
    for page in PAGES:
        assert answer(port, page) == answer(port, page, user, "wrong") == answer(port, page, "nobody", password) == 401
        assert answer(port, page, user, password, host="evil.example") == 403
        assert answer(port, page, user, password) == 200
    files = [tmp_path / ".rayfl" / "mlflow.env", tmp_path / ".mlflow" / "credentials"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert password not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout

    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
    client = mlflow.MlflowClient(f"http://127.0.0.1:{port}")
    run = client.create_run(client.create_experiment("small"), run_name="first").info.run_id
    client.log_text(run, "kept", "note.txt")
    until(lambda: any(path.read_text() == "kept" for path in (tmp_path / "shared").rglob("note.txt")))
