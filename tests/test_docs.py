"""The documentation: links resolve, tables match the code, the commands shown exist, and the guide works as typed."""

import collections
import contextlib
import doctest
import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from forks import Forks
from rlvr_cli.analysis.queries.named_queries import named_queries
from rlvr_cli.config import config_of
from rlvr_cli.config.parsing.command_line import values_of
from rlvr_cli.config.parsing.options import flag, options
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.data.datasets import dataset_names
from rlvr_cli.graders import FAILURE_KINDS, GRADERS
from rlvr_cli.sweeps.experiment import experiment_names, load_experiment
from typed import typed

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *(page for pattern in ("*.md", "api/*.md", "options/*.md") for page in sorted(DOCS.glob(pattern))),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
]
GUIDE = DOCS / "guide.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?%?")
# The handout's problems, in order.
PROBLEMS = """
    math_baseline tokenize_prompt_and_output compute_entropy get_response_log_probs masked_normalize sft_microbatch_train_step
    log_generations sft_experiment expert_iteration_experiment compute_group_normalized_rewards
    compute_naive_policy_gradient_loss compute_grpo_clip_loss compute_policy_gradient_loss masked_mean
    grpo_microbatch_train_step grpo_train_loop grpo_learning_rate grpo_baselines think_about_length_normalization
    grpo_length_normalization grpo_group_standard_deviation grpo_off_policy grpo_off_policy_sweep
    grpo_off_policy_clip_ablation grpo_prompt_ablation leaderboard
""".split()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(text: str, *languages: str) -> list[str]:
    """Return the fenced blocks in these languages."""
    return [body for language, body in FENCE.findall(text) if language in languages]


def prose(text: str) -> str:
    return FENCE.sub("", text)


# Links, tables, lengths


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub generates for a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_resolves(page):
    links = re.findall(r"\]\(([^)\s]+)\)", prose(text_of(page)))
    for link in links:
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_rows_of_a_table_have_as_many_cells_as_its_head(page):
    for table in re.findall(r"(?:^\|.*\|\n)+", prose(text_of(page)), re.MULTILINE):
        cells = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert len(set(cells)) == 1, table.splitlines()[0]


def test_the_readme_is_short():
    lines = text_of(ROOT / "README.md").splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


def test_pictures_are_small():
    assert max(path.stat().st_size for path in DOCS.glob("*.svg")) < 150_000


# Commands shown in the pages


def shown_commands() -> list[tuple[str, str]]:
    """(page, command) of every `rlvr ...` in a block or in the text."""
    found = []
    for page in PAGES:
        text = text_of(page)
        for block in blocks(text, "sh", "console", ""):
            joined = re.sub(r"\\\n(?:> )?\s*", " ", block)
            found += [
                (page, line) for line in re.findall(r"(?:^|[$>;&] |do )\s*(rlvr [a-z][^\n]*)", joined, re.MULTILINE)
            ]
        found += [(page, code) for code in re.findall(r"`(rlvr [a-z][^`\n]*)`", prose(text))]
    return [(name_of(page), re.sub(r"\s+#.*|; done.*| && .*", "", line)) for page, line in found]


def test_every_command_shown_exists():
    commands = shown_commands()
    assert len(commands) > 100
    queries, configs = {*named_queries(), "report"}, reference_script().configs()
    for page, line in commands:
        words = shlex.split(line)
        assert words[1] in configs, (page, line)
        known = {flag(o.name) for o in options(configs[words[1]])}
        if words[1] == "sweep" and words[2:3] and words[2] in experiment_names():  # the options of its command, too
            known |= {flag(o.name) for o in options(configs[load_experiment(words[2]).command])}
        known |= {f"--no-{name[2:]}" for name in known} | {"--help", "--help-all"}
        for word in words[2:]:
            assert not word.startswith("--") or word.split("=")[0] in known, (page, line)
        if words[1] == "analyze" and words[2:] and re.fullmatch(r"[a-z_]+", words[2]):
            assert words[2] in queries | {"grpo"}, (page, line)


def test_every_choice_is_documented():
    def documented(page: str, names: object) -> None:
        text = text_of(DOCS / page)
        missing = [name for name in names if f"`{name}`" not in text]  # type: ignore[attr-defined]
        assert not missing, page

    documented("data.md", [*GRADERS, *FAILURE_KINDS, *dataset_names()])
    page = text_of(DOCS / "analysis.md")
    assert set(named_queries()) == set(re.findall(r"^### (\w+)$", page, re.MULTILINE))
    reference = reference_script()
    grpo, evaluation = ({o.name: o for o in options(reference.configs()[name])} for name in ("grpo", "eval"))
    documented("engines.md", reference.choices(evaluation["engine"])[1:])
    for name in ("loss_type", "length_normalization"):
        documented("algorithms.md", [choice for choice in reference.choices(grpo[name]) if ".py" not in choice])
    presets = {path.stem for path in (ROOT / "rlvr_cli/config/presets").glob("*.toml")}
    documented("options/presets.md", presets)
    assert [p for p in PROBLEMS if p not in " ".join(re.findall(r"^## (.+)$", text_of(GUIDE), re.MULTILINE))] == []


