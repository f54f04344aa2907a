"""Write instructions with exact answers: seven tasks on letters and small numbers.

    python scripts/instruction_tasks.py FOLDER

`train.jsonl` and `test.jsonl` of the folder have lines with prompt, response and task, for `data: instructions`. No
prompt occurs twice, so that no test prompt is a training prompt.
"""

import argparse
import json
import random
import string
from collections.abc import Iterator
from pathlib import Path

TASKS = {
    "copy": ("Copy the letters", "again"),
    "reverse": ("Reverse the letters", "backwards"),
    "sort": ("Sort the letters", "in order"),
    "upper": ("Write the letters in upper case", "large"),
    "count": ("Count the letters", "how many"),
    "add": ("Add the numbers", "sum"),
    "continue": ("Continue the pattern", "and so on"),
}
"""Task -> its instruction, and its name in pre-training."""


def sample(task: str, draw: random.Random) -> tuple[str, str]:
    """Return the input of a task and its answer."""
    if task == "add":
        a, b = draw.randrange(30), draw.randrange(30)
        return f"{a} + {b}", str(a + b)
    if task == "continue":
        period = draw.sample(string.ascii_lowercase, draw.randint(2, 3))
        shown = draw.randint(len(period) + 1, 7)
        whole = period * 4
        return " ".join(whole[:shown]), " ".join(whole[shown : shown + 3])
    letters = draw.choices(string.ascii_lowercase, k=draw.randint(3, 6))
    answer = {
        "copy": letters,
        "reverse": letters[::-1],
        "sort": sorted(letters),
        "upper": [letter.upper() for letter in letters],
        "count": [str(len(letters))],
    }[task]
    return " ".join(letters), " ".join(answer)


def rows(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Yield `count` rows, of the tasks in turn, with different prompts."""
    draw, known = random.Random(seed), set[str]()
    while len(known) < count:
        task = list(TASKS)[len(known) % len(TASKS)]
        given, answer = sample(task, draw)
        prompt = f"{TASKS[task][0]}: {given}"
        if prompt not in known:
            known.add(prompt)
            yield {"prompt": prompt, "response": answer, "task": task}


def write(folder: Path, train: int, test: int, seed: int) -> None:
    """Write both files into a folder."""
    lines = [json.dumps(row) + "\n" for row in rows(train + test, seed)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(lines[test:]), encoding="utf-8")
    (folder / "test.jsonl").write_text("".join(lines[:test]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=3500, help="training rows (default: 3500)")
    parser.add_argument("--test", type=int, default=350, help="test rows")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.train + given.test > 900 * len(TASKS):
        parser.error(f"--train and --test: too many rows. Allowed: {900 * len(TASKS):,} together")
    write(given.folder, given.train, given.test, given.seed)
    print(f"{given.folder}: {given.train} training rows, {given.test} test rows")


if __name__ == "__main__":
    main()
