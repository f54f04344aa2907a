"""Whether two commits give the same bits: every method and its options, three rounds each, on one machine.

    python tests/goldens.py make OUT.json      the goldens of the rayfl that this interpreter imports
    python tests/goldens.py compare OLD NEW    two commits, "." for the working tree as it is, or files of `make`
    python tests/goldens.py values             golden_values.json anew: what test_goldens.py compares, with a tolerance

`--only` and `--except` take cases, by comma, with wildcards: `--only 'fedpm-*,spafl-local'`. `compare` prints a line
for each case, and ends with 1 if one of them differs that `--except` does not name. Tensors of another name with the
same bits are said and are no difference. `--ignore` leaves out metrics, by comma. `--float64` runs in float64 what can:
there a sum in another order differs by less than 1e-8, where in float32 a few steps make any difference a large one.

Bits are equal on one type of machine alone, so version control has no checksums. Only stable interfaces are used: the
sections of an experiment, and the folder of a run (metrics.jsonl and the checkpoint's safetensors), by which the tool
works across commits however the code between the two moves. `run_case` is the one place that knows how a run starts.
"""

import argparse
import fnmatch
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden_cases import CASES, FLOAT32, VALUES, for_float64
from safetensors import safe_open
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
KEPT = Path(__file__).with_name("golden_values.json")
EVALUATED = ("accuracy_mean", "accuracy_server", "loss_mean", "validation_loss_mean", "local_accuracy_mean")
"""Metrics that version control keeps, besides the training loss."""
SHOWN = 3
"""Tensors of a case, and metrics, that are named one by one."""

Tensors = dict[str, torch.Tensor]
"""`state/<group>/<name>` and `client <id>/<group>/<name>`."""
Lines = list[dict[str, Any]]
"""The lines of metrics.jsonl, without their seconds."""


# one run


