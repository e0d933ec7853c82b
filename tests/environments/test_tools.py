"""Tools in tags: what is read of a turn, what is answered, and how a call that fails is told."""

import json
from contextlib import closing

import pytest

from rlvr_cli.environments.calculator import calculate
from rlvr_cli.environments.open import EnvironmentSpec, check_environment, load_environment
from rlvr_cli.environments.pool import EnvironmentPool
from rlvr_cli.environments.python import run_python
from rlvr_cli.environments.tools import ToolError
from rlvr_cli.errors import RlvrError
from rlvr_cli.types import Example

QUESTION = Example("q", "What is 47*83?", "3901")
MINE = """
def search(query: str) -> str:
    return f"nothing about {query}"

def add(a: int, b: int = 1):
    return a + b

def fails(text):
    return 1 / 0

def fails_oddly(text):
    raise type("Odd", (Exception,), {"__str__": lambda error: 1 / 0})
"""


def answer(turn, *, name="calculator", tools=()):
    environment = load_environment(EnvironmentSpec(name, tuple(tools)))()
    assert environment.begin(QUESTION, 0) is None
    return environment.answer(turn)


@pytest.mark.parametrize(
    ("expression", "value"), [("47*83", "3901"), (" (1 + 2) * 3 ", "9"), ("7/2", "7/2"), ("6/2", "3"), ("2-5", "-3")]
)
def test_the_calculator_is_exact(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize("expression", ["", "1/0", "2**9", "__import__('os')", "9" * 13, "(" * 5000, "1+" * 300 + "1"])
def test_what_is_no_arithmetic_is_refused(expression):
    with pytest.raises(ToolError):
        calculate(expression)


def test_the_last_call_before_the_closing_tag_is_answered():
    reply = answer("<calc>1+1</calc> no: <calc>2 <calc>47*83</calc>")
    assert (reply.text, reply.role, reply.error, reply.done) == ("<out>3901</out>", "calc", None, False)


def test_a_failed_call_is_told_to_the_policy_and_counted():
    reply = answer("<calc>six</calc>")
    assert reply.text == f"<out>{reply.error}</out>"
    assert reply.error.startswith("error: this is no arithmetic")
    assert answer("1+1</calc>").error == "error: there is no <calc> before </calc>"


def test_tools_of_a_user_beside_a_built_in_one(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    tools = [f"{tmp_path}/mine.py:{name}" for name in ("search", "add", "fails", "fails_oddly")]
    assert answer("<search>cats</search>", tools=tools).text == "<out>nothing about cats</out>"
    assert answer('<add>{"a": 2}</add>', tools=tools).text == "<out>3</out>"
    assert answer("<calc>2*3</calc>", tools=tools).text == "<out>6</out>"
    assert answer("<fails>x</fails>", tools=tools).error == "error: ZeroDivisionError: division by zero"
    assert answer("<fails_oddly>x</fails_oddly>", tools=tools).error == "error: Odd: its text cannot be read"
    assert answer("<add>2, 3</add>", tools=tools).error.startswith(
        'error: the call is not JSON such as {"a": ..., "b": ...}'
    )
    assert (
        answer("<add>3</add>", tools=tools).error == 'error: the call is not a JSON object such as {"a": ..., "b": ...}'
    )


@pytest.mark.parametrize(
    ("signature", "argument"),
    [
        ("*, x: str", "1 2"),
        ("*x", "1 2"),
        ("x, /", "1 2"),
        ("**x", '{"y": "1 2"}'),
        ("x, y='2', /", '{"x": "1"}'),
        ("x='1', y='1', /, *, z=''", '{"y": "2"}'),
    ],
)
def test_a_tool_is_called_however_it_takes_its_arguments(tmp_path, signature, argument):
    (tmp_path / "mine.py").write_text(f"def look({signature}): return locals()\n")
    reply = answer(f"<look>{argument}</look>", tools=[f"{tmp_path}/mine.py:look"])
    assert reply.error is None
    assert "1" in reply.text
    assert "2" in reply.text


def test_tools_are_not_asked_again_what_they_have_answered(tmp_path):
    (tmp_path / "mine.py").write_text("asked = []\ndef count(text): asked.append(text); return len(asked)\n")
    with closing(EnvironmentPool(EnvironmentSpec("", (f"{tmp_path}/mine.py:count",)), workers=1)) as pool:
        reply = pool.answer(Example("q", "", ""), 7, ["<count>a</count>", "<count>b</count>"]).result().reply
    assert reply.text == "<out>1</out>"


def test_memory_that_earlier_calls_have_filled_costs_a_process_and_no_call(tmp_path):
    (tmp_path / "mine.py").write_text(
        "kept = []\ndef keep(gib):\n    mine = []\n    def grow():\n        mine.append(bytes(1 << 28))\n        grow()\n"
        "    if gib == 'all':\n        grow()\n"
        "    kept.append(bytes(int(gib) << 30))\n    return len(kept)\n"
    )
    spec = EnvironmentSpec("", (f"{tmp_path}/mine.py:keep",))
    with closing(EnvironmentPool(spec, workers=1, memory_gb=2)) as pool:
        asked = enumerate((9, "all", 1, 1))
        calls = [pool.answer(QUESTION, seed, [f"<keep>{gib}</keep>"]).result() for seed, gib in asked]
    error = "<out>error: MemoryError: </out>"  # of what no process has room for, at once or piece by piece
    assert [call.reply and call.reply.text for call in calls] == [error, error, "<out>1</out>", "<out>1</out>"]


def test_a_program_sees_nothing_of_the_one_before():
    assert run_python("x = 47 * 83\nprint(x)") == "3901"
    with pytest.raises(ToolError, match="NameError"):
        run_python("print('begun')\nprint(x)")


@pytest.mark.parametrize(
    "program",
    [
        "def main(): print(7)\nif __name__ == '__main__': main()",
        "import sys\nprint(7)\nsys.exit(0)",
        "print(7)\nexit()",
        "import pickle\nclass A: x = 7\nprint(pickle.loads(pickle.dumps(A())).x)",
        "import atexit\natexit.register(print, 7)",
        "out = open(1, 'w')\nout.write('7')",
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print(7))).start()",
    ],
)
def test_a_program_runs_as_a_script(program):
    assert run_python(program) == "7"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys\nprint(7)\nsys.exit(3)", "7\nSystemExit: 3 (line 3)"),
        ("import sys\nsys.exit('no root')", "SystemExit: no root (line 2)"),
        ("import atexit\natexit.register(print, 7)\n1 / 0", "7\nZeroDivisionError: division by zero (line 3)"),
    ],
)
def test_a_program_that_exits_with_an_error_has_failed(program, said):
    with pytest.raises(ToolError) as failed:
        run_python(program)
    assert str(failed.value) == said