def test_what_is_left_out_is_named_with_a_reason():
    _, _, section = text_of(DOCS / "algorithms.md").partition("\n## Not here, and why\n")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", section.partition("\n## ")[0], re.MULTILINE)
    reasons = {name: reason for names, reason in rows for name in names.split(", ")}
    wanted = """
        RLOO as an option, REINFORCE++ without groups, ReMax, GPG, SAPO, GMPO, VESPO, LUSPO, dual clip, k1 in the loss,
        adaptive KL controllers, entropy bonus, IPO, KTO, ORPO, a learned reward model, PRM, MCTS, a curriculum command
    """
    assert {name for name in " ".join(wanted.split()).split(", ") if len(reasons.get(name, "")) < 20} == set()


# Reference tables


@functools.cache
def reference_script(name="make_reference"):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_match_the_code():
    assert reference_script().stale() == []


@pytest.mark.slow
def test_a_stale_table_and_an_undescribed_column_are_detected(monkeypatch, tmp_path):
    script = reference_script()
    shutil.copytree(DOCS, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.svg", "*.png"))
    monkeypatch.setattr(script, "DOCS", tmp_path)
    monkeypatch.setattr(script, "LOSSES", script.LOSSES | {"another": script.LOSSES["grpo_clip"]})
    runs, options_page, group_page = (tmp_path / name for name in ("runs.md", "options.md", "options/sampling.md"))
    runs.write_text(text_of(runs).replace("| the text that the model wrote; the stop string is kept |", "|  |"))
    options_page.write_text(
        text_of(options_page).replace("| `--n-grpo-steps INT` | `200` |", "| `--n-grpo-steps INT` | `9` |")
    )
    group_page.write_text(text_of(group_page).replace("Temperature; 0 is greedy.", "Temperature."))
    (tmp_path / "analysis.md").unlink()
    algorithms = tmp_path / "algorithms.md"
    algorithms.write_text(text_of(algorithms).replace("| handout, equation 34 |", "|  |"))
    wrong = script.stale()
    assert any(line.startswith("algorithms.md: losses is stale") for line in wrong)
    assert "algorithms.md: say where the loss another comes from" in wrong
    assert "algorithms.md: say where the loss grpo_no_clip comes from" in wrong
    assert "runs.md: say what the column response means" in wrong
    assert any(line.startswith("options.md: options is stale") for line in wrong)
    assert any(line.startswith("options/sampling.md: options of sampling is stale") for line in wrong)
    assert "no page has the table: queries" in wrong


class Row(NamedTuple):
    """A row of an option in a table."""

    typed: str
    default: str
    said: str


def option_rows(text: str) -> dict[str, Row]:
    """The rows of the options in a text, by the option's name."""
    text = text.replace(r"\|", "|").replace("&lt;", "<").replace(" †", "")
    rows = [Row(*cells) for cells in re.findall(r"^\| `([^`]+)` \| (.*?) \| (.*) \|$", text, re.MULTILINE)]
    return {re.split("[ ,]", row.typed)[0]: row for row in rows}


def described_options() -> tuple[dict[str, str], dict[str, dict[str, dict[str, Row]]]]:
    """The section of each command in options.md; and page -> command -> the options that the page describes."""
    parts = re.split(r"^## rlvr (\w+)$", text_of(DOCS / "options.md"), flags=re.MULTILINE)
    pages: dict[str, dict[str, dict[str, Row]]] = {}
    for page in (DOCS / "options").glob("*.md"):
        for commands, table in re.findall(r"^Options of (.*):\n\n((?:\|.*\n)+)", text_of(page), re.MULTILINE):
            for command in re.findall(r"`(\w+)`", commands):
                pages.setdefault(f"options/{page.name}", {}).setdefault(command, {}).update(option_rows(table))
    return dict(zip(parts[1::2], parts[2::2], strict=True)), pages


def test_every_option_is_found_from_the_table_of_its_command():
    script = reference_script()
    sections, pages = described_options()
    assert list(sections) == list(script.configs())
    for command, config in script.configs().items():
        rows = option_rows(sections[command])
        seen = re.findall(r"See \[\w+\]\((options/\w+\.md)\) for (.*?)\.(?: |$)", sections[command], re.MULTILINE)
        elsewhere = {name: pages[page][command] for page, names in seen for name in re.findall("`([^`]+)`", names)}
        for option in options(config):
            kind = script.value_type(option)
            name = flag(option.name)
            if option.metadata["argument"]:
                name = option.name.upper() + "..." * kind.repeatable
            described = elsewhere.pop(name, rows)[name]
            assert described.said.startswith(option.metadata["help"]), (command, name)
            default = rows.pop(name, described).default
            assert default == script.shown(option.default) or (default == "none" and not option.default), (
                command,
                name,
            )
        assert (rows, elsewhere) == ({}, {}), command


def test_no_option_is_described_twice():
    sections, pages = described_options()
    rows = [row for section in sections.values() for row in option_rows(section).values()]
    shared = {
        (page, row) for page, commands in pages.items() for having in commands.values() for row in having.values()
    }
    described = [(row.typed, row.said) for row in rows if not row.said.startswith("See [")]
    described += [(row.typed, row.said) for _, row in shared]
    assert len(described) > 250
    assert [key for key, count in collections.Counter(described).items() if count > 1] == []


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1, "1"),
        (0, "0"),
        (1.0, "1.0"),
        (0.3, "0.3"),
        (True, "true"),
        (False, "false"),
        (None, "null"),
        ("eval", "eval"),
    ],
)
def test_the_default_of_a_parameter_is_shown_as_it_is_given(value, shown):
    assert reference_script().value_text(value) == shown


