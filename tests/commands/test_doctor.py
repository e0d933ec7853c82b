"""`rlvr doctor`: what works is said to work, and what does not is named, in words, without stopping the rest."""

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
import torch

from rlvr_cli.commands import doctor
from rlvr_cli.config.doctor import DoctorConfig
from rlvr_cli.models.identity import model_path
from rlvr_cli.models.load import load_policy
from rlvr_cli.process import import_error
from rlvr_cli.runs.provenance import EXTRAS, environment
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.samplers.open import ENGINES, EngineKind, EngineSettings
from rlvr_cli.terminal.findings import Section
from rlvr_cli.training.parallel.placement import Placement
from rlvr_cli.training.planning import trial
from rlvr_cli.types import Request

ROOT = Path(__file__).parents[2]
ON_CPU = Placement("cpu", "cpu")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch that cannot use a GPU")


def verdicts(section: Section) -> dict[str, str]:
    return {row["what"]: row["verdict"] for row in section.table.records()}


def row(section: Section, what: str) -> dict[str, str]:
    return next(row for row in section.table.records() if row["what"] == what)


@pytest.fixture
def broken(tmp_path):
    """Add a package that is found before the real one and whose import runs this code."""

    def add(name: str, code: str) -> Path:
        (tmp_path / "broken" / name).mkdir(parents=True)
        (tmp_path / "broken" / name / "__init__.py").write_text(code)
        return tmp_path / "broken"

    return add


@pytest.fixture
def few_packages(monkeypatch):
    """Look for these packages alone: each is imported in a process of its own."""
    monkeypatch.setattr(doctor, "PACKAGES", ("pyarrow",))
    monkeypatch.setattr(doctor, "EXTRAS", {"aiohttp": "openai"})


def started(
    packages: tuple[str, ...], extra: tuple[str, ...], *words: str, cwd: Path, path: Path
) -> subprocess.CompletedProcess[str]:
    """The script in a process that finds packages in `path` first, and looks for these alone: needed ones, extras."""
    code = f"from rlvr_cli.commands import doctor as d; d.PACKAGES, d.EXTRAS = {packages}, dict.fromkeys({extra})"
    return subprocess.run(
        [sys.executable, "-c", f"{code}; from rlvr_cli.cli import main; main()", "doctor", *words],
        cwd=cwd, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"},
    )  # fmt: skip


