"""The grader of code: what counts as the program, both forms of tests, each failure kind, and programs that want the reward without the work."""

import json
import tracemalloc
from pathlib import Path

import pytest

from marks import slow
from rlvr_cli.graders import has_unknown_answer, pool, reference_response, resolve_grader
from rlvr_cli.graders.answers.extraction import last_code_block, without_thinking
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.graders.python import AssertTests, ScriptTests, _answer_bytes, grade, program_of, seconds_of
from rlvr_cli.graders.python import tests_of as unit_tests_of

DOUBLE = "assert double(2) == 4\nassert double(-3) == -6"
SUMS = json.dumps([{"input": "1 2\n", "output": "3\n"}, {"input": "10 -4\n", "output": "6"}])
SECONDS = 30.0


def fenced(program: str) -> str:
    return f"Here:\n```python\n{program}\n```\nDone."


def kind_of(program: str, truth: str, *, seconds: float = SECONDS) -> str | None:
    verdict = grade(fenced(program), truth, seconds=seconds)
    assert verdict.format_reward == 1.0
    assert verdict.reward == verdict.answer_reward == float(verdict.failure_kind is None)
    return verdict.failure_kind


# The program of a response


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a"),
        ("```py\na\n```\n```python\nb\n```", "b"),
        ("```python\na\n```\nprints\n```\nb\n```", "a"),  # an unnamed block counts only where none is named
        ("```\na\n```\n```\nb\n```", "b"),
        ("```python\na\n```\n```json\n{}\n```", "a"),
        ("```sh\nls\n```", None),
        ("```python\na\nb", "a\nb"),
        ("```Python\r\na\r\nb\r\n```\r\n", "a\nb"),
        ("~~~python\na\n```\n~~~", "a\n```"),
        ("````python\na\n```\nb\n````", "a\n```\nb"),
        ("- so:\n  ```python\n  def f():\n      return 1\n  ```", "def f():\n    return 1"),
        ("```python title=x\na\n```", "a"),
        ("<think>\n```python\ndecoy\n```\n</think>\n```python\na\n```", "a"),
        ("```python\ndecoy\n```\n</think> nothing", None),
        ("```python\na\n```\n<think> ```python\nb\n```", "a"),
        ("```python\ns.split('</think>')\n```", "s.split('</think>')"),
        (
            "x </think>\n```python\nif '<think>' in s:\n    s = s.partition('</think>')[2]\n```\nDone.",
            "if '<think>' in s:\n    s = s.partition('</think>')[2]",
        ),
        ("x </think>\n```python\nP = 1\n<think>\n</think>\nQ = 2\n```", "P = 1\n<think>\n</think>\nQ = 2"),
        ("```python\ndecoy = '<think>'\n```\n</think>\n```python\na\n```", "a"),
        ("```python\nnever closed\n</think>\n```python\na\n```", "a"),
        ("inline ```python a``` only", None),
        ("```python\n```", ""),
        ("no code", None),
        ("", None),
    ],
)
def test_the_last_block_of_python_after_the_thinking(text, code):
    assert last_code_block(text) == code


def test_extraction_is_linear():
    for text in ("```python\n" * 30_000, "`" * 300_000, "<think>" * 60_000, "```\n" * 30_001, "~" * 300_000 + "`"):
        last_code_block(text)
    assert without_thinking("a </think> b </think> c") == " c"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("reasons </think> <answer> def f(): pass </answer>", "def f(): pass"),
        ("reasons </think> <answer>\n```python\na\n```\n</answer>", "a"),
        ("<answer> decoy </answer> </think> <answer> a </answer>", "a"),
        ("```python\ndecoy\n```\n</think> <answer> a </answer>", "a"),
        ("```python\na\n```", "a"),
        ("nothing", None),
    ],
)
def test_the_answer_tags_hold_the_program_where_there_are_some(response, program):
    assert program_of(response) == program


# Tests


def test_assertions_are_split_into_what_is_computed_and_what_is_compared():
    tests = unit_tests_of(
        "import math\nassert f(1) == [1, (2,)]\nassert math.isclose(g(2), 1.5), 'close'\nx = 3\nassert not h(x)"
    )
    assert isinstance(tests, AssertTests)
    assert tests.between == ["import math", "", "x = 3", ""]
    assert tests.expressions == ["f(1)", "bool(math.isclose(g(2), 1.5))", "bool(not h(x))"]
    assert tests.compared == [True, False, False]
    assert tests.literals == [[1, (2,)], None, None]
    assert unit_tests_of(SUMS) == ScriptTests(["1 2\n", "10 -4\n"], ["3\n", "6"])


