"""Tables of studies in README files: made from CSV files, which come from finished sweeps."""

import csv
import re
import shutil
import statistics
from pathlib import Path

import pytest
from rows import folder, study

from rayfl.results.files import write_json
from rayfl.results.findings import found_in
from rayfl.results.folder import RunFolder
from rayfl.results.published import Published, in_config
from rayfl.results.tables import Table, table

ROOT = Path.cwd()


@pytest.fixture
def tables(script):
    return script("tables")


@pytest.fixture
def root(tables, tmp_path):
    """A copy of the README files and tables."""
    shutil.copytree(ROOT / "tune_configs/results", tmp_path / "tune_configs/results")
    for name in tables.READMES:
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


# the repository's


def test_every_table_is_up_to_date(tables, capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


def test_no_results_are_typed_by_hand(tables):
    pages = [Path(name) for name in tables.READMES] + sorted(Path("tune_configs/results").glob("*.md"))
    assert re.findall(r"^\|.*\d ± \d.*", "".join(tables.BLOCK.sub("", page.read_text()) for page in pages), re.M) == []


def test_a_part_of_a_table_has_its_columns_and_rows(tables, root):
    results = tables.Results(root)
    part = results.markdown("quickstart", "method; @1", "HeteroFL; FIARSE").splitlines()
    assert [line.split(" | ")[0] for line in part] == ["| method", "| ---", "| HeteroFL", "| FIARSE"]
    assert part[3] == "| FIARSE | **96.38 ± 0.00** |"
    with pytest.raises(tables.ConfigError, match="no row is called 'Hetero'"):
        results.markdown("quickstart", None, "Hetero")
    with pytest.raises(tables.ConfigError, match="no column is called '@2'"):
        results.markdown("quickstart", "@2")


# a sweep's


@pytest.fixture
def sweep(tmp_path):
    """A sweep of two rows whose best learning rate is the smaller one."""
    return study(tmp_path / "runs/mine", rates=(0.1, 0.4), clock={"heterofl": 1.0, "fjord": 2.0})


def test_a_sweeps_table_is_its_own_table(tables, root, sweep, capsys):
    assert tables.main(["add", str(sweep.path)], root) == 0
    assert "mine: no README file shows the table" in capsys.readouterr().out
    found = found_in(sweep.path)
    own = table(found.best, found.judge, found.tuned)
    assert tables.Results(root).markdown("mine") == Table(own.header, own.rows, own.marks).markdown()
    assert "0.1 (1 of 2) ↓" in own.markdown() and " ± " in own.markdown() and "| **" in own.markdown()
    # full precision
    values = {row["seed"]: 100 * row["accuracy_mean"] for row in found.best if row["label"] == "heterofl"}
    lines = (root / "tune_configs/results/mine.csv").read_text().splitlines()
    [line] = [line for line in csv.DictReader(lines) if line["method"] == "Heterofl"]
    assert float(line["accuracy %"]) == statistics.fmean(values.values())
    assert line["accuracy % values"].split() == [f"{values[seed]:.6g}" for seed in (0, 1, 2)]


def test_facts_come_from_the_sweeps_record(tables, root, sweep):
    sweep.seconds = 5400
    command = {"command": "sweep.py sweep a.yaml --set 'partition={name: iid}' --output /tmp/b --resume --name c"}
    sweep.made = (sweep.made[0].model_copy(update=command),)
    sweep.made += (sweep.made[0].model_copy(update={"rayfl_commit": "abc", "gpus": ("H100",)}),)
    sweep.finish("finished")
    tables.main(["add", str(sweep.path), "--name", "other"], root)
    entry, made = tables.Results(root).studies["other"], sweep.made[0]
    typed = "rayfl sweep a.yaml --set 'partition={name: iid}' --name c"
    assert (entry.hours, entry.command, entry.rayfl) == (1.5, typed, made.versions["rayfl"])
    assert entry.commit == f"{made.rayfl_commit}; abc"
    machine = f"{made.cores} cores of {made.cpu}"
    assert entry.machine == f"{machine}; {machine}, H100"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", entry.date)
    # of a folder without recorded hours
    sweep.seconds = 0
    sweep.finish("finished")
    tables.main(["add", str(sweep.path), "--name", "other"], root)
    assert tables.Results(root).studies["other"].hours == "not recorded"


def test_chosen_columns_and_further_results(tables, root, sweep):
    columns = "method,accuracy %,test loss=loss_mean,train_flops,MACs=client_macs"
    assert tables.main(["add", str(sweep.path), "--columns", columns], root) == 0
    header, _, first, _ = tables.Results(root).markdown("mine").splitlines()
    assert header == "| method | accuracy % | test loss | train_flops | MACs |"
    assert first.startswith("| Heterofl | **") and first.endswith(" | 3 M | 375 k |")
    assert re.search(r"\| 0\.\d+ ± 0\.\d+ \|", first)
    # all columns of the sweep's table stay in the file
    assert ",down," in (root / "tune_configs/results/mine.csv").read_text()


def test_published_numbers_beside_ours(tables, root, sweep):
    published = Published(source="Table 1", numbers={"accuracy_mean": {"heterofl": 90.0, "fedavg": 95.0}})
    write_json(sweep.path / "config.json", sweep.config | {"published": in_config(published, [])})
    assert tables.main(["add", str(sweep.path), "--columns", "method,published %,accuracy %,points"], root) == 0
    *_, first, second = tables.Results(root).markdown("mine").strip().splitlines()
    assert first == "| Heterofl | 90.00 | **91.28 ± 0.60** | +1.28 |"
    assert second.startswith("| Fjord | – | ") and second.endswith(" | – |")


def test_a_published_loss_is_not_in_per_cent(tables, root, sweep):
    published = Published(source="Table 1", numbers={"loss_mean": {"heterofl": 0.5}})
    write_json(sweep.path / "config.json", sweep.config | {"published": in_config(published, [])})
    assert tables.main(["add", str(sweep.path), "--columns", "method,published,difference"], root) == 0
    ours = statistics.fmean(row["loss_mean"] for row in found_in(sweep.path).best if row["label"] == "heterofl")
    first = tables.Results(root).markdown("mine").strip().splitlines()[-2]
    assert first == f"| Heterofl | 0.5 | {ours - 0.5:+.2f} |"


def test_a_title_of_the_sweeps_table_for_another_result(tables, root, sweep):
    tables.main(["add", str(sweep.path), "--columns", "method,accuracy %=best_round"], root)
    assert tables.Results(root).markdown("mine").splitlines()[2] == "| Heterofl | 3 ± 0 |"


def test_a_standard_deviation_has_no_sign(tables):
    assert tables._cell({"gap": "2", "gap std": "0.51"}, "gap", "+.1f", "here") == "+2.0 ± 0.5"


def test_times_that_some_seeds_did_not_reach(tables, root, sweep):
    for run in (RunFolder.open(path.parent) for path in sweep.path.glob("trials/*/run.json")):
        run.facts = run.facts.model_copy(update={"targets": (0.88,)})
        run.finish("finished")
    tables.main(["add", str(sweep.path)], root)
    lines = tables.Results(root).markdown("mine").splitlines()
    at = lines[0].split(" | ").index("to 88 %")
    assert [line.split(" | ")[at] for line in lines[2:]] == ["1.0 s", "5.0 s (2 of 3)"]


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["--columns", "method,acuracy %"], "--columns: no column or result is called 'acuracy %'. Did you mean 'acc"),
        (["--columns", "x=acuracy_mean"], "no column or result is called 'acuracy_mean'. Did you mean 'accuracy_mean'"),
    ],
)
def test_unknown_columns_are_refused(tables, root, sweep, arguments, error, capsys):
    before = sorted((root / "tune_configs/results").iterdir())
    assert tables.main(["add", str(sweep.path), *arguments], root) == 2
    assert error in capsys.readouterr().err
    assert sorted((root / "tune_configs/results").iterdir()) == before


