"""What a run has stored, as the batches that its updates trained on.

Enters: a run directory. Leaves: `StoredRun`: its options and what it logged; then `Batch` after `Batch`, made of the stored
rollouts, or of the traces that `rlvr sft` read.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rlvr_cli.config import config_of
from rlvr_cli.config.parsing.options import options
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.data.prompts import PromptTemplate
from rlvr_cli.data.traces import Traces, load_traces
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import model_identity, model_path
from rlvr_cli.models.tokens.tokenization import encode_prompts
from rlvr_cli.replay import formulas
from rlvr_cli.rollouts.grading import choose_grader, grader_pool
from rlvr_cli.runs.manifest import METRICS, ROLLOUTS, Entries
from rlvr_cli.runs.readers import parsed_table, part_tables, read_index, read_metadata, read_metrics, read_parts
from rlvr_cli.runs.storage.files import shown
from rlvr_cli.runs.storage.parquet import to_rollouts
from rlvr_cli.samplers.episodes.turns import chat_turns, environment_spec
from rlvr_cli.types import Conversation, Example, Metric, Phase, Rollout, SamplingParams

LOSSES = ("no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip", "gspo", "cispo", "kimi")


@dataclass(frozen=True)
class Response:
    """One response to train on."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    learned: Sequence[bool]  # per token: whether the loss counts it
    sampled: Sequence[float]  # per token, nats, as the sampler reported them; empty for a trace
    advantages: Sequence[float]  # per token; 0 for a trace


@dataclass(frozen=True)
class Batch:
    """Responses, and the updates that are made on them: the responses of each, by index."""

    responses: list[Response]
    updates: list[list[int]]


@dataclass(frozen=True)
class StoredRun:
    """A run's options and what it logged."""

    path: Path
    command: str
    options: dict[str, Any]  # of the command, by field name
    compute_dtype: str  # of matrix products; `auto` if it was not recorded
    facts: dict[str, Any]
    logged: list[dict[str, float]]  # per update, its metrics by name
    steps: dict[
        int, list[tuple[Phase, int]]
    ]  # policy version -> the (phase, step) of rollouts with tokens that it sampled
    by_batch: bool = False  # whether the learning rate goes by the planned updates of each batch

    @cached_property
    def entries(self) -> Entries:
        """The manifest, read once. In a run that is being written it is newer than `logged`, so that it has the rows of each update."""
        return Entries(read_index(self.path).entries)


def read_stored(path: Path) -> StoredRun:
    """Read a run's options and metrics.

    Raises:
        RlvrError: the run cannot be replayed: it is no run of a command that samples or trains, its loss is a user's own, its
            first weights are not on this machine, or a file is damaged.
    """
    metadata = read_metadata(path)
    command, stored, facts = metadata["command"], metadata.get("config"), metadata.get("facts")
    if command == "dpo":
        raise _cannot(path, "it is a run of rlvr dpo, and the replay knows no pairs")
    if command == "ppo":
        raise _cannot(path, "it is a run of rlvr ppo, and the replay knows no critic")
    if (
        command not in ("eval", "sft", "ei", "grpo", "distill")
        or not isinstance(stored, dict)
        or not isinstance(facts, dict)
    ):
        raise _cannot(path, f"it is a run of rlvr {command} without stored options")
    kind = config_of(command)
    known = {f.name for f in options(kind)}
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items() if k in known}
    values = {k: v for k, v in asdict(kind(**values)).items() if k in known}
    if command == "grpo" and values["loss_type"] not in LOSSES:
        raise _cannot(
            path, f"its loss is a function of your own, {values['loss_type']}, which only you can write a second time"
        )
    if facts.get("engine") == "openai":
        raise _cannot(path, "an endpoint sampled it, and did not say which tokens")
    _check_weights(path, values["model"], facts.get("model"), whose="its first weights")
    if values.get("teacher_url"):
        raise _cannot(path, "its teacher was on a server")
    if command == "distill":
        _check_weights(path, values["teacher"], facts.get("teacher"), whose="its teacher's weights")
    steps: dict[int, list[tuple[Phase, int]]] = {}
    for part in read_parts(path, columns=["policy_version", "token_versions", "phase", "step"]):
        of_tokens = zip(*(part[name].to_pylist() for name in part.column_names), strict=True)
        rows = {(v, phase, step) for first, more, phase, step in of_tokens for v in {first, *(more or ())}}
        for version, phase, step in rows:
            steps.setdefault(version, []).append((phase, step))
    return StoredRun(
        path=path,
        command=command,
        options=values,
        compute_dtype=str(metadata.get("policy", {}).get("compute_dtype", "auto")),
        facts=facts,
        by_batch=metadata.get("schedule") == "by_batch",
        logged=_logged(path),
        steps={version: sorted(set(found)) for version, found in steps.items()},
    )