def test_a_program_that_prints_much_is_cut_and_says_so():
    assert run_python("print('x' * 10_000 + 'end')") == f"[cut: {10_004 - 4_096:,} bytes]\n{'x' * 4_092}end"
    assert run_python("import sys\nsys.stdout.buffer.write(b'\\xff\\xfe!')") == "\ufffd\ufffd!"
    assert run_python("") == ""


def test_a_program_that_fails_is_told_with_what_it_printed():
    with pytest.raises(ToolError, match=r"^7\n.*ZeroDivisionError"):
        run_python("print(7)\n1 / 0")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (EnvironmentSpec("calculater"), "There is no environment calculater."),
        (EnvironmentSpec("nowhere.py:Guess"), "There is no environment file nowhere.py."),
        (EnvironmentSpec("", ("nowhere.py:f",)), "There is no tool file nowhere.py."),
        (EnvironmentSpec("", (f"{__file__}:answer", f"{__file__}:answer")), "Several tools are called answer."),
    ],
)
def test_what_does_not_exist_is_said(spec, problem):
    with pytest.raises(RlvrError) as error:
        check_environment(spec)
    assert error.value.problem == problem


def test_a_tool_that_would_have_to_be_awaited_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("async def look(query: str):\n    return query\n")
    with pytest.raises(RlvrError, match=r"mine.py:1: the tool look is async, and it is called without await\."):
        check_environment(EnvironmentSpec("", (f"{tmp_path}/mine.py:look",)))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("look", "mine.py:2: the tool look is a generator, and its result is taken as a whole."),
        ("policy", "mine.py: a tool cannot be called policy: turns of that name are the policy's own."),
    ],
)
@pytest.mark.parametrize("chat", [False, True])
def test_a_tool_that_cannot_be_is_refused(tmp_path, name, problem, chat):
    (tmp_path / "mine.py").write_text("def policy(query): return query\ndef look(query):\n    yield query\n")
    with pytest.raises(RlvrError) as error:
        load_environment(EnvironmentSpec("", (f"{tmp_path}/mine.py:{name}",), chat))
    assert error.value.problem == f"{tmp_path}/{problem}"


def test_a_tool_with_the_name_of_a_built_in_one_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def calc(expression): return 7\n")
    with pytest.raises(RlvrError, match=r"Several tools are called calc, one of them by --environment calculator\."):
        check_environment(EnvironmentSpec("calculator", (f"{tmp_path}/mine.py:calc",)))


@pytest.mark.parametrize("options", ["size=9", "path=a.py"])
def test_a_family_of_reasoning_gym_is_a_dataset(options):
    with pytest.raises(RlvrError, match=rf"Write --dataset reasoning-gym:gcd,{options} in place of --environment\."):
        check_environment(EnvironmentSpec(f"reasoning-gym:gcd,{options}"))


def test_an_environment_of_a_package_whose_arguments_name_a_file_is_no_file():
    spec = EnvironmentSpec("verifiers:a,path=b.py", chat=True)
    assert (spec.is_file, spec.files, spec.calls) == (False, (), True)


def test_the_facts_change_with_the_file(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    spec = EnvironmentSpec("calculator", (f"{tmp_path}/mine.py:add",))
    before = spec.facts
    assert before["environment"]["name"] == f"calculator {tmp_path}/mine.py:add"
    (tmp_path / "mine.py").write_text(MINE + "\n")
    assert json.dumps(spec.facts) != json.dumps(before)
    assert EnvironmentSpec("").facts == {}


@pytest.mark.parametrize("name", ["rub.py", "rub/__init__.py", "rub/parts/words.py"])
def test_the_facts_change_with_the_module_of_a_packages_environment(tmp_path, monkeypatch, name):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / name.replace("rub", "my_rub")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("raise SystemExit")  # nothing is imported
    spec = EnvironmentSpec("verifiers:me/my-rub,path=x.py", chat=True)
    before = spec.facts["environment"]
    assert before["files"] == [str(file.relative_to(tmp_path))]
    file.write_text("raise SystemExit(1)")
    assert spec.facts["environment"]["sha256"] != before["sha256"]
    assert "files" not in EnvironmentSpec("verifiers:no-such-thing").facts["environment"]