@pytest.mark.parametrize(
    "truth",
    ["5", "", "f(2)", "def f(:", "[]", "{}", '[{"input": "a"}]', '[{"input": 1, "output": "1"}]', '"x"', "[" * 100_000],
)
def test_anything_else_is_no_unit_test(truth):
    with pytest.raises(ValueError, match="unit tests are a JSON list"):
        grade("```python\nx\n```", truth)
    assert reference_response("python", truth) is None
    assert not has_unknown_answer("python", truth)


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        ("def double(x): return 2 * x", None),
        ("double = lambda x: x + x", None),
        ("import numpy as np\ndef double(x): return np.int64(2) * x", None),
        ("def double(x): return x * x", "wrong_answer"),
        ("def double(x): print(2 * x)", "wrong_answer"),
        ("def double(x): return str(2 * x)", "wrong_answer"),
        ("def triple(x): return 3 * x", "exception"),
        ("def double(x): return 1 / 0", "exception"),
        ("def double(x: return", "exception"),
        ("raise SystemExit", "exception"),
        ("import os\nos._exit(0)", "exception"),
        ("import sys\ndef double(x): sys.exit(0)", "exception"),
        ("def double(x): return object()", "exception"),
        ("def double(x):\n    while True: pass", "timeout"),
        ("def double(x): return bytearray(1 << 40)", "memory"),
        ("def double(x): return 'x' * (1 << 24)", "output_too_large"),
        ("open('/etc/passwd')\ndef double(x): return 2 * x", "exception"),
    ],
)
def test_kinds_of_assertions(program, kind):
    assert kind_of(program, DOUBLE, seconds=0.5 if kind == "timeout" else SECONDS) == kind


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        ("print(sum(map(int, input().split())))", None),
        ("import sys\nprint(sum(int(x) for x in sys.stdin.read().split()), end='')", None),
        ("import sys\nsys.stdout.write(str(sum(map(int, sys.stdin.readline().split()))) + '  \\n\\n')", None),
        ("import sys\nsys.stdout.buffer.write(b'%d' % sum(map(int, sys.stdin.buffer.read().split())))", None),
        ("a = open(0).read().split()\nprint(int(a[0]) + int(a[1]))", None),
        (
            "def main():\n    a, b = map(int, input().split())\n    print(a + b)\nif __name__ == '__main__':\n    main()",
            None,
        ),
        ("import sys\nprint(sum(map(int, input().split())))\nsys.exit(0)", None),
        ("print(sum(map(int, input().split())))\nexit()", None),
        ("print(3)", "wrong_answer"),
        ("x = 1", "wrong_answer"),
        ("input(); print(input())", "exception"),
        ("print(1 / 0)", "exception"),
        ("import os\nos._exit(0)", "exception"),
        ("import time; time.sleep(600)", "timeout"),
        ("while True: print('x' * 100_000)", "output_too_large"),
        ("x = bytearray(1 << 40)", "memory"),
        ("print('x' * (1 << 24))", "output_too_large"),
    ],
)
def test_kinds_of_scripts(program, kind):
    assert kind_of(program, SUMS, seconds=0.5 if kind == "timeout" else SECONDS) == kind


SUM = "sum(map(int, sys.stdin.readline().split()))"


