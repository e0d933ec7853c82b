"""Architecture rules, checked on the AST: rooms import only from rooms above, heavy imports are confined, unsafe calls are absent."""

import ast
import functools
import importlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Container
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "rlvr_cli"

# In the order in which data flows. A room imports from the rooms above it; files of one room may import each other.
ROOMS = {
    "types": "the data types that all rooms share",
    "errors": "errors that are shown without a traceback",
    "text": "model text made safe for a terminal and for Parquet",
    "faults": "fault injection for the tests",
    "user_code": "a user's own function, FILE.py:FUNCTION",
    "process": "Ctrl-C, limits on time and memory, children that die with their parent",
    "parallel": "processes that work for a run: started, called, watched and killed; memory that they share",
    "sandbox": "a program of a model's, run where it can do no harm",
    "terminal": "terminal output",
    "config": "options and presets",
    "runs": "the run directory",
    "trackers": "W&B, TensorBoard and Trackio, which follow a run",
    "graders": "reward functions",
    "data": "datasets, prompts, traces",
    "environments": "what answers the policy in an episode: tools, games",
    "models": "the policy",
    "samplers": "inference engines",
    "judges": "another model, behind an endpoint, that grades what no rule can",
    "rollouts": "sample, grade and store rollouts",
    "discovery": "search with a verifier",
    "replay": "a run's updates, computed again: above training, so that it cannot import it",
    "training": "updates, losses, advantages, checkpoints; the traces that `rlvr sft` reads",
    "sweeps": "experiments: runs that differ in an option, and how they are run",
    "analysis": "queries, statistics, plots, reports",
    "commands": "one module per command",
    "notebook": "runs in a notebook: `rlvr_cli.open_run`",
    "handout": "the functions of the course",
    "completion": "shell completion of option values",
    "cli": "the command line; exit statuses",
    "__main__": "python -m rlvr_cli",
}
HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "pyarrow",
    "duckdb",
    "rich",
    "pydantic",
    "vllm",
    "bitsandbytes",
    "liger_kernel",
    "aiohttp",
    "ray",
    "math_verify",
    "sympy",
    "matplotlib",
    "jinja2",
    "starlette",
    "uvicorn",
    "obstore",
}
# Rooms or files in which a library may be imported.
HOMES = {
    "duckdb": {"analysis/queries/database"},
    "matplotlib": {"analysis/pictures/plots"},
    "jinja2": {"analysis/report/page"},
    "starlette": {"analysis/live/server"},
    "uvicorn": {"analysis/live/server"},
    "rich": {"terminal"},
    "typer": {"cli"},
    "click": set(),  # use typer instead, which bundles it
    "aiohttp": {"samplers/openai_client"},
    "ray": {"parallel/cluster"},
    "vllm": {"samplers/vllm", "samplers/vllm_process"},
    "bitsandbytes": {"models/compute/bitsandbytes"},
    "liger_kernel": {"models/compute/liger"},
    "datasets": {"data/datasets"},
    "peft": {"models/adapter"},
    "py3langid": {"graders/language"},
    "pandas": {"notebook"},
    "polars": {"notebook"},
    "wandb": {"trackers/wandb_run"},
    "tensorboard": {"trackers/tensorboard_events"},
    "trackio": {"trackers/trackio_run"},
    "obstore": {"runs/remote/store"},
    "math_verify": {"graders"},
    "reasoning_gym": {"graders/reasoning_gym"},
    "verifiers": {"environments/verifiers"},
    "mpmath": {"graders/answers"},
    "pyarrow": {"runs", "data/files", "analysis/queries/database", "notebook"},
    "torch": {"parallel", "models", "samplers", "replay", "training", "commands", "handout"},
    "transformers": {"models", "samplers", "training", "environments/tools"},
    "renderers": {"models/tokens/renderer"},
}
# Rooms and files that import nothing heavy at module level, so that `rlvr --help` and `rlvr analyze` start quickly.
LIGHT = {
    "types",
    "errors",
    "text",
    "faults",
    "user_code",
    "process",
    "parallel/worker",
    "parallel/child",
    "terminal",
    "config",
    "runs",
    "data",
    "completion",
    "cli",
    "analysis/queries/database",
    "analysis/queries/named_queries",
    "analysis/queries/columns",
    "analysis/pictures/picture",
    "analysis/pictures/plots",
    "analysis/report",
}
FILES = sorted(PACKAGE.rglob("*.py"))
MOST_MODULES = 12  # in a folder