def run_case(experiment: dict[str, Any], folder: Path) -> None:
    """Runs an experiment in this process; its folder then holds metrics.jsonl and checkpoints/round-*/."""
    import rayfl

    if run := getattr(rayfl, "run", None):
        run(experiment, folder)
        return
    # commits before there was rayfl.run
    from rayfl.experiment import parse_experiment  # pyright: ignore

    parsed = parse_experiment(experiment, "golden")
    simulation = parsed.simulation(parsed.data.load(), folder)
    lines = [simulation.run_round() for _ in range(parsed.rounds)]
    simulation.save(folder / "checkpoints")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def result_of(experiment: dict[str, Any]) -> tuple[Lines, Tensors]:
    """Results of a run of three rounds."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        folder.mkdir()
        run_case(experiment, folder)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        [*_, newest] = sorted((folder / "checkpoints").glob("round-*"))
        found: Tensors = {}
        for owner, file in _saved(newest):
            found |= {f"{owner}/{name}": t for name, t in load_file(file).items()}
    return [{key: value for key, value in line.items() if key not in ("seconds", "sum")} for line in lines], found


def _saved(checkpoint: Path) -> Iterator[tuple[str, Path]]:
    """Owner of tensors -> file: the state's and every client's."""
    for file in sorted(checkpoint.rglob("*.safetensors")):
        # commits before there was kept.npy have clients' files in the checkpoint
        client = re.search(r"\d+$", file.stem)
        yield (f"client {client[0]}" if client else file.stem), file
    if (names := checkpoint / "kept.npy").exists():
        for row in np.load(names):
            yield f"client {row['client']}", checkpoint.parent / "kept" / f"{row['client']}-{row['round']}.safetensors"


def chosen(only: str, names: Iterable[str] = CASES) -> list[str]:
    """The cases that a list of patterns names."""
    patterns = only.split(",")
    return [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def make(out: Path, only: str = "*", float64: bool = False) -> None:
    """OUT.json: the checksums and metrics of every case, and how long it took; OUT.tensors/: the tensors themselves. A
    case that fails has its error there."""
    import rayfl

    experiments = {name: CASES[name] for name in chosen(only)}
    if float64:
        torch.set_default_dtype(torch.float64)
        experiments = {name: for_float64(e) for name, e in experiments.items() if e["method"]["name"] not in FLOAT32}
    folder = _tensors_folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    cases: dict[str, Any] = {}
    for name, experiment in experiments.items():
        started = time.perf_counter()
        try:
            lines, tensors = result_of(experiment)
        except Exception as error:
            cases[name] = {"error": f"{type(error).__name__}: {error}"}
        else:
            save_file(tensors, folder / f"{name}.safetensors")
            cases[name] = {"lines": lines, "tensors": {path: digest(t) for path, t in tensors.items()}}
        cases[name]["seconds"] = round(time.perf_counter() - started, 2)
    made = {"rayfl": str(Path(rayfl.__file__).parent), "machine": _machine(), "cases": cases}
    out.write_text(json.dumps(made, indent=1) + "\n")


def digest(t: torch.Tensor) -> str:
    """The checksum of a tensor's type, shape and bits."""
    head = f"{t.dtype} {tuple(t.shape)}\n".encode()
    return hashlib.sha256(head + t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _machine() -> dict[str, str]:
    """Return the facts that bits depend on, besides the commit."""
    information = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", information.read_text()) if information.exists() else []
    return {"cpu": names[0] if names else platform.processor(), "torch": torch.__version__}


def _tensors_folder(out: Path) -> Path:
    return out.with_suffix(".tensors")


# two commits


def compare(old: str, new: str, only: str = "*", excepted: str = "", ignored: str = "", float64: bool = False) -> int:
    """Prints a line for each case; how many differ that are not excepted."""
    with tempfile.TemporaryDirectory() as temporary:
        made = [_made(which, Path(temporary) / f"{i}", only, float64) for i, which in enumerate((old, new))]
        before, after = (json.loads(file.read_text()) for file in made)
        if before["machine"] != after["machine"]:
            print(f"not made on one machine: {before['machine']} and {after['machine']}", file=sys.stderr)
        names = chosen(only, before["cases"] | after["cases"])
        free, counts = chosen(excepted, names), Counter[str]()
        for name in names:
            cases = [goldens["cases"].get(name) for goldens in (before, after)]
            files = [_tensors_folder(file) / f"{name}.safetensors" for file in made]
            said = _case_differences(cases, files, ignored.split(","))
            verdict = "same bits" if said.same else "excepted" if name in free else "differs"
            counts[verdict] += 1
            print("  ".join([f"{name:32}", f"{verdict:9}", "; ".join(said)]).rstrip())
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return counts["differs"]


class Said(list[str]):
    """Return the report on a case."""

    same = True
    """Whether the bits are the same."""

    def differs(self, *texts: str) -> None:
        self.extend(texts)
        self.same = self.same and not texts


def _made(which: str, folder: Path, only: str, float64: bool) -> Path:
    """The goldens of a commit, of the working tree (".") or of a file, as a file."""
    if which.endswith(".json"):
        return Path(which)
    tree, out = ROOT, folder / "goldens.json"
    folder.mkdir()
    if which != ".":
        packed = subprocess.run(["git", "archive", which, "rayfl"], cwd=ROOT, check=True, capture_output=True).stdout
        tree = folder / "tree"
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(tree, filter="data")
    command = [sys.executable, __file__, "make", str(out), "--only", only] + ["--float64"] * float64
    subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(tree)}, check=True)
    return out


def _case_differences(cases: list[dict[str, Any] | None], files: list[Path], ignored: list[str]) -> Said:
    """Comparison of one case in two commits; `files` hold its tensors."""
    said = Said()
    errors = [None if case is None else case.get("error") for case in cases]
    for when, case, error in zip(("old", "new"), cases, errors, strict=True):
        if case is None or error:
            said.differs(f"{when}: {error or 'no such case'}")
    [before, after] = cases
    if before and after and not any(errors):
        tensor_differences(before["tensors"], after["tensors"], lambda: map(_load, files), said)
        metric_differences(before["lines"], after["lines"], ignored, said)
    return said