@pytest.mark.parametrize(
    "write",
    [
        f'os.write(1, b"%d" % {SUM})',
        f'open(1, "w").write(str({SUM}))',
        f'out = open(1, "w")\ndef main(): out.write(str({SUM}))\nmain()',  # written when the script's names go
        f"with open(1, 'wb') as out: out.write(b'%d' % {SUM})",
        f'os.fdopen(os.dup(1), "w").write(str({SUM}))',
        f"kept = os.dup(1)\nos.write(kept, b'%d' % {SUM})",
        f"print({SUM}, file=sys.__stdout__)",
        f"assert sys.stdout.fileno() == 1\nprint({SUM})",
        f'sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8")\nprint({SUM})',
        f'sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding="utf-8")\nprint({SUM})',
        f"print({SUM})\nsys.stdout.flush()\nsys.stdout.close()",
        f"print({SUM}, flush=True)\nos.close(0)\nos.close(1)",
        f"atexit.register(lambda total: print(total), {SUM})",
        f"threading.Thread(target=lambda: print({SUM})).start()",
        f"class Late:\n    def write(self, text): self.text = text\n    def flush(self): os.write(1, self.text)\n"
        f"sys.stdout = Late()\nsys.stdout.write(b'%d' % {SUM})",
    ],
)
def test_all_that_a_script_writes_to_standard_output_counts(write):
    assert kind_of(f"import atexit, io, os, sys, threading\n{write}", SUMS) is None


def test_a_script_that_leaves_a_pool_of_threads_ends():
    program = "from concurrent.futures import ThreadPoolExecutor as Pool\npool = Pool(1)\ndef main(): print(pool.submit(int, 3).result())\nmain()"
    assert kind_of(program, json.dumps([{"input": "", "output": "3"}] * 3)) is None


@pytest.mark.parametrize(
    "program",
    [
        "Pool().submit(lambda: (time.sleep(0.05), print(total)))",
        "threading.Thread(target=lambda: [keep.append(Pool()), print(keep[0].submit(int, total).result())]).start()",
        "weakref.finalize(keep, print, total)",
    ],
)
def test_each_run_of_a_script_ends_as_its_interpreter_would_end_it(program):
    head = "import threading, time, weakref\nfrom concurrent.futures import ThreadPoolExecutor as Pool\n"
    program = f"{head}class List(list): pass\nkeep, total = List(), sum(map(int, input().split()))\n{program}"
    tests = [{"input": f"{n} 2", "output": str(n + 2)} for n in range(3)]
    assert kind_of(program, json.dumps(tests)) is None


def test_a_script_cannot_tell_how_long_the_right_outputs_are():
    limits = {
        _answer_bytes(unit_tests_of(json.dumps([{"input": "", "output": text}]))) for text in ("YES", "NO", "7" * 9999)
    }
    assert len(limits) == 1


@pytest.mark.parametrize(
    "keep", ["memory.append(memory)", "sys.stdin = memory", slow("sys.stdin = memory\nmemory.append(memory)")]
)
def test_runs_of_one_script_do_not_keep_each_others_memory(keep):
    program = f"import sys\nmemory = [bytearray(200 << 20)]\ndef f(): return memory\n{keep}\nprint(3)"
    assert kind_of(program, json.dumps([{"input": "", "output": "3"}] * 6)) is None


def test_much_is_written_in_its_order_and_a_flood_is_stopped():
    program = "import os\nfor i in range(20_000): print(i, flush=True); os.write(1, b'x\\n')"
    assert kind_of(program, json.dumps([{"input": "", "output": "".join(f"{i}\nx\n" for i in range(20_000))}])) is None
    assert kind_of("import os\nwhile True: os.write(1, b'x' * 100_000)", SUMS) == "output_too_large"
    assert (
        kind_of("import os\ntry:\n    while True: os.write(1, b'x' * 100_000)\nexcept OSError: pass", SUMS)
        == "output_too_large"
    )


@pytest.mark.parametrize("text", [slow("x" * 500_000), "é" * 100_000, slow("1 \n" * 200_000)])
def test_right_outputs_may_be_long_together(text):
    truth = json.dumps([{"input": "", "output": text.replace(" ", "")}] * 15)
    program = f"print({text[:3]!r} * {len(text) // 3} + {text[: len(text) % 3]!r})"
    assert kind_of(program, truth) is None
    assert kind_of("print('y' * 4_000_000)", truth) == "output_too_large"


def test_right_outputs_that_no_program_may_print_are_no_unit_tests():
    for number, characters in ((1, (8 << 20) + 1), (5, 7 << 20)):
        truth = json.dumps([{"input": "", "output": "x" * characters}] * number)
        with pytest.raises(ValueError, match=r"a program may print 8 MiB in a test, and 32 MiB in all"):
            unit_tests_of(truth)
    unit_tests_of(json.dumps([{"input": "", "output": "x" * (8 << 20)}]))


