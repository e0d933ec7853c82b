"""What identifies a model in run.json, and the sizes in its config.

Enters: a directory or a hub name. Leaves: names, hashes and sizes; no weights are loaded, and heavy libraries are imported only
for local files, so that endpoints do not need them.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.directory import base_of, local_directory, snapshot_of, weight_files
from rlvr_cli.runs.check import base_sha256, check_trained_model
from rlvr_cli.runs.provenance import tokenizer_digest
from rlvr_cli.runs.remote.store import is_address
from rlvr_cli.runs.remote.views import address_of, folder_of
from rlvr_cli.text import printable

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # how configs call their number


def builtin_model_path() -> Path:
    """The directory of the tiny model that comes with the package."""
    return Path(__file__).parents[1] / "assets" / "tiny-math"


def model_identity(path_or_id: str | Path, *, fetch: bool = False) -> dict[str, Any]:
    """Return what run.json stores about a model, enough to tell later whether it is the same one.

    Args:
        fetch: download a Hub model that is not on this machine.

    Returns:
        `path` or `id` (with the Hub's `revision`), and, if its weights are on this machine, `sha256` (of the list of
        weight files with their SHA-256), `bytes`, `parameters` (stored ones: tied weights count once), and the
        tokenizer's `tokenizer_sha256`. Of an adapter these are its own, and `base` and `base_sha256` its base's.

    Raises:
        RlvrError: a path with no model in it, or a damaged one; an adapter whose base is not there, or is not the one that a
            run trained it on.
    """
    check_trained_model(Path(path_or_id).absolute())  # first: it names the file that is missing or damaged
    directory = local_directory(path_or_id)
    if directory is not None:
        identity = {"path": str(directory.resolve()), **_weights_identity(directory)}
        base = base_of(directory)
        return identity if base is None else identity | _base_identity(directory, base, fetch=fetch)
    if fetch:
        from rlvr_cli.models.pretrained import fetch_model

        fetch_model(str(path_or_id))
    snapshot = snapshot_of(str(path_or_id))
    if snapshot is None:
        return {"id": str(path_or_id), "revision": None}
    return {"id": str(path_or_id), "revision": snapshot.name, **_weights_identity(snapshot)}


def _base_identity(adapter: Path, base: str, *, fetch: bool) -> dict[str, Any]:
    found, where = model_identity(base, fetch=fetch).get("sha256"), address_of(Path(base)) or base
    trained_on = base_sha256(adapter.absolute())
    if None not in (found, trained_on) and found != trained_on != _earlier_sha256(base):
        raise RlvrError(
            f"The adapter in {printable(str(adapter))} was trained on other weights than those that are now in {printable(where)}.",
            "Put these weights back.",
        )
    return {"base": where, "base_sha256": found}


def _earlier_sha256(model: str) -> str | None:
    """The sha256 of a model in the runs of earlier versions, which also hashed weights that are not loaded."""
    directory = local_directory(model) or snapshot_of(model)
    return _sha256(sorted(directory.glob("*.safetensors"))) if directory is not None else None


def model_shape(path_or_id: str | Path) -> dict[str, int] | None:
    """Return the sizes of a model on this machine, for memory estimates.

    The keys are parameters, layers, hidden, intermediate, gates (1 if the MLP has a gate beside its up and down projections,
    else 0), query_width and kv_width (heads and key-value heads times head size) and vocabulary; and dense_layers: those whose MLP
    is of linear layers, none in a mixture of experts.
    None if its files are not here or its config has other names for these sizes. Of an adapter, those of its base.

    Raises:
        RlvrError: its files are damaged, or transformers has no such model.
    """
    from transformers import AutoConfig

    from rlvr_cli.models.pretrained import LOAD_ERRORS, load_error, quiet

    path_or_id = base_of(path_or_id) or path_or_id
    directory = local_directory(path_or_id) or snapshot_of(str(path_or_id))
    if directory is None:
        return None
    try:
        with quiet():
            config = AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            ).get_text_config()
        mixture = any(getattr(config, name, None) not in (None, 0, 1) for name in _EXPERTS)
        mixture &= getattr(config, "is_moe", True)  # a Doge's config has a number of experts also where there are none

        def size(name: str) -> int | None:
            return getattr(config, name, None)

        hidden, heads, shapes = config.hidden_size, config.num_attention_heads, _stored_shapes(directory)
        head_size = size("head_dim") or hidden // heads
        return {
            "parameters": sum(map(math.prod, shapes.values())),
            "layers": config.num_hidden_layers,
            "dense_layers": 0 if mixture else config.num_hidden_layers,
            "hidden": hidden,
            "intermediate": size("intermediate_size") or size("n_inner") or 4 * hidden,
            "gates": int(any("gate" in name for name in shapes)),
            "query_width": heads * head_size,
            "kv_width": (size("num_key_value_heads") or heads) * head_size,
            "vocabulary": config.vocab_size,
        }
    except AttributeError:
        return None
    except LOAD_ERRORS as error:
        raise load_error("model", str(path_or_id), directory, error) from error


def _weights_identity(directory: Path) -> dict[str, Any]:
    files, shapes = weight_files(directory), _stored_shapes(directory)  # which names a damaged file
    _check_tokenizer(directory)
    return {
        "sha256": _sha256(files),
        "bytes": sum(path.stat().st_size for path in files),
        "parameters": sum(map(math.prod, shapes.values())),
        "tokenizer_sha256": tokenizer_digest(directory),
    }


def _stored_shapes(directory: Path) -> dict[str, list[int]]:
    """The shapes of the stored parameters by name, from the files' headers alone: all weights take minutes to read where these are large.

    Masks of attention, which older versions of transformers have stored with GPT-2 and GPT-NeoX, are none.
    """
    from safetensors import SafetensorError, safe_open

    try:
        shapes: dict[str, list[int]] = {}
        for path in weight_files(directory):
            with safe_open(path, framework="np") as tensors:  # shapes need no torch
                shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118 (it is no mapping)
        return {name: shape for name, shape in shapes.items() if shape[:2] != [1, 1]}
    except SafetensorError as error:
        from rlvr_cli.models.pretrained import load_error

        raise load_error("model", str(directory), directory, error) from error


def _check_tokenizer(directory: Path) -> None:
    """Raise RlvrError if a file of the tokenizer is damaged: found when the model is loaded, a run would be there that sampled nothing."""
    for file in (directory / "tokenizer.json", directory / "tokenizer_config.json"):
        try:
            json.loads(file.read_bytes() if file.is_file() else "{}")
        except (OSError, ValueError, RecursionError) as error:
            from rlvr_cli.models.pretrained import load_error

            raise load_error("tokenizer", str(directory), directory, error) from error


def _sha256(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def model_path(model: str) -> str:
    """Return `model`, or a path on this machine: of the built-in model if it is empty, of what was fetched if it is in object storage.

    Raises:
        RlvrError: there is no such folder in object storage, or it cannot be fetched.
    """
    return str(folder_of(model)) if is_address(model) else model or str(builtin_model_path())


def model_line(facts: Mapping[str, Any]) -> str:
    """A model of `model_facts` on one line of a plan."""
    known = "sha256" in facts or "endpoint" in facts
    return facts["name"] + ("" if known else ": its files are not on this machine, so nothing of it is checked")


def model_facts(model: str, *, base_url: str = "", fetch: bool = True) -> dict[str, Any]:
    """Return what identifies the model in run.json: its name and, if its files are local, their hashes.

    Args:
        base_url: the address of the endpoint that has the model; empty: its files are local, or on the hub.
        fetch: download a hub model that is not on this machine yet, so that its hashes are known from the start.
    """
    if base_url:
        return {"name": model, "endpoint": base_url}
    identity = model_identity(model_path(model), fetch=fetch)
    if is_address(model):
        identity["path"] = model  # on each machine that of the cache is another
    return {"name": model or "tiny-math (built in; name another with --model)", **identity}