def test_unfinished_and_missing_sweeps_are_refused(tables, root, tmp_path, capsys):
    run = folder(tmp_path / "run", status="stopped")
    assert tables.main(["add", str(run.path)], root) == 2
    assert "the status is stopped. Allowed: finished" in capsys.readouterr().err
    assert tables.main(["add", str(tmp_path / "none")], root) == 2
    assert "contains no run" in capsys.readouterr().err


# writing and checking


def test_stale_tables_are_reported_and_written_again(tables, root, capsys):
    readme = root / "README.md"
    right = readme.read_text()
    edit(readme, "**92.43 ± 0.07**", "**99.43 ± 0.07**")
    assert tables.main(["--check"], root) == 1
    assert f"{readme}: a table is not up to date. Hint: python scripts/tables.py" in capsys.readouterr().out
    assert "99.43" in readme.read_text()
    assert tables.main([], root) == 0 and readme.read_text() == right
    edit(root / "tune_configs/results/quickstart.csv", "92.43", "91.50")
    assert tables.main(["--check"], root) == 1
    assert tables.main([], root) == 0 and "| FIARSE | **91.50 ± 0.07** |" in readme.read_text()


def test_a_table_without_its_place_or_end_is_reported(tables, root, capsys):
    for page in ("README.md", "tune_configs/results/quickstart.md"):
        edit(root / page, "<!-- end -->\n", "")
    (root / "tune_configs/results/mine.csv").write_text("method\n")
    assert tables.main(["--check"], root) == 1
    shown = capsys.readouterr().out
    assert "quickstart: no README file shows the table" in shown and "mine: no README file" in shown


@pytest.mark.parametrize(
    "file, old, new, error",
    [
        ("README.md", "table: quickstart", "table: quickstar", "no table is called 'quickstar'. Did you mean 'quick"),
        ("tune_configs/results/index.yaml", "lr: .3g", "rate: .3g", "no column of the CSV file is called 'rate'"),
        ("tune_configs/results/index.yaml", "method: text", "method: .2f", "'FIARSE' does not fit the form '.2f'"),
        (
            "tune_configs/results/index.yaml",
            "seeds: text",
            "seeds: bites",
            "'2' does not fit the form 'bites'. Allowed",
        ),
        (
            "tune_configs/results/index.yaml",
            "  date: ",
            "  day: ",
            "quickstart.day: unknown key 'day'. Allowed: columns",
        ),
    ],
)
def test_errors_name_the_place(tables, root, file, old, new, error, capsys):
    edit(root / file, old, new)
    assert tables.main(["--check"], root) == 2
    assert error in capsys.readouterr().err
