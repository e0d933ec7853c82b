"""Few-shot prompts: what is stored is what was asked, of the right subject, and never the question itself."""

import json
from dataclasses import replace

import pytest

from llamas import write_chat_qwen
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.data.datasets import load_dataset
from rlvr_cli.data.prompts import load_prompt, prompt_of, stored_prompts
from rlvr_cli.data.traces import load_traces
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.tokens.chat import ChatTemplate, chat_prompt
from rlvr_cli.rollouts.inputs import input_facts, load_questions, load_template
from rlvr_cli.runs.readers import read_rollouts, read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.training.session import load_eval_dataset, warn_of_shared_questions

SUBJECTS = ("abstract_algebra", "world_religions")
OPTIONS = "A. w\nB. x\nC. y\nD. z\nAnswer:"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """MMLU with two subjects, of which each has five rows in dev and two in test; a prompt; and the current folder."""
    for split, count in (("dev", 5), ("test", 2)):
        (tmp_path / "mmlu" / split).mkdir(parents=True)
        for subject in SUBJECTS:
            lines = [f'"{subject} {split} {i}?",w,x,y,z,{"ABCD"[i % 4]}\n' for i in range(count)]
            (tmp_path / "mmlu" / split / f"{subject}_{split}.csv").write_text("".join(lines))
    (tmp_path / "prompt").write_text("{question}\nAnswer:")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def mmlu_shot(subject: str, number: int) -> str:
    return f"{subject} dev {number}?\n{OPTIONS} The correct answer is {'ABCD'[number % 4]}.\n\n"


def test_an_evaluation_on_mmlu_asks_with_shots_of_the_subject(folder, forks):
    command = "eval --dataset mmlu:mmlu --prompt prompt --shots 2 --sampling-max-tokens 4 --run r".split()
    done = forks.run(*command, "--limit", "2", cwd=folder, status=0)
    assert "shots    2 before each question, of mmlu:mmlu (dev)" in done.err
    assert "grader multiple_choice" in done.err
    (first, second) = sorted(read_rollouts(folder / "runs/r").to_pylist(), key=lambda row: row["example_id"])
    for row, subject in ((first, SUBJECTS[0]), (second, SUBJECTS[1])):
        shots = mmlu_shot(subject, 0) + mmlu_shot(subject, 1)
        assert row["prompt"] == f"{shots}{subject} test 0?\n{OPTIONS}"
        assert row["num_prompt_tokens"] == len(row["prompt_ids"])
        assert json.loads(row["ground_truth"])["answer"] == "A"
    recorded = read_run(folder / "runs/r").metadata["facts"]
    assert {**recorded["dataset"]["shots"], "fingerprint": ""} == {
        "name": "mmlu:mmlu", "split": "dev", "count": 2, "fingerprint": "",
    }  # fmt: skip
    assert "abstract algebra" in forks.run("analyze", "subjects", "r", cwd=folder, status=0).out
    with RunDir.resume(folder / "runs/r") as run:
        assert len(recorded["dataset"].pop("beginnings")) == 2  # an older run lacks them, and goes on
        run.update(facts=recorded)
    again = forks.run("eval", "--resume", "r", cwd=folder, status=0)
    assert sorted(row["prompt"] for row in read_rollouts(folder / "runs/r").to_pylist()) == [
        first["prompt"], second["prompt"],
    ], again.err  # fmt: skip
    other = forks.run("eval", "--resume", "r", "--shots", "1", cwd=folder)
    assert other.status in (1, 2), other.said
    dev = folder / f"mmlu/dev/{SUBJECTS[0]}_dev.csv"
    dev.write_text(dev.read_text().replace("dev 0?", "dev zero?"))
    assert "shots" in forks.run("eval", "--resume", "r", cwd=folder, status=1).err


def test_a_question_is_never_among_its_own_shots(folder):
    config = EvalConfig(dataset="mmlu:mmlu", split="dev", prompt="prompt", shots=4)
    dataset = load_questions(config, purpose="eval", template=load_template(config, model=""))
    assert len(dataset.examples) == 10
    for example in dataset.examples:
        assert (example.prompt or "").count(example.question) == 1
        assert (example.prompt or "").count("The correct answer is") == 4
    config = EvalConfig(dataset="mmlu:mmlu", split="dev", prompt="prompt", shots=5)
    with pytest.raises(RlvrError, match="mmlu:mmlu \\(dev\\) has 4 traces of 'abstract algebra' beside the question"):
        load_questions(config, purpose="eval", template=load_template(config, model=""))