def module_of(path: Path) -> str:
    """Return the module as a path, such as `analysis/report/page`; a package is its folder."""
    return path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__")


def room_of(module: str) -> str:
    return module.split("/")[0]


def is_in(module: str, places: set[str]) -> bool:
    """Whether a module is one of the places or inside one of them."""
    return any(module == place or module.startswith(f"{place}/") for place in places)


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Each module, parsed."""
    return {module_of(path): ast.parse(path.read_text()) for path in FILES}


@functools.cache
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """Each of the trees is walked once for all tests."""
    return [*ast.walk(tree)]


@functools.cache
def imports(tree: ast.AST) -> list[tuple[str, int]]:
    """Return (dotted module, line) of each import; relative imports fail."""
    found = []
    for node in nodes_of(tree):
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


PARTS = ("sources", "evaluation", "discovering", "store.analyzing", "store.filtering")  # of commands


def test_rooms_import_only_from_rooms_above():
    order = list(ROOMS)
    for module in trees().keys() - {"__init__"}:
        room = room_of(module)
        assert room in order, f"{module} is in no room: give it one, here and in docs/architecture.md"
        for name, line in imports(trees()[module]):
            if not name.startswith("rlvr_cli.") or name == "rlvr_cli.__version__":
                continue
            imported = name.split(".")[1]
            assert order.index(imported) <= order.index(room), f"{module}:{line}: {room} must not import {imported}"
            shared = name.startswith(tuple(f"rlvr_cli.commands.{part}" for part in PARTS))
            assert room != "commands" or imported != "commands" or shared, (
                f"{module}:{line}: commands are joined by files on disk"
            )


def test_no_module_imports_itself_by_way_of_others():
    """Imports within functions and for types count too: what sits in a circle can only be read as a whole."""
    dotted = {f"rlvr_cli.{module}".replace("/", "."): tree for module, tree in trees().items()}
    imported = {module: modules_imported(tree, dotted) - {module} for module, tree in dotted.items()}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def modules_imported(tree: ast.AST, modules: Container[str]) -> set[str]:
    """Return those of the modules that a file imports; `from package import module` is one of the module alone."""
    found = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in names}
    return {name for name in found if name in modules}


def test_no_folder_holds_more_modules_than_one_reads_at_a_glance():
    modules = Counter(path.parent for path in FILES if path.name != "__init__.py")
    assert {module_of(folder): count for folder, count in modules.items() if count > MOST_MODULES} == {}


def test_answers_import_nothing_else_of_rlvr():
    """graders/answers could be published as a separate package."""
    for path in (PACKAGE / "graders" / "answers").rglob("*.py"):
        for name, line in imports(trees()[module_of(path)]):
            inside = name.startswith("rlvr_cli.graders.answers")
            assert inside or not name.startswith("rlvr_cli"), f"{path.name}:{line}: {name}"


def test_libraries_are_imported_only_where_allowed():
    for module, tree in trees().items():
        for name, line in imports(tree):
            homes = HOMES.get(name.split(".")[0])
            if homes is not None:
                assert is_in(module, homes), f"{module}:{line}: {name} may be imported in {sorted(homes)}"


def test_light_modules_import_nothing_heavy_when_loaded():
    for module in (module for module in trees() if is_in(module, LIGHT)):
        loaded = [n for n in trees()[module].body if isinstance(n, ast.Import | ast.ImportFrom)]
        heavy = HEAVY & {name.split(".")[0] for name, _ in imports(ast.Module(body=loaded, type_ignores=[]))}
        assert not heavy, f"{module}: {heavy}"


def test_every_module_has_a_docstring():
    assert [module for module, tree in trees().items() if not ast.get_docstring(tree)] == []


def test_a_function_of_a_command_or_of_training_fits_a_page():
    """Of at most 60 lines, its docstring included: a longer one is two things."""
    for module in (module for module in trees() if is_in(module, {"commands", "training"})):
        for node in nodes_of(trees()[module]):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 60, f"{module}:{node.lineno}: {node.name}"


def test_no_unsafe_calls():
    """No pickle, no shell, no remote code, anywhere in the package; eval and exec only where the kernel bounds what it may do."""
    for path in FILES:
        forbidden_calls = {"eval", "exec", "compile", "sympify", "parse_expr"}
        if module_of(path) in ("sandbox/child", "sandbox/unit_tests"):
            forbidden_calls -= {"eval", "exec", "compile"}
        source = path.read_text()
        assert "pickle" not in {name.split(".")[0] for name, _ in imports(trees()[module_of(path)])}, path
        assert not re.search(r"shell=True|weights_only=False|trust_remote_code=True", source), path
        for node in nodes_of(trees()[module_of(path)]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in forbidden_calls, f"{path.name}:{node.lineno}: {node.func.id}()"


INSIDES = {  # attributes of a model or policy that expose the model's internals
    "_attn_implementation",
    "_forward_hooks",
    "_forward_pre_hooks",
    "backbone",
    "base_model",
    "base_model_prefix",
    "generation_config",
    "get_input_embeddings",
    "get_output_embeddings",
    "lm_head",
    "load_state_dict",
    "modules",
    "named_modules",
    "named_parameters",
    "num_parameters",
    "parameters",
    "plain_modules",
    "rotary_emb",
    "self_attn",
    "set_attn_implementation",
    "state_dict",
    "tie_weights",
    "from_pretrained",
    "save_pretrained",
}
METHODS = {
    "modules",
    "named_parameters",
    "num_parameters",
    "parameters",
}  # internals if called; others have such attributes
KNOWS_LAYERS = {"samplers/embedded/decode_step"}  # computes the layers of known architectures itself


def model_internals(tree: ast.AST) -> list[ast.Attribute]:
    """Return the uses of a model's internals. `load_state_dict` and `state_dict` of an optimizer are none."""
    found = [n for n in nodes_of(tree) if isinstance(n, ast.Attribute) and n.attr in INSIDES]
    called = {id(n.func) for n in nodes_of(tree) if isinstance(n, ast.Call)}
    return [
        n
        for n in found
        if not ast.unparse(n.value).endswith("optimizer") and (n.attr not in METHODS or id(n) in called)
    ]