def test_every_metric_is_documented_and_every_documented_one_exists():
    table = re.search(r"## Metrics\n.*", text_of(DOCS / "algorithms.md"), re.DOTALL)
    assert table is not None
    documented = set(re.findall(r"`([a-z_]+/[a-z_0-9/N]+)`", table[0]))
    source = "".join(path.read_text() for path in sorted((ROOT / "rlvr_cli").rglob("*.py")))
    literal = set(re.findall(r"\"([a-z_]+/[a-z_]+)\"", source))
    areas = {name.split("/")[0] for name in documented}
    assert {name for name in literal if name.split("/")[0] in areas} - documented == set()
    made = {
        "policy/ratio_",
        "policy/clip_fraction",
        "policy/chosen_nll_mean",
        "mismatch/ratio_",
        "mismatch/position/",
        "mismatch/length/",
    }
    assert {name for name in documented - literal if not name.startswith(tuple(made))} == set()


# The guide, as typed


class Step(NamedTuple):
    """A command of a console block and the output shown for it."""

    section: str
    command: str
    shown: list[str]


def guide_steps() -> list[Step]:
    steps: list[Step] = []
    for part in re.split(r"^## ", text_of(GUIDE), flags=re.MULTILINE):
        section = part.partition("\n")[0]
        for block in blocks(part, "console"):
            for line in block.splitlines():
                if line.startswith("$ "):
                    steps.append(Step(section, line[2:], []))
                elif line.startswith("> "):
                    steps[-1] = steps[-1]._replace(command=f"{steps[-1].command}\n{line[2:]}")
                else:
                    steps[-1].shown.append(line)
    return steps


def pattern_of(line: str) -> re.Pattern[str]:
    """Return a shown line as a pattern: a number matches any number, `...` matches anything."""
    return re.compile(r".*".join(re.escape(part.strip()).replace(r"\ ", " *") for part in normal(line).split("...")))


def normal(line: str) -> str:
    return re.sub(r"\s+", " ", NUMBER.sub("0", line)).strip()


def run_steps(steps: list[Step], folder: Path, forks: Forks) -> None:
    """Run the commands in one shell and check that their output contains the lines that the guide shows."""
    programs = folder / "bin"
    programs.mkdir()
    script = programs / "python"  # a link to it would be in no environment
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    script.chmod(0o755)
    lines = ["exec 2>&1", "failed=0; trap 'failed=1' ERR"]  # the trap also catches a failing command inside a loop
    for step in steps:
        lines += [step.command, "echo; echo @@ $failed; failed=0"]
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with typed(forks.popen, programs):
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines)],
            cwd=folder,
            env={**os.environ, **environment, "HF_HUB_OFFLINE": "1", "HF_DEACTIVATE_ASYNC_LOAD": "1"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=3600,
        )
    outputs = re.split(r"^@@ (\d+)\n", done.stdout, flags=re.MULTILINE)
    assert len(outputs) == 2 * len(steps) + 1
    wrong = []
    for step, output, status in zip(steps, outputs[0::2], outputs[1::2], strict=False):
        printed = [normal(line) for line in output.splitlines()]
        shown = [line for line in step.shown if line.strip("-. ")]
        missing = [line for line in shown if not any(pattern_of(line).fullmatch(text) for text in printed)]
        if missing or status != "0":
            wrong.append(
                "\n".join([f"$ {step.command}", "fails" if status != "0" else "lacks", *missing, "of", output])
            )
    assert not wrong, "\n\n".join(wrong)