def _load(file: Path) -> Callable[[str], torch.Tensor]:
    """A tensor of a file by its name."""

    def load(name: str) -> torch.Tensor:
        with safe_open(file, "pt") as opened:
            return opened.get_tensor(name)

    return load


def tensor_differences(
    before: Mapping[str, str],
    after: Mapping[str, str],
    load: Callable[[], Iterable[Callable[[str], torch.Tensor]]],
    said: Said,
) -> None:
    """Says which tensors differ, by their digests, and by how much; which names have changed. `load` gives what loads
    an old tensor and what loads a new one."""
    gone, come = ({name: a[name] for name in a if name not in b} for a, b in ((before, after), (after, before)))
    renamed = dict(_renamed(gone, come))
    for (old, new), count in Counter((_group(a), _group(b)) for a, b in renamed.items()).items():
        said.append(f"renamed: {old or 'no group'} -> {new or 'no group'} ({count})")
    said.differs(*_listed("vanished", [name for name in gone if name not in renamed]))
    said.differs(*_listed("appeared", [name for name in come if name not in renamed.values()]))
    moved = [name for name in before if name in after and before[name] != after[name]]
    if not moved:
        return
    load_old, load_new = load()
    found = sorted(((*distance(load_old(name), load_new(name)), name) for name in moved), reverse=True)
    named = [f"{name} {text}" for *_, text, name in found[:SHOWN]] + ["..."] * (len(found) > SHOWN)
    said.differs(f"tensors: {len(moved)} of {len(before)}: {', '.join(named)}")