def test_a_response_without_a_program():
    assert grade("", DOUBLE).failure_kind == "empty"
    assert grade("I do not know.", DOUBLE).failure_kind == "no_code"
    assert grade("```python\n\n```", DOUBLE).failure_kind == "no_code"
    assert grade("no", DOUBLE).reward == 0.0


def test_runs_of_one_script_do_not_see_each_other():
    truth = json.dumps([{"input": "", "output": "1"}] * 3)
    assert kind_of("seen = globals().get('seen', 0) + 1\nprint(seen)", truth) is None


def test_a_large_input_is_read_or_left():
    truth = json.dumps([{"input": "7 " * 500_000, "output": "7"}] * 2)
    assert kind_of("print(input().split()[-1])", truth) is None
    assert kind_of("print(7)", truth) is None


STACK = "class S(list):\n    def push(self, x): self.append(x)"


@pytest.mark.parametrize(
    ("program", "tests", "kind"),
    [
        (STACK, "s = S()\ns.push(1)\nassert s.pop() == 1\ns.push(2)\nassert s.pop() == 2", None),
        (STACK, "s = S()\ns.push(1)\nassert s.pop() == 1\ns.push(2)\nassert s.pop() == 1", "wrong_answer"),
        (STACK, "s = S()\nassert s.append(1) is None\ns.pop()", None),
        (STACK, "s = S()\nassert not s\ns.pop()", "exception"),
    ],
)
def test_statements_of_the_tests_run_in_their_order(program, tests, kind):
    assert kind_of(program, tests) == kind


def test_imports_and_other_statements_of_the_tests_run_first():
    assert kind_of("def f(x): return x / 3", "import math\nx = 1\nassert math.isclose(f(x), 0.3333333333)") is None
    assert kind_of("def f(x): return x / 3", "import math\nassert math.isclose(f(1), 0.4)") == "wrong_answer"


VALUES = (
    "{'a': [1, (2.5, None)], (1,): {3, 4}}", "-0.5", "'é\\n'", "b'x'", "True", "[]", "()", "(1, 2)", "1 + 2j", "set()",
)  # fmt: skip


def test_values_of_every_built_in_type_are_compared():
    literals = ["{0} - {0}" if value == "set()" else value for value in VALUES]
    truth = [f"assert f({i}) == {value}" for i, value in enumerate(VALUES)]
    program = f"def f(i): return [{', '.join(literals)}][i]"
    assert kind_of(program, "\n".join(truth)) is None
    wrong = f"def f(i): return [{', '.join(literals)}][i - 1]"
    for test in truth:
        assert kind_of(wrong, test) == "wrong_answer", test


def test_a_value_that_is_far_too_long_is_not_read():
    """Python's parser takes a kilobyte and 3 microseconds for an item: 2 GiB outside of the sandbox, for a list of 8 MiB."""
    tracemalloc.start()
    try:
        assert kind_of("def double(x): return [1] * 100_000", DOUBLE) == "wrong_answer"
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("literal", "value"), [("1e308", "int(1e308)"), ("0", "complex(-0.0, -0.0)"), ("[0, 1]", "[False, True]")]
)
def test_equal_values_may_be_longer_than_the_literal(literal, value):
    assert kind_of(f"def f(): return {value}", f"assert f() == {literal}") is None


def test_subclasses_count_as_their_built_in_type():
    program = "from collections import Counter, namedtuple, defaultdict\nP = namedtuple('P', 'x y')\ndef f(): return [Counter('aab'), P(1, 2)]"
    assert kind_of(program, "assert f() == [{'a': 2, 'b': 1}, (1, 2)]") is None


# Programs that want the reward without the work


@pytest.mark.parametrize(
    "program",
    [
        "class Any:\n    def __eq__(self, other): return True\ndef double(x): return Any()",
        "class Any(int):\n    def __eq__(self, other): return True\ndef double(x): return Any(0)",
        'import os\nfor fd in range(3, 1024):\n    try: os.write(fd, b\'{"status": "ok", "value": true}\\n\')\n    except OSError: pass',
        'import os\nfor fd in range(3, 1024):\n    try: os.write(fd, b\'{"status": "ok", "value": [{}, {}]}\\n\')\n    except OSError: pass',
        "import sys\nsys.modules['program'].results = [{'value': 'True'}] * 2\nsys.exit(0)",
        "import builtins\nbuiltins.bool = lambda x: True\ndef double(x): return 0",
        "__debug = False\nimport sys\nsys.flags = 0\ndef double(x): return 0",
        "def double(x):\n    import gc\n    return next((o for o in gc.get_objects() if o == [4, -6]), [0, 0])[0]",
    ],
)
def test_a_wrong_value_cannot_be_made_right(program):
    assert kind_of(program, DOUBLE) in ("wrong_answer", "exception")


