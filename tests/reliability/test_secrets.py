"""A canary key goes through every way in: it is in no file, no output, no error and no page.

The canaries have the forms of keys, and the form of no key. (What the workers of graders inherit is tested beside them.)
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from endpoint import Endpoint, Reply, completion, error, serving
from forks import Done, Forks

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

CANARIES = ("sk-canary-4f1d9a77", "hf_Canary4f1d9a77Canary4f1d", "Canary-4f1d9a77.x")
# As options and as files; CANARY and URL stand for the key and the endpoint's address.
MISTYPED = (
    ["--base-url", "http://me:CANARY@127.0.0.1:1/v1"],
    ["--base-url", "http://CANARY@127.0.0.1:1/v1"],
    ["--base-url", "http://127.0.0.1:1/v1?api_key=CANARY"],
    ["--base-url", "http://127.0.0.1:1/v1?token=CANARY&n=3"],
    ["--base-url", "http://127.0.0.1:1/v1?x=CANARY"],
    ["--base-url", "http://127.0.0.1:1/v1#CANARY"],
    ["--base-url", "http://127.0.0.1:1/CANARY/v1"],
    ["--base-url", "http://127.0.0.1:99999/CANARY"],
    ["--base-url", "http://CANARY:CANARY:1/v1"],
    ["--base-url", "http://[CANARY]/v1"],
    ["--base-url", "me:CANARY@127.0.0.1"],
    ["--base-url", "CANARY"],
    ["--base-url", "URL", "--api-key-env", "CANARY"],
    ["--base-url", "URL", "--api-key-env=CANARY"],
    ["--base-url", "URL", "--api-key", "CANARY"],
    ["--base-url", "URL", "--api-key=CANARY"],
    ["--base-url", "URL", "--header", "Authorization: Bearer CANARY"],
    ["--base-url", "URL", "--model", "CANARY"],
    ["--base-url", "URL", "--endpoint", "CANARY"],
    ["--base-url", "URL", "--request-timeout", "CANARY"],
    ["--base-url", "URL", "--dataset", "https://me:CANARY@127.0.0.1:1/x.jsonl"],
    ["--base-url", "URL", "--dataset", "hf:CANARY/x"],
    ["--base-url", "URL", "--prompt", "holds-the-key.txt"],
    ["--base-url", "URL", "--stop", "CANARY"],
    ["--base-url", "URL", "--preset", "CANARY"],
    ["--base-url", "URL", "--grader", "CANARY"],
    ["--base-url", "URL", "--resume", "CANARY"],
    ["--base-url", "URL", "CANARY"],
)
FILES = (
    'base_url = "http://me:CANARY@127.0.0.1:1/v1"',
    'base_url = "http://127.0.0.1:1/v1?api_key=CANARY"',
    'base_url = ["http://me:CANARY@127.0.0.1:1/v1?key=CANARY"]',
    'base_url = "URL"\napi_key_env = "CANARY"',
    'base_url = "URL"\napi_key_env = ["CANARY"]',
    'base_url = "URL"\napi_key = "CANARY"',
    'base_url = "URL"\nextra_headers = {authorization = "Bearer CANARY"}',
    'base_url = "URL"\n[eval]\nprompt = "CANARY"',
    'base_url = "URL"\nnum_samples = "CANARY"',
)


def good(body: dict) -> Reply:
    return completion("4 </answer>", stop_reason="</answer>")


def called(forks: Forks, folder: Path, *options: str, canary: str) -> Done:
    """Run `rlvr eval` with the key in the usual variable."""
    folder.mkdir(exist_ok=True)
    usual = [*(["--model", "m"] if "--model" not in options else []), "--limit", "3", "--run", "r"]
    usual += ["--dataset", "arithmetic:3"] if "--dataset" not in options else []
    return forks.run(
        "eval", *usual, *options, cwd=folder, environment={"OPENAI_API_KEY": canary, "OPENAI_LOG": "debug"}
    )


def sightings(canary: str, folder: Path, *calls: Done) -> list[str]:
    """Where the canary is: in files and their names, and in what calls said."""
    found = [f"said: {done.said}" for done in calls if canary in done.said]
    for path in folder.rglob("*"):
        if canary in path.name or (path.is_file() and canary.encode() in path.read_bytes()):
            found.append(str(path))
    return found


def mistype(forks: Forks, endpoint: Endpoint, folder: Path, options: list[str], *, canary: str) -> list[str]:
    """Call with a key in the wrong place; what is wrong with how that ends."""
    typed = [option.replace("CANARY", canary).replace("URL", endpoint.url) for option in options]
    own = folder.parent / "own.txt"  # the user's own file, which holds the key
    own.write_text(f"{canary} {{question}}")
    done = called(forks, folder, *[str(own) if o == "holds-the-key.txt" else o for o in typed], canary=canary)
    problems = sightings(canary, folder, done)
    problems += [f"status {done.status}: {done.said}"] * (done.status not in (1, 2) or "Traceback" in done.said)
    return problems


def test_a_key_in_a_wrong_place_is_refused_without_being_shown_or_stored(forks: Forks, tmp_path: Path):
    wrong = {}
    with serving(good) as endpoint:
        for number, options in enumerate(MISTYPED[::4]):
            canary = CANARIES[number % len(CANARIES)]
            if problems := mistype(forks, endpoint, tmp_path / str(number), options, canary=canary):
                wrong[" ".join(options)] = problems
    assert not wrong


@pytest.mark.full
def test_every_key_in_every_wrong_place(forks: Forks, tmp_path: Path, figures: dict):
    wrong, tried = {}, 0
    with serving(good) as endpoint:
        for canary in CANARIES:
            for options in MISTYPED:
                tried += 1
                if problems := mistype(forks, endpoint, tmp_path / str(tried), list(options), canary=canary):
                    wrong[canary, *options] = problems
            for text in FILES:
                tried += 1
                file = tmp_path / "config.toml"
                file.write_text(text.replace("CANARY", canary).replace("URL", endpoint.url))
                if problems := mistype(forks, endpoint, tmp_path / str(tried), ["--config", str(file)], canary=canary):
                    wrong[canary, text] = problems
    assert not wrong
    figures |= {"places of a canary key": tried, "occurrences": 0}


def repeating(canary: str, *, well: list[bool]) -> Callable[[dict], Reply]:
    """An endpoint that repeats the key in whatever it says."""

    def answer(body: dict) -> Reply:
        number = len(asked)
        asked.append(body)
        if well or number == 0:
            return completion(
                f"{canary} </answer>", stop_reason=canary, logprobs={"tokens": [canary], "token_logprobs": [-1]}
            )
        return (
            error(500, f"bad key {canary}", retry_after_ms="1"),
            Reply(json.dumps({"choices": [], "key": canary}), headers={"retry-after-ms": "1"}),
            completion("4 </answer>", canary),
            error(400, f"Incorrect API key provided: {canary}", x_key=canary),
        )[number % 4]

    asked: list[dict] = []
    return answer


@pytest.mark.full
@pytest.mark.parametrize("canary", CANARIES)
def test_a_key_that_the_endpoint_repeats_is_hidden(forks: Forks, tmp_path: Path, canary: str):
    well: list[bool] = []
    with serving(repeating(canary, well=well)) as endpoint:
        failed = called(forks, tmp_path, "--base-url", endpoint.url, "--num-samples", "8", canary=canary)
        assert failed.status == 1
        assert "[key]" in failed.err
        well.append(True)
        environment = {"OPENAI_API_KEY": canary}
        done = forks.run("eval", "--resume", "r", "--format", "json", cwd=tmp_path, environment=environment)
        assert done.status == 0, done.err
        assert set(endpoint.keys) == {f"Bearer {canary}"}
    reads = [
        forks.run("analyze", *words, cwd=tmp_path, environment=environment)
        for words in (["report", "r"], ["select * from rollouts", "r", "--format", "csv"])
    ]
    assert [read.status for read in reads] == [0, 0], [read.err for read in reads]
    assert "[key]" in reads[1].out, "the response repeats the key"
    assert sightings(canary, tmp_path, failed, done, *reads) == []
    assert (tmp_path / "runs/r/report.html").exists()