def _cannot(path: Path, why: str) -> RlvrError:
    return RlvrError(f"{shown(path)} cannot be replayed: {why}.", "Leave --replay out: its files can still be checked.")


def _check_weights(path: Path, model: str, recorded: Any, *, whose: str) -> None:
    """Raise RlvrError unless a model that the run loaded is on this machine, with the recorded sha256."""
    recorded = recorded if isinstance(recorded, dict) else {}
    try:
        found = model_identity(model_path(model))
    except RlvrError as error:
        raise _cannot(path, f"{whose} are not here ({error.problem.rstrip('.')})") from error
    for name in ("sha256", "tokenizer_sha256"):
        if not recorded.get(name) or found.get(name) != recorded[name]:
            raise _cannot(
                path,
                f"{whose}, {model or 'of the built-in model'}, are not those that it started from ({name})",
            )


def _logged(path: Path) -> list[dict[str, float]]:
    """The training metrics of each update."""
    _, entries, settled, _ = read_index(path)
    data = read_metrics(path, entries, settled=settled)
    rows = [] if data is None else parsed_table(data, Metric, path=path / METRICS).to_pylist()
    by_step: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["phase"] == "train":
            by_step.setdefault(row["step"], {})[row["name"]] = row["value"]
    updates = {step: metrics for step, metrics in by_step.items() if "update/skipped" in metrics}
    if sorted(updates) != list(range(len(updates))):
        raise _cannot(path, "the metrics of some of its updates are missing")
    return [updates[step] for step in range(len(updates))]


def rows_of(run: StoredRun, phase: Phase, step: int) -> list[Rollout]:
    """The rollouts of a phase and step, in the order in which they were committed."""
    entries = run.entries.of(ROLLOUTS, phase, step)
    return [r for t in part_tables(run.path, entries, phase=phase, step=step, columns=None) for r in to_rollouts(t)]


def sampling_params(run: StoredRun, phase: Phase) -> SamplingParams:
    """How the rollouts of a phase were to be sampled."""

    def value(name: str) -> Any:
        own = run.options.get(f"eval_{name}") if phase == "eval" else None
        return run.options[f"sampling_{name}"] if own is None else own

    return SamplingParams(
        temperature=value("temperature"),
        top_p=value("top_p"),
        max_tokens=value("max_tokens"),
        min_tokens=value("min_tokens"),
        stop=tuple(text for text in run.options["stop"] if text),
    )


def batches(run: StoredRun, tokenizer: Any) -> Iterator[Batch]:
    """The batches of a run, from its first one on, without end: stop after its last update."""
    match run.command:
        case "sft":
            yield from _epochs_of_traces(run, tokenizer)
        case "ei" | "grpo" | "distill":
            made, number = 0, 0
            while made < len(run.logged):
                rollouts = rows_of(run, "train", made)
                if not rollouts and not run.options.get("partial_rollout_tokens"):
                    raise _cannot(run.path, f"it has no rollouts of step {made}")
                made_of = {"ei": _experts, "grpo": _groups, "distill": _students}[run.command]
                batch = made_of(run.options, rollouts, number=number)
                yield batch
                made, number = made + len(batch.updates), number + 1


def with_rates(run: StoredRun, found: Iterable[Batch]) -> Iterator[tuple[Batch, list[float]]]:
    """The batches of a run, each with the learning rates of its updates."""
    schedule, made, trained = num_updates(run), 0, 0
    for number, batch in enumerate(found):
        places: list[tuple[int, int | None]] = [(made + i, None) for i in range(len(batch.updates))]
        if run.by_batch:
            first = number * schedule // run.options["n_grpo_steps"]
            places = [(first + i, trained + i) for i in range(len(batch.updates))]
        yield batch, [formulas.learning_rate(k, run.options, num_updates=schedule, trained=t) for k, t in places]
        made += len(batch.updates)
        trained += len(batch.updates) if batch.responses else 0


