"""The command line `python -m minidl.learn`: list the exercises, copy one into the working folder, grade it."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from minidl.errors import EXPECTED, ConfigError, explained, nearest, report
from minidl.learn.grading import grade

HERE = Path(__file__).parent
NUMBERS = (1, 2, 3)
LESSONS = {  # lesson: its page in the repository
    "matmul": "kernels/matmul/README.md",
    "softmax": "kernels/softmax/README.md",
    "optim": "kernels/optim/README.md",
    "conv": "kernels/conv/README.md",
    "mix": "kernels/mix/README.md",
    "decentralised": "docs/decentralised.md",
    "elastic": "docs/elastic.md",
}
USAGE = """\
usage: python -m minidl.learn                  list the exercises, and which of those in this folder are solved
       python -m minidl.learn LESSON           list the exercises of one lesson
       python -m minidl.learn LESSON NUMBER    copy an exercise into this folder; once it is there, grade it

Files of these names are executed. The exit code is 0 if yours is a solution, 1 if it is not or was only copied, and 2
for an error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: see USAGE; 130 if interrupted."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        if {"-h", "--help"} & set(words):
            print(USAGE)
        elif len(words) < 2:
            _list(words and _lesson(words[0]))
        else:
            return _exercise(_lesson(words[0]), _number(words[1:]))
    except KeyboardInterrupt:
        return 130
    except EXPECTED as error:
        return report(explained(error, "close other programs"))
    return 0


def title(lesson: str, number: int) -> str:
    """Return what an exercise is about: the rest of the first line of its docstring, after "Conv 2: "."""
    source = (HERE / "exercises" / f"{lesson}_{number}.py").read_text(encoding="utf-8")
    first = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return first.partition(": ")[2].rstrip(".")


def _lesson(word: str) -> list[str]:
    if word not in LESSONS:
        raise ConfigError(f"unknown lesson {word[:100]!r}: expected one of {', '.join(LESSONS)}."
                          f"{nearest(word, list(LESSONS))}")  # fmt: skip
    return [word]


def _number(words: list[str]) -> int:
    if len(words) > 1 or words[0] not in map(str, NUMBERS):
        raise ConfigError(f"unknown exercise {' '.join(words)[:100]!r}: expected one of {', '.join(map(str, NUMBERS))}")
    return int(words[0])


def _list(lessons: list[str]) -> None:
    """Print the exercises of some lessons, or of all. Those that are in the working folder are graded."""
    for lesson in lessons or LESSONS:
        print(f"{lesson}: {LESSONS[lesson]}")
        for number in NUMBERS:
            path = Path(f"{lesson}_{number}.py")
            with contextlib.redirect_stdout(io.StringIO()):  # a file may print
                state = "" if not path.is_file() else "begun" if grade(path, lesson, number) else "solved"
            print(f"  {number}  {title(lesson, number):<60}{state}".rstrip())
    print("\nTo begin one, or to have it graded: python -m minidl.learn matmul 1")


def _exercise(lesson: list[str], number: int) -> int:
    """Copy an exercise into the working folder, or grade the file that is there. Returns 0 if it is a solution."""
    name = f"{lesson[0]}_{number}"
    path, command = Path(f"{name}.py"), f"python -m minidl.learn {lesson[0]} {number}"
    if not os.path.lexists(path):
        _copy(HERE / "exercises" / path, path)
        print(f"{path} is an exercise for {LESSONS[lesson[0]]}. Its first lines state the task.\n"
              f"Fill the hole, then run {command} again.")  # fmt: skip
        return 1
    if not path.is_file():
        raise ConfigError(f"{path} is no file; expected your answer, or nothing: move it away and start again")
    reasons = grade(path, lesson[0], number)
    if reasons:
        print(f"{lesson[0]} {number} is not solved yet:", *(f"  {line}" for line in reasons), sep="\n")
        return 1
    print(f"{lesson[0]} {number} is solved. Compare it with {HERE / 'solutions' / path}")
    return 0


def _copy(source: Path, path: Path) -> None:
    """Copy a file, and leave nothing if the disk is full. Raises FileExistsError if `path` exists."""
    text = source.read_bytes()
    with open(path, "xb") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            path.unlink()
            raise


if __name__ == "__main__":
    sys.exit(main())