def test_a_prompt_may_name_the_subject(folder):
    (folder / "about").write_text("About {subject}: {question}")
    template = load_prompt("about")
    config = EvalConfig(dataset="mmlu:mmlu", prompt="about", shots=1)
    plain, shown = (
        load_questions(replace(config, shots=shots), purpose="eval", limit=2, template=template).examples
        for shots in (0, 1)
    )
    asked = [prompt_of(e, template) for e in plain]
    assert [text.partition("\n")[0] for text in asked] == [
        "About abstract algebra: abstract_algebra test 0?", "About world religions: world_religions test 0?",
    ]  # fmt: skip
    assert [
        text.count(subject)
        for text, subject in zip([e.prompt or "" for e in shown], ("abstract algebra", "world religions"), strict=True)
    ] == [2, 2]
    assert template.fill("q", subject="{question}") == "About {question}: q"
    assert template.fill("q") == "About {subject}: q", "ordinary text where a question has no subject"


def write(path, *rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_shots_of_a_training_split_are_its_first_traces(folder):
    (folder / "data").mkdir()
    rows = [{"question": f"{i} + 1?", "solution": f"It is \\boxed{{{i + 1}}}.", "answer": f"{i + 1}"} for i in range(4)]
    write(folder / "data/train.jsonl", *rows)
    write(folder / "data/test.jsonl", {"question": "7 + 1?", "answer": "8"}, {"question": " 1 +  1?", "answer": "2"})
    config = EvalConfig(dataset="data", prompt="prompt", shots=2)
    first, second = load_questions(config, purpose="eval", template=load_prompt("prompt")).examples
    shots = [f"{i} + 1?\nAnswer: It is \\boxed{{{i + 1}}}.\n\n" for i in range(4)]
    assert first.prompt == f"{shots[0]}{shots[1]}7 + 1?\nAnswer:"
    assert second.prompt == f"{shots[0]}{shots[2]} 1 +  1?\nAnswer:"


def test_a_question_with_several_traces_gets_shots_of_those_behind_them(folder):
    rows = [{"question": f"{i // 3} + 1?", "response": f" it is {i}"} for i in range(9)]
    traces = write(folder / "t.jsonl", *rows)
    questions = write(folder / "q.jsonl", *({"question": f"{i} + 1?", "answer": "1"} for i in (0, 7)))
    config = EvalConfig(dataset=questions, prompt="prompt", shots=2, shots_dataset=traces)
    shots = [f"{row['question']}\nAnswer:{row['response']}\n\n" for row in rows]
    assert [e.prompt for e in load_questions(config, purpose="eval", template=load_prompt("prompt")).examples] == [
        f"{shots[3]}{shots[4]}0 + 1?\nAnswer:", f"{shots[0]}{shots[1]}7 + 1?\nAnswer:",
    ]  # fmt: skip
    with pytest.raises(RlvrError, match=r"--shots 7: .* has 6 traces beside the question q-1"):
        load_questions(replace(config, shots=7), purpose="eval", template=load_prompt("prompt"))


@pytest.mark.parametrize(
    ("made_with", "own"),
    [("r1_zero", " 0 +  1?"), ("prompt", " 0 +  1?"), ("question_only", "0 + 1?\nAnswer:")],
)
def test_a_question_is_not_among_its_own_shots_where_prompts_are_formatted(folder, made_with, own, capsys):
    """With a built-in template, or with that of the run. So it is with the warning of questions that are also trained on."""
    template, used = load_prompt("prompt"), load_prompt(made_with)
    rows = [{"prompt": used.fill(f"{i} + 1?"), "response": f" it is {i + 1}"} for i in range(3)]
    traces = write(folder / "t.jsonl", *rows)
    questions = write(folder / "q.jsonl", *({"question": q, "answer": "1"} for q in (own, "7 + 1?")))
    config = EvalConfig(dataset=questions, prompt="prompt", shots=1, shots_dataset=traces)
    asked = load_questions(config, purpose="eval", template=template)
    shots = [f"{row['prompt']}{row['response']}\n\n" for row in rows]
    assert [e.prompt for e in asked.examples] == [
        f"{shots[1]}{own}\nAnswer:", f"{shots[0]}7 + 1?\nAnswer:",
    ]  # fmt: skip
    trained = load_traces(traces, template).examples
    warn_of_shared_questions(trained, load_dataset(questions), template)
    assert "1 of the 2 evaluation questions are also trained on" in capsys.readouterr().err


def test_bad_lines_of_the_shots_are_skipped_where_that_is_asked_for(folder, capsys):
    traces = write(folder / "t.jsonl", {"a": 1}, {"prompt": "b", "response": " c"})
    questions = write(folder / "q.jsonl", {"text": "d", "answer": "e"})
    config = EvalConfig(dataset=questions, question_field="text", prompt="prompt", shots=1, shots_dataset=traces)
    with pytest.raises(RlvrError, match=r"t\.jsonl:1: no response"):
        load_questions(config, purpose="eval", template=load_prompt("prompt"))
    config = replace(config, skip_bad_lines=True)
    (example,) = load_questions(config, purpose="eval", template=load_prompt("prompt")).examples
    assert example.prompt == "b c\n\nd\nAnswer:"
    assert f"skipped 1 bad line:\n  {traces}:1: " in capsys.readouterr().err


def test_training_and_its_evaluations_ask_with_shots(folder):
    traces = write(
        folder / "t.jsonl", {"prompt": "Say {question}:", "response": " nothing"}, {"prompt": "b", "response": " c"}
    )
    questions = write(folder / "q.jsonl", {"question": "d", "answer": "e"})
    config = GrpoConfig(
        dataset=questions, eval_dataset=questions, prompt="prompt", shots=2, shots_dataset=traces, grader="gsm8k",
        engine="transformers",
    )  # fmt: skip
    template = load_template(config, model="")
    asked = "Say {question}: nothing\n\nb c\n\nd\nAnswer:"
    evaluated = load_eval_dataset(config, template)
    assert evaluated is not None
    for dataset in (load_questions(config, purpose="train", template=template), evaluated):
        assert [e.prompt for e in dataset.examples] == [asked]
        assert dataset.facts["shots"]["count"] == 2


def test_a_step_of_training_stores_its_shots(folder, forks):
    command = (
        "grpo --dataset arithmetic:16 --prompt prompt --shots 1 --n-grpo-steps 1 --rollout-batch-size 4 --group-size 2"
    )
    command += " --train-batch-size 4 --gradient-accumulation-steps 1 --sampling-max-tokens 4 --eval-examples 2 --run r"
    done = forks.run(*command.split(), cwd=folder, status=0)
    assert "shots          1 before each question, of arithmetic:16:0 (train)" in done.err
    prompts = [row["prompt"] for row in read_rollouts(folder / "runs/r").to_pylist()]
    assert {prompt.count("\nAnswer:") for prompt in prompts} == {2}


def test_in_a_chat_the_shots_are_in_the_users_message(folder):
    model = write_chat_qwen(folder / "model")
    raw = load_prompt("prompt")
    chat = ChatTemplate(model, system="Be brief.")
    template = chat_prompt(raw, chat)
    shots = "a\nAnswer: b\n\n"
    asked = chat.render(chat.with_system([{"role": "user", "content": f"{shots}{raw.fill('q')}"}]))
    assert template.fill("q", shots=shots) == asked
    assert template.fill("q") == chat.render(chat.with_system([{"role": "user", "content": raw.fill("q")}]))


@pytest.mark.parametrize("prompt", ["prompt", "about", "twice", "r1_zero", "question_only"])
def test_the_question_of_a_stored_prompt_is_the_datasets(folder, prompt):
    (folder / "about").write_text("About {subject}: {question}\nAnswer:")
    (folder / "twice").write_text("{question}\nAgain: {question}\nAnswer:")
    template = load_prompt(prompt)
    for shots in (0, 1, 3):
        config = EvalConfig(dataset="mmlu:mmlu", prompt=prompt, shots=shots)
        plain = load_questions(replace(config, shots=0), purpose="eval", template=template)
        shown = load_questions(config, purpose="eval", template=template)
        for facts in (shown.facts, {name: value for name, value in shown.facts.items() if name != "beginnings"}):
            prompts = stored_prompts({"facts": {"dataset": facts, "prompt": {"name": prompt, "text": template.text}}})
            for example, asked in zip(plain.examples, shown.examples, strict=True):
                text = prompt_of(asked, template)
                assert prompts.question_in(text, ground_truth=asked.ground_truth) == example.question
                assert prompts.question_in(f"Other. {text} ", ground_truth=asked.ground_truth) != example.question


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    "text", ["{question}", "{question}\n\nAnswer:", "Q: {question}\n\nAgain: {question}\nA:", "\n{question}\n"]
)
def test_the_question_is_told_from_its_shots_also_where_both_have_empty_lines(folder, text, chat):
    (folder / "prompt").write_text(text)
    rows = [{"prompt": f"{i}?\n\nmore", "response": f" It\n\nis\n\nAnswer: {i}.\n\n{i}"} for i in range(3)]
    traces = write(folder / "t.jsonl", *rows)
    asked = ["5\n\nmore\n\nAnswer: 6", rows[0]["prompt"], rows[1]["prompt"], "6"]
    questions = write(folder / "q.jsonl", *({"question": question, "answer": "e"} for question in asked))
    model = str(write_chat_qwen(folder / "model")) if chat else ""
    config = EvalConfig(dataset=questions, prompt="prompt", shots=2, shots_dataset=traces, chat=chat)
    template = load_template(config, model=model)
    dataset = load_questions(config, purpose="eval", template=template)
    facts = input_facts({"dataset": dataset.facts}, model={}, template=template, grader={}, engine="embedded")
    assert len(facts["dataset"]["beginnings"]) == 3, "with the first two, and where one of them is the question"
    prompts = stored_prompts(json.loads(json.dumps({"facts": facts})))
    assert [prompts.question_in(e.prompt or "") for e in dataset.examples] == asked
    evaluated = stored_prompts(
        {"facts": facts | {"eval_dataset": facts["dataset"], "dataset": {"shots": dataset.shots}}}
    )
    assert [evaluated.question_in(e.prompt or "") for e in dataset.examples] == asked