def num_updates(run: StoredRun) -> int:
    """The number of updates over which the learning-rate schedule runs."""
    own = run.options
    if run.command == "grpo":
        batches_cut = own["rollout_batch_size"] // own["train_batch_size"]
        return own["n_grpo_steps"] * own["epochs_per_rollout_batch"] * batches_cut
    if run.command == "distill":
        return own["n_distill_steps"]
    return own.get("n_sft_steps", 0) or own["sft_epochs"] * math.ceil(
        run.facts["dataset"]["rows"] / own["train_batch_size"]
    )


def _groups(own: dict[str, Any], rollouts: list[Rollout], *, number: int) -> Batch:
    """The batch of GRPO: groups of responses to one question each, next to each other."""
    size = own["group_size"]
    kept: list[tuple[Rollout, list[float]]] = []
    for first in range(0, len(rollouts), size):
        group = rollouts[first : first + size]
        assert len({r.example_id for r in group}) == 1, "a group is of one question"
        if found := _credited(own, group, number=number):
            kept += zip(group, found, strict=True)
    if kept and formulas.std_over(own) == "batch" and own["loss_type"] != "no_baseline":
        divided = formulas.over_the_batch([advantage for _, (advantage,) in kept], own)
        kept = [(rollout, [advantage]) for (rollout, _), advantage in zip(kept, divided, strict=True)]
    responses = [_response(rollout, advantages) for rollout, advantages in kept]
    if own["overlong"] == "mask":
        cut = [rollout.finish_reason == "length" for rollout, _ in kept]
        responses = [
            replace(r, learned=[False] * len(r.tokens)) if c else r for r, c in zip(responses, cut, strict=True)
        ]
    return _batch(own, responses, number=number, epochs=own["epochs_per_rollout_batch"])


def _credited(own: dict[str, Any], group: list[Rollout], *, number: int) -> list[list[float]]:
    """The advantages of one group: each response's own alone, or those of its turns; empty if dynamic sampling has dropped it."""
    rewards = [0.0 if r.reward is None else r.reward for r in group]
    of_turns = own["credit"] == "turn"
    turns = [_turn_rewards(r) if of_turns else [reward] for r, reward in zip(group, rewards, strict=True)]
    if own["dynamic_sampling"] and not _differ([formulas.turn_returns(t) for t in turns]):
        return []
    formats = [r.format_reward or 0.0 for r in group]
    lengths = [sum(r.response_mask or [True] * len(r.response_ids)) for r in group]
    terms = formulas.reward_terms(rewards, lengths, formats, own, number=number)
    # What the language adds is taken as it is stored, like the grader's reward.
    terms.append([row.language_term or 0.0 for row in group])
    if not of_turns:
        return [[advantage] for advantage in formulas.advantages(formulas.shaped_rewards(rewards, terms), own)]
    returns = [formulas.turn_returns(t, added) for t, added in zip(turns, zip(*terms, strict=True), strict=True)]
    return formulas.turn_advantages(returns, own)


def _students(own: dict[str, Any], rollouts: list[Rollout], *, number: int) -> Batch:
    """The batch of distillation: all responses, for one update."""
    size, responses = own["group_size"], []
    for first in range(0, len(rollouts), size):
        group = rollouts[first : first + size]
        assert len({r.example_id for r in group}) == 1, "a group is of one question"
        advantages = formulas.task_advantages([r.reward or 0.0 for r in group])
        responses += [_response(rollout, [advantage]) for rollout, advantage in zip(group, advantages, strict=True)]
    return Batch(responses, [[*range(len(responses))]])


def _experts(own: dict[str, Any], rollouts: list[Rollout], *, number: int) -> Batch:
    """The batch of expert iteration: the distinct responses that were rewarded."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], Rollout] = {}
    for rollout in rollouts:
        if rollout.reward is not None and rollout.reward > 0.5:
            found.setdefault((rollout.prompt_ids, rollout.response_ids), rollout)
    responses = [_response(rollout, [0.0]) for rollout in found.values()]
    return _batch(own, responses, number=number, epochs=own["sft_epochs"])


def _batch(own: dict[str, Any], responses: list[Response], *, number: int, epochs: int) -> Batch:
    """The updates of the run's batch `number`; without a response to train on there is one, which is skipped."""
    updates = formulas.minibatches(
        len(responses),
        size=own["train_batch_size"],
        seed=own["seed"],
        epochs=range(number * epochs, (number + 1) * epochs),
    )
    return Batch(responses, updates or [[]])