def _renamed(gone: Mapping[str, str], come: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Old name -> new name of tensors of one owner, with one last part and the same bits."""
    waiting = defaultdict(list)
    for name, checksum in come.items():
        waiting[_owner(name), name.rpartition("/")[2], checksum].append(name)
    for name, checksum in gone.items():
        if same := waiting[_owner(name), name.rpartition("/")[2], checksum]:
            yield name, same.pop(0)


def _owner(path: str) -> str:
    return path.partition("/")[0]


def _group(path: str) -> str:
    """Separator between the owner and the name of a tensor."""
    return "/".join(path.split("/")[1:-1])


def distance(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float, str]:
    """The largest difference, absolute and relative to the largest element, and the two as a text."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        inf = float("inf")
        return inf, inf, f"({a.dtype} {tuple(a.shape)} -> {b.dtype} {tuple(b.shape)})"
    absolute = float((a.double() - b.double()).abs().max())
    relative = absolute / (float(a.double().abs().max()) or 1.0)
    return absolute, relative, f"(absolute {absolute:.1e}, relative {relative:.1e})"


def metric_differences(before: Lines, after: Lines, ignored: list[str], said: Said) -> None:
    """Says which metrics differ, in which rounds and by how much; which have come or gone."""
    if len(before) != len(after):
        said.differs(f"metrics: {len(before)} lines -> {len(after)}")
    olds, news = (dict.fromkeys(key for line in lines for key in line) for lines in (before, after))
    said.differs(*_listed("metrics vanished", [key for key in olds if key not in (*news, *ignored)]))
    said.differs(*_listed("metrics appeared", [key for key in news if key not in (*olds, *ignored)]))
    texts = []
    for key in olds:
        pairs = [(a.get(key), b.get(key)) for a, b in zip(before, after, strict=False)]
        rounds = [r for r, (a, b) in enumerate(pairs, start=1) if a != b]
        if rounds and key in news and key not in ignored:
            a, b = max((pairs[r - 1] for r in rounds), key=_change)
            by = f", relative {change:.1e}" if (change := _change((a, b))) < float("inf") else ""
            texts.append(f"{key} in round {', '.join(map(str, rounds))} ({a} -> {b}{by})")
    if texts:
        said.differs(
            f"metrics: {len(texts)} of {len(olds)}: {', '.join(texts[:SHOWN])}" + ", ..." * (len(texts) > SHOWN)
        )


def _change(pair: tuple[Any, Any]) -> float:
    """The relative difference of two numbers; infinite where one is none."""
    a, b = pair
    if not all(isinstance(value, int | float) for value in pair):
        return float("inf")
    return abs(a - b) / (abs(a) or 1.0)


def _listed(what: str, names: list[str]) -> list[str]:
    """Return a text on these names; "" if there are none."""
    more = f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
    return [f"{what}: {', '.join(names[:SHOWN])}{more}"] * bool(names)


# values with a tolerance


def values() -> dict[str, dict[str, Any]]:
    """Method -> what version control keeps of it, or its `error`. Each type of numbers has a process of its own,
    because it is a setting of the whole process, and networks stay in memory from run to run."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        outs = {dtype: Path(temporary) / f"{dtype}.json" for dtype in ("float64", "float32")}
        command = [sys.executable, __file__, "measure"]
        started = [subprocess.Popen([*command, dtype, str(out)], cwd=temporary) for dtype, out in outs.items()]
        for process, out in zip(started, outs.values(), strict=True):
            process.wait()
            found |= json.loads(out.read_text())
    return dict(sorted(found.items()))


def measure(dtype: str, out: Path) -> None:
    """Writes the values of the methods that are run in this type of numbers."""
    torch.set_default_dtype(getattr(torch, dtype))
    found = {}
    for method, experiment in VALUES.items():
        if (method in FLOAT32) == (dtype == "float32"):
            try:
                lines, tensors = result_of(experiment)
            except Exception:
                found[method] = {"error": traceback.format_exc()}
            else:
                found[method] = {"dtype": dtype, "metrics": metric_values(lines), "groups": group_values(tensors)}
    out.write_text(json.dumps(found))


def metric_values(lines: Lines) -> dict[str, float]:
    """The training loss of every round, and what the last evaluation found."""
    losses = {f"train_loss in round {line['round']}": line["train_loss"] for line in lines}
    return losses | {key: lines[-1][key] for key in EVALUATED if key in lines[-1]}


def group_values(tensors: Tensors) -> dict[str, list[float]]:
    """Group -> the sum and the sum of squares of all its elements, those of all clients' in one."""
    sums: dict[str, list[float]] = {}
    for path, t in tensors.items():
        owner, group = _owner(path).partition(" ")[0], _group(path)
        total = sums.setdefault(f"{owner}/{group}" if group else owner, [0.0, 0.0])
        total[0] += float(t.double().sum())
        total[1] += float(t.double().square().sum())
    return sums


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    cases = argparse.ArgumentParser(add_help=False)
    cases.add_argument("--only", default="*")
    cases.add_argument("--float64", action="store_true")
    command = commands.add_parser("make", parents=[cases])
    command.add_argument("out", type=Path)
    command = commands.add_parser("compare", parents=[cases])
    command.add_argument("old")
    command.add_argument("new")
    command.add_argument("--except", dest="excepted", default="")
    command.add_argument("--ignore", dest="ignored", default="")
    commands.add_parser("values")
    command = commands.add_parser("measure")
    command.add_argument("dtype")
    command.add_argument("out", type=Path)
    given = vars(parser.parse_args(arguments))
    torch.set_num_threads(1)  # part of the bits
    match given.pop("command"):
        case "make":
            make(**given)
        case "compare":
            return int(compare(**given) > 0)
        case "values":
            found = values()
            if errors := [f"{method}: {value['error']}" for method, value in found.items() if "error" in value]:
                print(*errors, sep="\n", file=sys.stderr)
                return 1
            KEPT.write_text(json.dumps(found, indent=1) + "\n")
        case "measure":
            measure(**given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