def test_the_right_outputs_are_not_where_the_program_runs():
    program = "import gc, sys\nfor o in gc.get_objects():\n    if isinstance(o, dict) and '424242' in str(list(o.values())): print(424242)"
    truth = json.dumps([{"input": "", "output": "424242"}])
    assert (
        kind_of(program.replace("424242", "4242' + '42", 1).replace("print(424242)", "print('4242' + '42')"), truth)
        == "wrong_answer"
    )


# With the pool, and as a reference


@pytest.mark.slow
def test_the_time_limit_of_the_pool_ends_the_program_before_the_worker():
    assert [seconds_of(t) for t in (0.5, 2.0, 5.0)] == [0.25, 1.0, 4.0]
    pairs = [
        (fenced("import time; time.sleep(600)"), DOUBLE),
        (fenced("def double(x): return 2 * x"), DOUBLE),
        ("", "no test"),
    ]
    with GraderPool("python", workers=1, timeout=3.0) as grader_pool:
        slow, right, failed = grader_pool.grade(pairs)
        assert grader_pool.restarts == 0
    assert (slow.reward, slow.failure_kind, slow.error) == (0.0, "timeout", None)
    assert (right.reward, right.extracted_answer) == (1.0, "def double(x): return 2 * x")
    assert (failed.reward, failed.error) == (None, "ValueError")


@pytest.mark.slow
def test_the_documented_grader_of_ones_own_runs_programs_in_the_sandbox(tmp_path):
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    [example] = [block for block in page.split("```python\n")[1:] if "run_program" in block.partition("```")[0]]
    file = tmp_path / "mine.py"
    file.write_text(example.partition("```")[0])
    marker = tmp_path / "escaped"
    programs = [
        "answer = 6 * 7",
        "def answer(): return 41",
        "import time; time.sleep(600)",
        f"open({str(marker)!r}, 'w')\nanswer = 42",
    ]
    with GraderPool(f"{file}:reward", workers=2, timeout=20.0) as grader_pool:
        grades = grader_pool.grade([(text, "42") for text in (*map(fenced, programs), "42")])
    assert [grade.reward for grade in grades] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [grade.failure_kind for grade in grades] == [None, "low_reward", "timeout", "exception", "no_code"]
    assert not marker.exists()


def test_what_the_sandbox_lacks_is_said_once_by_the_pool(monkeypatch):
    said = []
    monkeypatch.setattr(pool, "sandbox_warning", lambda: "this machine lacks seccomp")
    GraderPool("python", report=said.append).close()
    GraderPool("gsm8k", report=said.append).close()
    assert said == ["this machine lacks seccomp"]


def test_the_reference_looks_the_answers_up():
    response = reference_response("python", "assert f(1, 'a') == [2]\nassert f(2, 'b') == [3]\nassert g() == -1")
    assert response is not None
    assert resolve_grader("python")(response, "assert f(2, 'b') == [3]\nassert g() == -1").reward == 1.0
    imported = "import math\nassert f(2) == 3"
    assert resolve_grader("python")(reference_response("python", imported) or "", imported).reward == 1.0


@pytest.mark.parametrize(
    "truth",
    [
        "assert f(x=1) == 2", "assert f(1)", "assert a.b(1) == 2", "assert f(y) == 2", "assert f(2) is None",
        "assert set(f(1)) == set([1])", "def twice(x):\n    return 2 * f(x)\nassert twice(2) == 8",
        "f(3)\nassert f(1) == 2",
    ],
)  # fmt: skip
def test_tests_that_are_read_but_tell_no_program_have_an_unknown_answer(truth):
    assert reference_response("python", truth) is None
    assert has_unknown_answer("python", truth)
    assert not has_unknown_answer("python", "assert f(1) == 2")