def _turn_rewards(rollout: Rollout) -> list[float]:
    """The reward of each turn of the policy: the environment's, or a grader's for the last one; 0 where grading failed."""
    num_turns = 1 if rollout.turns is None else sum(role == "policy" for role, _, _ in rollout.turns)
    reward = 0.0 if rollout.reward is None else rollout.reward
    if rollout.reward is None or rollout.grader != "environment" or rollout.episode is None:
        return [0.0] * (num_turns - 1) + [reward]
    return [r or 0.0 for r in rollout.episode.turn_rewards or [0.0] * num_turns]


def _differ(returns: list[list[float]]) -> bool:
    """Whether the rewards from a turn on differ among the episodes that have reached it, whichever its number."""
    reached = [[r[turn] for r in returns if len(r) > turn] for turn in range(max(map(len, returns)))]
    return any(max(rewards) > min(rewards) for rewards in reached)


def _response(rollout: Rollout, advantages: list[float]) -> Response:
    """A response to train on.

    Args:
        advantages: that of the response, or one for each turn of the policy.
    """
    count = len(rollout.response_ids)
    learned = rollout.response_mask or [True] * count
    of_tokens = advantages * count if len(advantages) == 1 else [0.0] * count
    if len(advantages) > 1:
        turns = [turn for turn in rollout.turns or () if turn.role == "policy"]
        for turn, advantage in zip(turns, advantages, strict=True):
            of_tokens[turn.start : turn.end] = [advantage] * (turn.end - turn.start)
    return Response(rollout.prompt_ids, rollout.response_ids, learned, rollout.sampled_logprobs, of_tokens)


def _epochs_of_traces(run: StoredRun, tokenizer: Any) -> Iterator[Batch]:
    own = run.options
    traces, examples = traces_of(run)
    ends, end = (run.facts["dataset"].get(fact) for fact in ("other_ends", "end_of_turn"))
    responses = [
        _trace(e, traces, tokenizer, append_eos=own["append_eos"], other_ends=ends or (), end=end)
        if e.conversation is None
        else _conversation(e.conversation, run)
        for e in examples
    ]
    if own.get("loss_on_prompts"):
        unread = 0 if own["packing_attend_across"] else 1  # tokens with nothing before them to predict them from
        responses = [_whole(r, unread=unread) for r in responses]
    responses, sequences = _packed(responses, own)
    made, epoch = 0, 0
    while made < len(run.logged):
        updates = formulas.minibatches(len(sequences), size=own["train_batch_size"], seed=own["seed"], epochs=[epoch])
        yield Batch(responses, [[row for sequence in update for row in sequences[sequence]] for update in updates])
        made, epoch = made + len(updates), epoch + 1


def _whole(response: Response, *, unread: int) -> Response:
    """The response with its prompt, of which all but the first tokens are learned."""
    prompt = response.prompt[unread:]
    tokens, learned = [*prompt, *response.tokens], [True for _ in prompt] + list(response.learned)
    return Response(response.prompt[:unread], tokens, learned, (), [0.0] * len(tokens))


def _packed(responses: list[Response], options: dict[str, Any]) -> tuple[list[Response], list[list[int]]]:
    """What goes through the model as a row each, and the rows of each sequence."""
    if not options.get("packing"):
        return responses, [[row] for row in range(len(responses))]
    order, length = formulas.order(len(responses), seed=options["seed"], epoch=-2), options["packing_length"]
    if not options["packing_attend_across"]:
        lengths = [len(r.prompt) + len(r.tokens) for r in responses]
        return responses, formulas.packed(lengths, capacity=length, order=order)
    stream: list[tuple[int, bool]] = []
    for i in order:
        stream += [(token, False) for token in responses[i].prompt]
        stream += zip(responses[i].tokens, responses[i].learned, strict=True)
    rows = []
    for start in range(0, len(stream) - length, length):
        tokens, learned = zip(*stream[start + 1 : start + length + 1], strict=True)
        rows.append(Response([stream[start][0]], tokens, learned, (), [0.0] * length))
    return rows, [[row] for row in range(len(rows))]


