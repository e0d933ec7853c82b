"""The house: imports point strictly downwards, heavy libraries have one home, dangerous calls have none. Read from the AST."""

import ast
import re
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "rlvr_cli"
RANKS = {
    0: {"errors", "text", "records", "faults", "limits"},
    1: {"markup", "spans", "config", "synthetic", "signals", "rows", "files", "manifest", "columns", "environment", "prefixes"},
    2: {
        "datasets", "prompts", "samplers", "graders", "store", "models", "tokens", "advantages", "losses", "queries",
        "statistics", "display", "plots", "charts",
    },
    3: {"report", "rollouts", "training", "checkpoints", "comparison", "summary", "engines", "journal", "tiny_model", "traces"},
    4: {"inputs", "plan", "figures", "alarms", "excerpt", "regrading", "filtering"},
    5: {"trainer", "reporting"},
    6: {"commands"},
    7: {"cli"},
    8: {"__main__"},
}  # fmt: skip
RANK_OF = {stage: rank for rank, stages in RANKS.items() for stage in stages}
HOMES = {
    "duckdb": {"queries"},
    "rich": {"display"},
    "vllm": {"samplers/vllm"},
    "openai": {"samplers/openai"},
    "datasets": {"datasets"},
    "click": {"cli"},
    "math_verify": {"graders"},
    "mpmath": {"graders"},
    "pyarrow": {"rows", "columns", "store", "queries"},
    "torch": {
        "prefixes",
        "samplers",
        "models",
        "tokens",
        "advantages",
        "losses",
        "training",
        "checkpoints",
        "engines",
        "tiny_model",
        "trainer",
        "commands",
    },
    "matplotlib": {"plots"},
    "transformers": {
        "samplers/transformers",
        "samplers/batch",
        "samplers/stepping",
        "samplers/vllm",
        "models",
        "prefixes",
        "tokens",
        "training",
        "tiny_model",
    },
}
LIGHT = {
    "errors",
    "text",
    "records",
    "faults",
    "signals",
    "config",
    "synthetic",
    "rows",
    "files",
    "manifest",
    "columns",
    "environment",
    "cli",
    "queries",
    "display",
    "store",
    "prompts",
    "plots",
    "markup",
    "spans",
    "charts",
    "report",
}
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__")


def stage_of(module: str) -> str:
    return module.split("/")[0]


def imports(tree: ast.AST) -> list[tuple[str, int]]:
    """(dotted module, line), relative imports refused."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: import absolutely"
            assert node.module is not None
            if node.module == "rlvr_cli":
                found += [(f"rlvr_cli.{alias.name}", node.lineno) for alias in node.names]
            else:
                found.append((node.module, node.lineno))
    return found


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_to_lower_ranks(path):
    module = module_of(path)
    if module == "__init__":
        return
    stage = stage_of(module)
    assert stage in RANK_OF, f"{module} has no rank: give it one in RANKS and in the README's tree"
    for name, line in imports(ast.parse(path.read_text())):
        if not name.startswith("rlvr_cli.") or name == "rlvr_cli.__version__":
            continue
        imported = name.split(".")[1]
        within_stage = imported == stage and stage in {"samplers", "graders"}
        assert within_stage or RANK_OF[imported] < RANK_OF[stage], (
            f"{path.name}:{line}: {stage} must not import {imported}"
        )


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_heavy_libraries_have_one_home(path):
    module = module_of(path)
    for name, line in imports(ast.parse(path.read_text())):
        homes = HOMES.get(name.split(".")[0])
        if homes is not None:
            assert module in homes or stage_of(module) in homes, f"{path.name}:{line}: {name} lives in {sorted(homes)}"


@pytest.mark.parametrize("module", sorted(LIGHT))
def test_light_modules_import_nothing_heavy_when_loaded(module):
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    top_level = ast.Module(body=[n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)], type_ignores=[])
    heavy = {
        "torch",
        "transformers",
        "numpy",
        "pyarrow",
        "duckdb",
        "vllm",
        "openai",
        "math_verify",
        "sympy",
        "matplotlib",
    }
    assert not heavy & {name.split(".")[0] for name, _ in imports(top_level)}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_nothing_runs_foreign_code():
    """No pickle, no eval or exec, no shell, no remote code, anywhere in the package."""
    forbidden_calls = {"eval", "exec", "compile", "sympify", "parse_expr"}
    for path in FILES:
        source = path.read_text()
        assert "pickle" not in {name.split(".")[0] for name, _ in imports(ast.parse(source))}, path
        assert not re.search(r"shell=True|weights_only=False|trust_remote_code=True", source), path
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in forbidden_calls, f"{path.name}:{node.lineno}: {node.func.id}()"


def test_readme_names_every_module():
    readme = (PACKAGE.parent / "README.md").read_text()
    for path in FILES:
        if path.name != "__init__.py":
            assert re.search(rf"\b{re.escape(path.name)}\b", readme), f"the README's tree lacks {module_of(path)}.py"


def test_light_modules_stay_light_in_a_fresh_interpreter():
    import subprocess

    code = (
        "import sys, rlvr_cli.cli\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pyarrow', 'duckdb', 'rich', 'vllm', 'openai', 'sympy', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
