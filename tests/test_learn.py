"""`python -m minidl.learn`: each hole fails, each solution passes, and a wrong answer gets a line that tells why."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from quick import quick

from minidl.learn import __main__ as learn

EXERCISES = [(lesson, number) for lesson in learn.LESSONS for number in learn.NUMBERS]
WRONG = {  # exercise: the part of its solution that is replaced, and the mistake
    "matmul_1": ("part = np.float32(0)", "total, part = np.float32(0), total"),  # one piece: other bits
    "matmul_2": ("if n < columns", "if n + 1 < columns"),
    "matmul_3": ("range(0, rows, MR)", "range(0, rows, 1)"),
    "softmax_1": ("x - x.max(axis=1, keepdims=True)", "x"),
    "softmax_2": (" / rows", ""),
    "softmax_3": ("            total *= math.exp(largest - value)\n", ""),
    "optim_1": ("momentum * velocity[i] + grad[i]", "momentum * (velocity[i] + grad[i])"),
    "optim_2": ("+ grad[i]", "+ grad[i] + weight_decay[s] * theta[i]"),
    "optim_3": ("beta2**step", "beta2"),
    "conv_1": ("if 0 <= at < x.size", "if at < x.size"),
    "conv_2": ("= x[h, w]", "= x[h, w][::-1]"),
    "conv_3": ("remainder == 0 and ", ""),
    "mix_1": ("(other[i] - here)", "(other[i] - theta[i])"),
    "mix_2": ("p * lines // parts * LINE", "p * size // parts"),
    "mix_3": ("(here - there)\n        x[i] = here - d", "(here - there)\n        there += d\n        x[i] = here - d"),
    "decentralised_1": ("max(", "min("),
    "decentralised_2": ("w @ stepped", "w.T @ stepped"),
    "decentralised_3": ("return x, w", "return x / 2, w / 2"),
    "elastic_1": ("- d, c + d.sum(axis=0)", "- d, c + (x - eta * g - d - c).sum(axis=0) * eta * rho"),
    "elastic_2": ("1 - replicas * a", "1 - a"),
    "elastic_3": ("d = a * (x[i] - c)", "d = a * (x[i] - eta * g[i] - c)"),
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def answer(name: str, old: str = "", new: str = "") -> None:
    """Write a solution into the working folder, with a part of it replaced."""
    text = (learn.HERE / "solutions" / f"{name}.py").read_text()
    assert old in text
    Path(f"{name}.py").write_text(text.replace(old, new) if old else text)


def result(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    """Return the exit code and the lines of a command."""
    code = learn.main(words)
    printed = capsys.readouterr()
    return code, (printed.out or printed.err).splitlines()


@pytest.mark.parametrize(("lesson", "number"), EXERCISES)
def test_a_hole_fails_and_a_solution_passes(lesson: str, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{lesson}_{number}"
    code, lines = result(capsys, lesson, str(number))
    assert code == 1 and lines[0].startswith(f"{name}.py is an exercise for ")
    hole = Path(f"{name}.py").read_text().splitlines()
    at = [i for i, line in enumerate(hole, 1) if "# HOLE" in line]
    assert len(at) == 1
    code, lines = result(capsys, lesson, str(number))
    expected = f"  {name}.py, line {at[0]}: the hole is still there: replace this line by your code"
    assert (code, lines) == (1, [f"{lesson} {number} is not solved yet:", expected])
    answer(name)
    code, lines = result(capsys, lesson, str(number))
    assert code == 0 and lines[0].startswith(f"{lesson} {number} is solved.")


@pytest.mark.parametrize(("lesson", "number"), quick(EXERCISES, *EXERCISES[1::3]))
def test_a_mistake_is_explained(lesson: str, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    answer(f"{lesson}_{number}", *WRONG[f"{lesson}_{number}"])
    code, lines = result(capsys, lesson, str(number))
    assert code == 1 and lines[0] == f"{lesson} {number} is not solved yet:"
    assert [line.split()[0] for line in lines[1:]] == ["for", "expected", "got"]
    assert lines[2].split()[1:] != lines[3].split()[1:] and max(map(len, lines)) <= 120


@pytest.mark.parametrize(("lesson", "number"), EXERCISES)
def test_an_exercise_and_its_solution_belong_together(lesson: str, number: int, root: Path) -> None:
    """Their signatures are equal, the exercise names a lesson that exists, and the lesson names the exercises."""
    files = [learn.HERE / kind / f"{lesson}_{number}.py" for kind in ("exercises", "solutions")]
    trees = [ast.parse(file.read_text()) for file in files]
    first, second = (
        {node.name: ast.unparse(node.args) for node in tree.body if isinstance(node, ast.FunctionDef)}
        for tree in trees
    )  # fmt: skip
    assert first == second
    text = ast.get_docstring(trees[0]) or ""
    head = f"{lesson.capitalize()} {number}: {learn.title(lesson, number)}."
    assert text.startswith(head + "\n") and "\nRead: " in text and "\nHint: " in text
    assert ("About ten minutes" in text) == (number == 1)
    assert ast.get_docstring(trees[1]) == head[:-1] + ": a solution."
    for page in re.findall(r"(?:kernels|comm|docs)/[\w/.]+\.(?:md|py)", text):
        assert (root / page).exists(), page
    assert f"python -m minidl.learn {lesson} 1" in (root / learn.LESSONS[lesson]).read_text()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def softmax(x):\n    return x +\n", "softmax_1.py, line 2: SyntaxError: invalid syntax"),
        ("def softmax(x):\n    return x.maximum()\n", "softmax_1.py, line 2: AttributeError: "),
        ("def softmax():\n    pass\n", "softmax_1.py: TypeError: softmax() takes 0 positional arguments"),
        ("def sofmax(x):\n    return x\n", "softmax_1.py: AttributeError: "),
        ("raise SystemExit('a\\n\\x1b[1mb')", "softmax_1.py, line 1: SystemExit: a \\x1b[1mb"),
        ("\0", "softmax_1.py, line 1: SyntaxError: source code string cannot contain null bytes"),
        ("def softmax(x):\n    return softmax(x)\n", "softmax_1.py, line 2: RecursionError: "),
        ("import no_such_module", "softmax_1.py, line 1: ModuleNotFoundError: "),
    ],
)
def test_an_exception_is_one_line(text: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("softmax_1.py").write_text(text)
    code, lines = result(capsys, "softmax", "1")
    assert code == 1 and len(lines) == 2 and lines[1].startswith("  " + expected), lines


@pytest.mark.parametrize("value", ["None", "'text'", "x[0]", "[1, [2]]", "x * float('nan')", "object()"])
def test_a_result_of_another_kind_is_explained(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("softmax_1.py").write_text(f"def softmax(x):\n    return {value}\n")
    code, lines = result(capsys, "softmax", "1")
    assert code == 1 and len(lines) == 4 and lines[2].startswith("  expected  the result"), lines


def test_the_list_shows_what_is_solved(capsys: pytest.CaptureFixture[str]) -> None:
    answer("matmul_1")
    Path("matmul_2.py").write_text("print('noise')\nraise ValueError")
    code, lines = result(capsys)
    states = [line.split()[-1] for line in lines if re.match(r"  \d  ", line)]
    assert code == 0 and len(states) == len(EXERCISES) and "noise" not in lines
    assert states[:2] == ["solved", "begun"] and not {"solved", "begun"} & set(states[2:])
    code, some = result(capsys, "optim")
    assert code == 0 and len(some) == 6 and set(some) < set(lines)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["matmull"], "Did you mean 'matmul'?"),
        (["matmull", "1"], "unknown lesson 'matmull'"),
        (["matmul", "4"], "unknown exercise '4': expected one of 1, 2, 3"),
        (["matmul", "1", "2"], "unknown exercise '1 2'"),
        (["matmul", "-1"], "unknown exercise '-1'"),
        (["matmul", "3"], "matmul_3.py is no file"),
        (["--solve"], "unknown lesson '--solve'"),
    ],
)
def test_bad_command_lines(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("matmul_3.py").mkdir()
    code, lines = result(capsys, *words)
    assert code == 2 and len(lines) == 1 and lines[0].startswith("minidl: error: ") and expected in lines[0]


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = result(capsys, "matmul", "--help")
    assert code == 0 and lines == learn.USAGE.splitlines()


def test_an_answer_is_never_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    Path("matmul_1.py").symlink_to("elsewhere.py")  # which does not exist
    assert result(capsys, "matmul", "1")[0] == 2 and not Path("elsewhere.py").exists()
    Path("matmul_1.py").unlink()
    Path("matmul_1.py").write_text("mine")
    result(capsys, "matmul", "1")
    assert Path("matmul_1.py").read_text() == "mine"