def test_the_patterns_of_shown_lines():
    assert pattern_of("accuracy   0.49 ... wilson").fullmatch(normal("accuracy  0.4922   0.43   0.55   wilson"))
    assert not pattern_of("accuracy   0.49   wilson").fullmatch(normal("accuracy  0.4922   –   wilson"))
    assert pattern_of("steps: 12/12 (100%), ... grad 0.8,").fullmatch(
        normal("steps: 12/12 (100%), a 1e-05, grad -0.1,")
    )
    assert not pattern_of("example arithmetic-0").fullmatch(normal("example countdown-7"))


@pytest.mark.parametrize(
    ("command", "shown"),
    [("echo hello", "goodbye"), ("for n in 1 2; do echo 'a  1'; test $n = 2; done", "a  1")],
)
def test_a_command_that_fails_or_prints_something_else_is_detected(tmp_path, forks, command, shown):
    with pytest.raises(AssertionError):
        run_steps([Step("", command, [shown])], tmp_path, forks)


def test_a_command_of_the_guide_works_as_typed(tmp_path, forks):
    """The one that needs no model; the slow test types them all."""
    run_steps([step for step in guide_steps() if step.command.endswith("--check-dataset")], tmp_path, forks)


@pytest.mark.first
@pytest.mark.slow
def test_the_whole_guide_works_as_typed(tmp_path, forks):
    steps = guide_steps()
    assert len(steps) > 30
    run_steps(steps, tmp_path, forks)
    pictures = {name for step in steps for name in re.findall(r"--plot (\S+)", step.command)}
    assert len(pictures) > 8
    assert all((tmp_path / name).stat().st_size > 5_000 for name in pictures)


def test_the_python_code_of_the_guide_gives_the_output_shown():
    examples = "\n".join(blocks(text_of(GUIDE), "pycon"))
    test = doctest.DocTestParser().get_doctest(examples, {}, "guide.md", str(GUIDE), 0)
    assert len(test.examples) > 25
    printed: list[str] = []
    with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):  # transformers draws a bar
        results = doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
    assert results.failed == 0, "".join(printed)


# Reports of experiments


def test_the_page_of_an_experiment_has_the_pictures_that_are_not_large(tmp_path):
    report = tmp_path / "report"
    report.mkdir()
    for name, size in (("held_out.svg", 10), ("minutes.svg", 10), ("curves.svg", 300_000)):
        (report / name).write_text("x" * size)
    pictures = "\n\n".join(f"![{name}]({name})" for name in ("held_out.svg", "minutes.svg", "curves.svg"))
    (report / "report.md").write_text(f"# Who?\n\nLook.\n\n{pictures}\n\n### arms\n\n```text\na\n\n\nb\n```\n")
    page = tmp_path / "page"
    reference_script("make_experiments").copy_report(report, page, command="rlvr sweep x")
    assert sorted(path.name for path in page.iterdir()) == ["README.md", "held_out.svg", "minutes.svg"]
    assert (page / "README.md").read_text() == (
        "# Who?\n\n```sh\nrlvr sweep x\n```\n\nLook.\n\n![held_out.svg](held_out.svg)\n\n![minutes.svg](minutes.svg)\n\n"
        "### arms\n\n```text\na\n\n\nb\n```\n"
    )


# Fields of KubeRay's API, ray.io/v1, as its reference lists them.
RAY_JOB = {
    "activeDeadlineSeconds", "backoffLimit", "rayClusterSpec", "submitterPodTemplate", "clusterSelector", "submitterConfig", "managedBy",
    "deletionStrategy", "entrypoint", "runtimeEnvYAML", "jobId", "submissionMode", "entrypointResources", "entrypointNumCpus",
    "entrypointNumGpus", "ttlSecondsAfterFinished", "shutdownAfterJobFinishes", "suspend",
}  # fmt: skip
RAY_GROUP = {"template", "rayStartParams", "groupName", "replicas", "minReplicas", "maxReplicas", "serviceType"}


def test_the_job_for_kubernetes_has_fields_that_there_are_and_a_command_that_is_taken():
    import yaml

    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/engines.md").read_text(), re.DOTALL)
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert set(spec) <= RAY_JOB
    head, (group,) = spec["rayClusterSpec"]["headGroupSpec"], spec["rayClusterSpec"]["workerGroupSpecs"]
    assert set(head) | set(group) <= RAY_GROUP
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    _, command, *words = shlex.split(spec["entrypoint"])
    config = resolve(config_of(command), flags=values_of(config_of(command), words, command=command), command=command)
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"]) * (1 + group["replicas"])
    assert config.trainers + config.samplers == gpus
    assert config.runs_dir.startswith(container["volumeMounts"][0]["mountPath"])