@no_gpu
def test_a_sound_machine(few_packages, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    doctor.run(DoctorConfig(format="json"))
    sections = {
        title: {row["what"]: row for row in rows} for title, rows in json.loads(capsys.readouterr().out).items()
    }
    assert [*sections] == ["Installed", "Devices", "Used in training", "Tried"]
    assert {row["verdict"] for rows in sections.values() for row in rows.values()} <= {"ok", "note"}
    assert [*sections["Installed"]] == ["Python", "pyarrow", "aiohttp"]
    assert sections["Installed"]["pyarrow"]["found"] == pyarrow.__version__
    assert "cores" in sections["Devices"]["cpu"]["found"]
    assert f"GiB free in {tmp_path}" in sections["Devices"]["runs directory"]["found"]
    assert sections["Used in training"]["engine"]["found"].startswith("transformers: ")
    assert sections["Used in training"]["--param-dtype float32"]["found"] == "computes in float32, attention sdpa"
    assert [*sections["Tried"]] == [
        "grading",
        "cpu: update",
        "cpu, transformers: start",
        "cpu, transformers: sampling",
        "cpu, transformers: weights",
    ]
    assert all(row["seconds"] > 0 for row in sections["Tried"].values())
    assert sections["Tried"]["cpu, transformers: weights"]["found"].startswith("verified in ")
    assert not [*tmp_path.iterdir()]  # it writes nothing


@pytest.mark.slow
def test_packages_that_cannot_be_imported(broken, tmp_path):
    broken("aiohttp", "raise ImportError('libx.so: cannot open\\nmore lines')")
    path = broken("datasets", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    result = started((), ("aiohttp", "datasets"), "--quick", "--format", "json", cwd=tmp_path, path=path)
    assert (result.returncode, "Traceback" in result.stderr) == (1, False)
    assert "error: 2 things do not work: aiohttp; datasets." in result.stderr
    sections = json.loads(result.stdout)
    found = {row["what"]: row for row in sections["Installed"]}
    assert found["aiohttp"]["found"].endswith(", cannot be imported: ImportError: libx.so: cannot open")
    assert found["datasets"]["found"].endswith(", cannot be imported: its import ends with SIGKILL")
    assert "pyproject.toml" in found["aiohttp"]["to do"]
    assert "Used in training" in sections  # neither is needed
    assert "Tried" not in sections  # --quick


def test_without_a_package_that_rlvr_needs_nothing_is_tried(broken, tmp_path):
    result = started(
        ("torch",), (), cwd=tmp_path, path=broken("torch", "raise OSError('libcudart.so.13: no such file')")
    )
    assert (result.returncode, "Traceback" in result.stderr) == (1, False)
    assert "OSError: libcudart.so.13: no such file" in result.stdout
    assert "cores" in result.stdout
    assert "Mend these first." in result.stdout
    assert "torch" in result.stderr.partition("do")[2]


def test_an_engine_that_is_asked_for_and_not_installed(monkeypatch):
    missing = EngineKind("Nothing", ENGINES["vllm"].open, package="no_such_package", extra="no_such_package")
    monkeypatch.setitem(ENGINES, "vllm", missing)
    found, tried, _ = doctor.would_be_used(DoctorConfig(engine="vllm"))
    assert (found.problems, tried) == (["engine"], "transformers")
    assert row(found, "engine")["found"] == "Nothing is not installed."
    assert "pip install -e '.[no_such_package]'" in row(found, "engine")["to do"]


def test_an_import_that_hangs(broken, monkeypatch):
    monkeypatch.syspath_prepend(broken("slow_package", "import time; time.sleep(60)"))
    assert import_error("slow_package", seconds=0.5).startswith("its import takes more than")
    assert import_error("json") == ""
    assert import_error("no_such_package") == "ModuleNotFoundError: No module named 'no_such_package'"


def test_every_extra_has_a_line_for_pip():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, extra in EXTRAS.items():
        assert any(requirement.startswith(package) for requirement in extras[extra]), package


@no_gpu
def test_a_gpu_that_torch_cannot_use(tmp_path, monkeypatch):
    """The driver lists a GPU, and this torch is a build for CPUs."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\necho "GPU 0: NVIDIA H200 (UUID: GPU-1)"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = doctor.devices(DoctorConfig(), environment(), with_torch=True)
    assert found.problems == ["GPU"]
    assert row(found, "GPU")["found"].startswith("GPU 0: NVIDIA H200, which PyTorch cannot use: ")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert row(doctor.devices(DoctorConfig(), environment(), with_torch=True), "GPU")["verdict"] == "note"


def test_a_runs_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    found = doctor.devices(DoctorConfig(runs_dir=str(tmp_path / "file" / "runs")), environment(), with_torch=False)
    assert found.problems == ["runs directory"]
    assert str(tmp_path / "file") in row(found, "runs directory")["found"]


def test_runs_in_object_storage_are_made_in_a_folder_of_each_node(monkeypatch, tmp_path):
    monkeypatch.setenv("RLVR_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").write_text("no directory")
    found = doctor.on_cluster(DoctorConfig(cluster="127.0.0.1:1", runs_dir="s3://bucket/runs"))
    assert found.problems == ["127.0.0.1:1"]
    assert str(tmp_path / "cache") in row(found, "127.0.0.1:1")["found"]


def test_an_engine_that_does_not_start(monkeypatch):
    def refuse(settings: EngineSettings):
        raise RuntimeError("CUDA error: no kernel image\nmore lines")

    monkeypatch.setitem(ENGINES, "transformers", replace(ENGINES["transformers"], open=refuse))
    found = doctor.tries("transformers", ON_CPU)
    assert verdicts(found) == {"grading": "ok", "cpu: update": "ok", "cpu, transformers: start": "problem"}
    assert row(found, "cpu, transformers: start")["found"] == "RuntimeError: CUDA error: no kernel image"


def test_an_engine_that_samples_from_another_distribution(monkeypatch):
    class Lying(TransformersSampler):
        def sample(self, requests, params):
            for completion in super().sample(requests, params):
                yield replace(completion, logprobs=tuple(x - 1 for x in completion.logprobs))

    def lying(settings: EngineSettings):
        return Lying(load_policy(model_path(""), device="cpu"))

    monkeypatch.setitem(ENGINES, "transformers", replace(ENGINES["transformers"], open=lying))
    found = doctor.tries("transformers", ON_CPU)
    assert found.problems == ["cpu, transformers: sampling", "cpu, transformers: weights"]
    for what in found.problems:
        assert row(found, what)["found"].startswith(
            "The engine's log-probabilities differ from the trainer's by 1 nats"
        )
        assert row(found, what)["to do"].startswith("Engine and trainer do not compute the same model")


def test_an_update_that_fails(monkeypatch):
    monkeypatch.setenv("RLVR_FAULT", "backward:1:enospc")
    found = doctor.tries("transformers", ON_CPU)
    assert found.problems == ["cpu: update"]
    assert "No space left on device" in row(found, "cpu: update")["found"]


@pytest.mark.slow  # that they are looked at is seen where the engine samples from another distribution
def test_weights_that_cannot_be_loaded(monkeypatch):
    """The update before the load fails in its first backward pass, the third one."""
    monkeypatch.setenv("RLVR_FAULT", "backward:3:enospc")
    assert doctor.tries("transformers", ON_CPU).problems == ["cpu, transformers: weights"]


@pytest.mark.slow
def test_grading_that_fails(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/python")
    found = doctor.tries("transformers", ON_CPU)
    assert found.problems == ["grading"]
    assert "/no/python" in row(found, "grading")["found"]


@pytest.mark.slow
def test_an_engine_in_a_process_of_its_own(forked, monkeypatch):
    """An engine that cannot share the trainer's model, as vLLM cannot; the process says why it does not open."""
    alone = EngineKind("Alone", ENGINES["vllm"].open)
    monkeypatch.setitem(ENGINES, "alone", alone)
    found = doctor.tries("alone", ON_CPU)
    assert found.problems == ["cpu, Alone: start"]
    assert row(found, "cpu, Alone: start")["found"] == "There is no engine 'alone'."


def test_the_gap_between_engine_and_trainer():
    policy = load_policy(model_path(""), device="cpu")
    sampler = TransformersSampler(policy)
    answers = list(sampler.sample([Request("1 + 1 =", (0,)), Request("What is 12 + 30?", (0,))], trial.GREEDY))
    assert trial.mean_gap(policy, answers) < 1e-5
    shifted = [replace(c, logprobs=tuple(x + 0.5 for x in c.logprobs)) for c in answers]
    assert trial.mean_gap(policy, shifted) == pytest.approx(0.5, abs=1e-5)