def stored(text, shots, name="p"):
    return stored_prompts({"facts": {"dataset": {"shots": {"count": shots}}, "prompt": {"name": name, "text": text}}})


def test_a_question_that_may_begin_at_several_places_is_unknown():
    at_once = "1\nAnswer: a\n\n2\nAnswer: b\n\n3\nAnswer:"
    assert stored("{question}\nAnswer:", 2).question_in(at_once) == "3"
    assert stored("{question}\nAnswer:", 2).question_in(at_once.replace("b", "b\n\nmore")) is None
    assert stored("{question}\nAnswer:", 2).question_in(at_once.replace("3", "3\n\nmore")) is None
    headed = "Q: 1\nA: a\n\nb\n\nQ: 2\nA: c\n\nQ: 3\n\nmore\nA:"
    assert stored("Q: {question}\nA:", 2).question_in(headed) == "3\n\nmore", "empty lines elsewhere are no beginning"
    assert stored("Q: {question}\nA:", 2).question_in("1 a\n\n2 b\n\nQ: 3\nA:") == "3", (
        "shots with prompts of their own"
    )
    assert stored("Q: {question}\nB:", 2).question_in(headed) is None
    apart = "1\n\nAnswer: a\n\n2\n\nAnswer: b\n\n3\n\nAnswer:"
    assert stored("{question}\n\nAnswer:", 2).question_in(apart) == "3", "each shot has two places that fit"
    assert stored("{question}\n\nAnswer:", 2).question_in(apart.replace("3", "3\n\nmore")) is None
    assert stored("{question}\n\nAnswer:", 1).question_in("1 a\n\n3\n\nmore\n\nAnswer:") is None
    for broken in ({}, {"facts": 1}, {"facts": {"prompt": {"text": 1}, "dataset": {"shots": {"count": "x"}}}}):
        assert stored_prompts(broken).question_in("q") is None
    for beginnings in (1, [1], [["a", "x"], [3, "y"]], {"a": 1}):
        dataset = {"shots": {"count": 1}, "beginnings": beginnings}
        assert stored_prompts({"facts": {"prompt": {"text": "{question}"}, "dataset": dataset}}).beginnings == ()


