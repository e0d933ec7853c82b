"""What every command that samples reads first: questions, and the facts for run.json that identify its inputs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlvr_cli.config.parsing.options import Provenance
from rlvr_cli.config.shared.episodes import EpisodeOptions
from rlvr_cli.config.shared.prompt import PromptOptions, ShotOptions, is_judge
from rlvr_cli.config.shared.questions import QuestionOptions
from rlvr_cli.config.shared.sampling import SamplingOptions
from rlvr_cli.data.datasets import Dataset, load_dataset
from rlvr_cli.data.examples import Purpose
from rlvr_cli.data.prompts import PromptTemplate, load_prompt
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders import GRADERS, is_unit_tests
from rlvr_cli.models.identity import model_path
from rlvr_cli.rollouts.shots import with_shots
from rlvr_cli.samplers.episodes.turns import gives_rewards, told_tools
from rlvr_cli.terminal import console
from rlvr_cli.types import ENVIRONMENT


def load_questions(
    config: QuestionOptions,
    *,
    purpose: Purpose,
    limit: int | None = None,
    asked: bool = True,
    template: PromptTemplate | None = None,
) -> Dataset:
    """Load --dataset, and print the lines that were skipped and its notes.

    Args:
        template: the prompt that --shots go into.
        asked: whether somebody asked for as many examples as the limit; it is no default.

    Raises:
        RlvrError: as `load_dataset`.
    """
    dataset = load_dataset(
        config.dataset,
        split=config.split,
        limit=limit,
        question_field=config.question_field,
        answer_field=config.answer_field,
        skip_bad_lines=config.skip_bad_lines,
        purpose=purpose,
        needs_answers=needs_answers(config),
    )
    console.report_skipped_lines(dataset.num_skipped, dataset.skipped)
    for note in [*dataset.notes, *([dataset.too_few] if asked and dataset.too_few else [])]:
        console.say(note)
    check_of_one_kind(config, dataset.name, dataset.mixed)
    if _wants_python(config, dataset):
        console.say(f"note: the ground truths of {dataset.name} are unit tests: add --grader python, which runs them.")
    if template is None or not isinstance(config, ShotOptions):
        return dataset
    reading = {name: getattr(config, name) for name in ("question_field", "answer_field", "skip_bad_lines")}
    return with_shots(dataset, config, template, spec=config.dataset, reading=reading)


def needs_answers(config: QuestionOptions) -> bool:
    """Whether a grader reads the ground truths: neither an environment nor a judge gives the rewards."""
    if isinstance(config, PromptOptions) and is_judge(config.grader):
        return False
    return not (isinstance(config, EpisodeOptions) and gives_rewards(config))


def check_of_one_kind(config: QuestionOptions, name: str, mixed: str) -> None:
    """Refuse a dataset that no rule grades, unless --grader names what does. A run that began with one goes on.

    Args:
        mixed: of the dataset.
    """
    if not mixed or not isinstance(config, PromptOptions) or config.grader or not needs_answers(config):
        return
    problem = f"{name}: {mixed}, which have a grader of their own, and no grader is of all rows."
    if isinstance(config, Provenance) and config.sources.get("grader") == "resumed run":
        console.say(f"warning: {problem} Grades of such rows are wrong.")
        return
    raise RlvrError(problem, "Split the dataset by kind, or give --grader what grades all of its rows.")


def _wants_python(config: QuestionOptions, dataset: Dataset) -> bool:
    """Whether all ground truths are unit tests, and a built-in grader that runs none reads them."""
    if not isinstance(config, PromptOptions) or config.grader not in ("", *GRADERS) or config.grader == "python":
        return False
    if dataset.default_grader or not needs_answers(config):
        return False
    return all(map(is_unit_tests, (e.ground_truth for e in dataset.examples)))


def load_template(config: PromptOptions, *, model: str) -> PromptTemplate:
    """Load --prompt; with --chat in the chat template of the model, which is told of the tools.

    Raises:
        RlvrError: as `load_prompt`, `chat_prompt` and `told_tools`.
    """
    template = load_prompt(config.prompt)
    if not config.chat:
        return template
    from rlvr_cli.models.tokens.chat import ChatTemplate, chat_prompt  # here: endpoints do without transformers

    if template.name == "r1_zero":
        console.say(
            "note: the prompt r1_zero writes a conversation of its own; in a chat template, --prompt question_only is the question alone"
        )
    tools = told_tools(config) if isinstance(config, EpisodeOptions) else []
    chat = ChatTemplate(model_path(model), thinking=config.chat_thinking, system=config.chat_system, tools=tools)
    return chat_prompt(template, chat)


def check_stops(config: SamplingOptions, model: str) -> None:
    """Refuse a stop string that is a special token of the model: responses go on after it, since their text does not have it.

    One that ends the responses of the model anyway may stay, and so may those of a run that is resumed. Of an endpoint's model nothing
    is known, and a dry run downloads none.

    Raises:
        RlvrError: a stop string is refused.
    """
    chosen = [stop for stop in config.stop if stop and stop not in SamplingOptions.stop]
    if not chosen or config.sources.get("stop") == "resumed run" or getattr(config, "base_url", ""):
        return
    path = model_path(model)
    if getattr(config, "dry_run", False) and not Path(path).is_dir():
        return
    from rlvr_cli.models.pretrained import load_end_tokens, load_tokenizer  # here: endpoints do without transformers

    tokenizer = load_tokenizer(path)
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    for stop in chosen:
        number = special.get(stop.strip())
        if number is not None and number not in load_end_tokens(path, tokenizer):
            raise RlvrError(
                f"--stop {stop!r} is a special token of the model, which is not in the text of responses: it would end none.",
                f"Leave it out. To end responses with this token, add its id {number} to eos_token_id in the model's "
                "generation_config.json.",
            )


def chat_line(prompt: Mapping[str, str]) -> str:
    """What --chat sends, in one line. `prompt` is of `input_facts`."""
    return f"{prompt['name']} in the model's chat template: {prompt['text']!r}"


def rewards_line(facts: Mapping[str, Any]) -> str:
    """What gives the rewards, in two words. `facts` are of run.json."""
    return "rewards of the environment" if facts["grader"] == ENVIRONMENT else f"grader {facts['grader']}"


def shots_line(shots: Mapping[str, Any]) -> str:
    """What precedes each question, in one line. `shots` are of `Dataset.shots`."""
    split = f" ({shots['split']})" if shots["split"] else ""
    return f"{shots['count']} before each question, of {shots['name']}{split}"


def input_facts(
    data: dict[str, Any], *, model: dict[str, Any], template: PromptTemplate, grader: dict[str, Any], engine: str
) -> dict[str, Any]:
    """Return the facts of run.json: a resumed run must have the same inputs.

    Args:
        data: the facts of the datasets.
        model: of `identity.model_facts`.
        grader: of `Graders.facts`.
    """
    return {
        **data,
        "model": model,
        "prompt": {"name": template.name, "text": template.text}
        | ({"start": template.start} if template.start else {}),
        **grader,
        "engine": engine,
    }