def traces_of(run: StoredRun) -> tuple[Traces, Sequence[Example]]:
    """Read the traces of `rlvr sft` again. Returns all of them, and those that it trained on.

    Raises:
        RlvrError: they cannot be read or are not the same, or a user's own grader chose among them.
    """
    own, recorded = run.options, run.facts["dataset"]
    template = PromptTemplate(run.facts["prompt"]["name"], run.facts["prompt"]["text"])
    reading = {k: own[k] for k in ("split", "question_field", "answer_field", "skip_bad_lines", "runs_dir")}
    reading |= {"told_apart_by": recorded.get("told_apart_by"), "opened_twice": "thinking_opened" not in recorded}
    traces = load_traces(own["dataset"], template, **reading)
    if traces.fingerprint != recorded["fingerprint"]:
        raise _cannot(
            run.path, f"its training data, {own['dataset']}, have changed since, or this version reads them otherwise"
        )
    examples = traces.examples
    if traces.rewards is not None and recorded.get("chosen_by") == "reward":
        examples = [e for e in examples if (traces.rewards[e.id] or 0) > 0.5]
    elif own["correct_only"]:
        chooser = choose_grader(own["grader"], dataset_grader=traces.default_grader, prompt=own["prompt"])
        if ":" in chooser:
            raise _cannot(
                run.path,
                f"its traces were chosen by {chooser}, and a check neither runs the code nor asks the judge that a run names",
            )
        with grader_pool(SftConfig(**own), traces.default_grader) as pool:
            grades = pool.grade([(traces.graded.get(e.id, e.response or ""), e.ground_truth) for e in examples])
        examples = [e for e, g in zip(examples, grades, strict=True) if (g.reward or 0) > 0.5]
    if own["num_examples"] != "all":
        chosen = sorted(formulas.order(len(examples), seed=own["seed"], epoch=-1)[: int(own["num_examples"])])
        examples = [examples[i] for i in chosen]
    if len(examples) != recorded["rows"]:
        raise _cannot(run.path, f"this version chooses other rows of {own['dataset']} to train on: {len(examples)}")
    return traces, examples


def _trace(
    example: Example,
    traces: Traces,
    tokenizer: Any,
    *,
    append_eos: bool,
    other_ends: Sequence[int] = (),
    end: int | None = None,
) -> Response:
    """The tokens of a trace: the sampled ones where they are known and this tokenizer's, else those of its text.

    Args:
        other_ends: ids besides EOS that end what was sampled.
        end: what is appended in place of EOS.
    """
    prompt, response = example.prompt or "", example.response or ""
    eos = tokenizer.eos_token_id
    end = eos if end is None else end
    ids = traces.token_ids.get(example.id)
    (before,) = encode_prompts(tokenizer, [prompt])
    sampled = (
        ids is not None
        and (ids.prompt == before or tokenizer.decode(ids.prompt) == prompt)
        and any(
            _spells(ids.response, response, ends, tokenizer)
            for ends in ([(len(ids.response), len(response))], ids.ends)
            if ends
        )
    )
    if ids is not None and sampled:
        before, tokens, learned = list(ids.prompt), list(ids.response), list(ids.mask or [True] * len(ids.response))
    elif example.turns is None:
        tokens = tokenizer(response, add_special_tokens=False).input_ids
        learned = [True] * len(tokens)
    else:
        tokens, learned = [], []
        for role, text in example.turns:
            tokens += tokenizer(text, add_special_tokens=False, split_special_tokens=role != "policy").input_ids
            learned += [role == "policy"] * (len(tokens) - len(learned))
    ended = tokens and tokens[-1] in (eos, *(other_ends if sampled else [end]))
    if append_eos and (learned[-1] and not ended if tokens else example.turns is None):
        tokens, learned = [*tokens, end], [*learned, True]
    return Response(before, tokens, learned, (), [0.0] * len(tokens))


def _spells(ids: Sequence[int], text: str, ends: Sequence[tuple[int, int]], tokenizer: Any) -> bool:
    """Whether the ids spell the text; the last one before each end, in both, may go on after a stop string."""
    start, begin = 0, 0
    for stop, end in ends:
        if not tokenizer.decode(ids[start:stop], skip_special_tokens=True).startswith(text[begin:end]):
            return False
        start, begin = stop, end
    return True


def _conversation(said: Conversation, run: StoredRun) -> Response:
    """The tokens of a conversation in the chat template of the run's model.

    Raises:
        RlvrError: what the model was told of its tools is known to a user's own code alone; or as `chat_turns`.
    """
    config = SftConfig(**run.options)
    spec = environment_spec(config)
    if said.tools is None and spec.calls and (spec.tools or spec.of_verifiers):
        raise _cannot(run.path, f"its tools, {spec.title}, are described by code that a check does not run")
    before, tokens, learned = chat_turns(config, tools=said.tools).conversation(said.messages)
    return Response(before, tokens, learned, (), [0.0] * len(tokens))