def test_in_a_chat_the_question_stands_behind_the_shots(folder):
    chat = ChatTemplate(write_chat_qwen(folder / "model"), system="Be\n\nbrief.")
    for name in ("question_only", "alpaca"):
        raw = load_prompt(name)
        template = chat_prompt(raw, chat)
        shots = f"{raw.fill('a')} b\n\n{raw.fill('c')} d\n\n"
        assert stored(template.text, 2, name).question_in(template.fill("q", shots=shots)) == "q"
        assert stored(template.text, 0, name).question_in(template.fill("q")) == "q"


def test_where_there_are_no_traces_it_is_said(folder, forks):
    questions = write(folder / "q.jsonl", {"question": "d", "answer": "e"})
    formatted = write(folder / "f.jsonl", {"prompt": "x", "response": "e", "answer": "e"})
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    conversation = write(folder / "c.jsonl", {"messages": talk})
    refused = {
        f"--dataset {questions} --shots 1": "is one file, without another split",
        f"--dataset {formatted} --shots 1 --shots-dataset {formatted}": "comes with a prompt of its own",
        f"--dataset {questions} --shots 1 --shots-dataset {conversation}": "is a conversation, and a shot is one question",
        f"--dataset {questions} --shots 2 --shots-dataset {formatted}": f"{formatted} has 1 traces beside the question q-1",
        "--shots-dataset q.jsonl": "--shots-dataset needs --shots.",
        "--shots 2 --environment calculator": "--shots and episodes exclude each other",
    }
    for options, problem in refused.items():
        done = forks.run("eval", *options.split(), "--dry-run", cwd=folder)
        assert done.status in (1, 2), options
        assert problem in done.err, options