def test_only_the_models_room_uses_model_internals():
    """Use `models.policy.Policy`; otherwise adapters, a value head or sharded weights would affect many modules."""
    for path in FILES:
        found = model_internals(trees()[module_of(path)])
        if not is_in(module_of(path), {"models", *KNOWS_LAYERS}):
            assert not found, f"{module_of(path)}:{found[0].lineno}: {ast.unparse(found[0])}"
        elif module_of(path) in KNOWS_LAYERS:
            assert found, f"{module_of(path)} needs no exception"


@pytest.mark.parametrize(
    "code",
    ["policy.backbone", "policy.plain_modules()", "m.layers[0].self_attn.head_dim", "m._forward_hooks", "f(m.state_dict)",
     "m.config._attn_implementation", "m.set_attn_implementation(x)", "m.generation_config", "policy.model.num_parameters()"],
)  # fmt: skip
def test_uses_of_model_internals_are_found(code):
    assert model_internals(ast.parse(code))
    assert not model_internals(ast.parse("optimizer.state_dict(); policy.num_parameters; policy.weights_for_engine()"))


def test_tests_mirror_the_rooms():
    """Each folder of tests has the name of a room, so that a module's tests are easy to find.

    Reliability is all rooms', and `commands/across` is about several commands.
    """
    tests = PACKAGE.parent / "tests"
    folders = {p.parent.relative_to(tests).as_posix() for p in tests.rglob("test_*.py")} - {
        ".",
        "reliability",
        "commands/across",
    }
    assert folders <= {p.parent.relative_to(PACKAGE).as_posix() for p in FILES}, folders


def test_every_package_and_its_files_are_installed():
    setuptools = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {".".join(p.parent.relative_to(PACKAGE.parent).parts) for p in FILES}
    assert {p for p in folders if p not in setuptools["packages"]} == set()
    installed = {
        path
        for package, patterns in setuptools["package-data"].items()
        for pattern in patterns
        for path in (PACKAGE.parent / setuptools["package-dir"].get(package, package.replace(".", "/"))).glob(pattern)
    }
    files = {p for p in PACKAGE.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert files <= installed, files - installed


def test_light_modules_stay_light_in_a_fresh_interpreter():
    modules = [f"rlvr_cli.{module_of(p)}".replace("/", ".") for p in FILES if is_in(module_of(p), LIGHT)]
    code = f"import sys, {', '.join(modules)}\nheavy = {HEAVY!r} & set(sys.modules)\nassert not heavy, heavy"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_package_without_bytecode_is_imported_whatever_the_compiler_says_of_it(tmp_path, monkeypatch):
    """Installed without being compiled, `cellpylib` failed in whichever test imported it first."""
    (tmp_path / "uncompiled.py").write_text('same = "a" is "a"\n')
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("uncompiled")
    del sys.modules["uncompiled"]
