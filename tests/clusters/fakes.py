"""An AWS that costs nothing, and machines that are folders: `ray up` for real, without a network."""

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

from processes import ROOT

REMOTE = """#!{python} -IS
# ssh and rsync that write down what they are asked; what rsync brings to a machine lies in a folder of its address
import json, os, shutil, sys
from pathlib import Path

program, arguments = Path(sys.argv[0]).name, sys.argv[1:]
machines = Path("{machines}")
host = [word for word in arguments if "@" in word and not word.startswith("-")][-1].partition("@")[2]
host, _, path = host.partition(":")
said = {{"program": program, "host": host, "arguments": arguments}}
with open(machines / "said.jsonl", "a") as file:
    file.write(json.dumps(said) + "\\n")
if program == "rsync":
    source = Path(arguments[-2])
    target = machines / host / path.removeprefix("~/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy2(source, target)
"""


class Machines:
    """A user's machine with `ray`, and the nodes that it reaches."""

    def __init__(self, folder: Path, endpoint: str):
        self.folder, self.home = folder / "machines", folder / "home"
        programs, temporary = folder / "programs", folder / "tmp"
        for path in (self.folder, self.home / ".ray", programs, temporary):
            path.mkdir(parents=True)
        for name in ("ssh", "rsync"):
            program(programs / name, REMOTE.format(python=sys.executable, machines=self.folder))
        self.token = "0123456789abcdef" * 4
        token = self.home / ".ray" / "auth_token"
        token.write_text(self.token)
        token.chmod(0o600)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "RAY", "MLFLOW"))}
        self.environment = kept | {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_ENDPOINT_URL": endpoint,
            "HOME": str(self.home),
            "NO_PROXY": "127.0.0.1",
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray keeps bootstrapped configurations there
            "TMPDIR": str(temporary),
        }

    def ray(self, *arguments: str, **environment: str) -> str:
        """Return the output of a Ray command, which must succeed."""
        return self.run(str(Path(sys.executable).with_name("ray")), *arguments, **environment)

    def python(self, file: Path, *arguments: str, **environment: str) -> str:
        return self.run(sys.executable, str(file), *arguments, **environment)

    def run(self, *command: str, **environment: str) -> str:
        done = subprocess.run(
            command, env=self.environment | environment, cwd=ROOT, text=True, capture_output=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def said(self) -> list[dict[str, Any]]:
        """Every ssh and rsync so far: program, host, arguments."""
        return [json.loads(line) for line in (self.folder / "said.jsonl").read_text().splitlines()]


def commands(said: list[dict[str, Any]], host: str) -> list[str]:
    """Return the commands run on a machine, in order, without Ray's wrapping."""
    found = []
    for one in said:
        if one["program"] == "ssh" and one["host"] == host:
            shell = one["arguments"][-1]
            command = shlex.split(shell)[0].partition("PYTHONWARNINGS=ignore && ")[2]
            found.append(command.removeprefix("(").removesuffix(")") or shell)
    return found


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
