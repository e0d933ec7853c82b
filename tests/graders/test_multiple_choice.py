"""The grader of multiple choice: which responses choose which option, and why others are not rewarded."""

import pytest

from rlvr_cli.graders.multiple_choice import grade, letter_of, truth_of

TRUTH = truth_of("B", ["New York", "York", "The city of New York", "none"], "geography")


@pytest.mark.parametrize(
    ("response", "reward", "answer", "kind"),
    [
        ("The correct answer is B.", 1.0, "B", None),
        ("it is </think> <answer> B </answer>", 1.0, "B", None),
        ("The answer is A. No, the answer is B.", 1.0, "B", None),
        ("The answer is B. No, the answer is A.", 0.0, "A", "multiple_answers"),
        ("Option A: wrong. Option D: wrong.\n\n**Answer**: B", 1.0, "B", None),
        ("Option A is in England. The correct option is B.", 1.0, "B", None),
        ("Option A is old. The correct choice is **B**. Option D is new.", 1.0, "B", None),
        ("The worst option is A, so I choose option B.", 1.0, "B", None),
        ("The least likely option is A, so I choose option B.", 1.0, "B", None),
        ("The second best option is A. Option B is the best.", 1.0, "B", None),
        ("A tempting answer would be A. But option B is right.", 1.0, "B", None),
        ("The correct option is A or B. Option B", 1.0, "B", None),
        ("The correct option is A/B. Option B", 1.0, "B", None),
        ("The third best option is A. Option B", 1.0, "B", None),
        ("Option A is old. The correct option is $\\text{B}$.", 1.0, "B", None),
        ("The correct choice is _B_; option D is new.", 1.0, "B", None),
        ("Option A is old. The most likely option is B.", 1.0, "B", None),
        ("The right option is A if it were Italy. So option B.", 1.0, "B", None),
        ("Option A is old. The answer **is** B", 1.0, "B", None),
        ("Option A is old. The answer is clearly B", 1.0, "B", None),
        ("The answer is therefore option B, since option A is old", 1.0, "B", None),
        ("Option A is old. The answer is not B", 0.0, "A", "wrong_answer"),
        ("Option B is right. Option A is wrong.", 1.0, "B", None),
        ("Choice B. Choice **A** is not correct, **option C**: incorrect.", 1.0, "B", None),
        ("Option B is incorrect, so B is the false statement.", 1.0, "B", None),
        ("Option A is wrong.", 0.0, "A", "wrong_answer"),
        ("Option A is wrong. Option C is wrong.", 0.0, None, "unparsed_answer"),
        ("Option A (York) is wrong. Option B (New York) is right.", 1.0, "B", None),
        ("Option B (York) is right. Option A (New York) is wrong.", 1.0, "B", None),
        ("C. Option A is wrong.", 0.0, "C", "wrong_answer"),
        ("The correct answer is D.", 0.0, "D", "wrong_answer"),
        ("The correct answer is E.", 0.0, None, "unparsed_answer"),
        ("It must be york!", 0.0, None, "correct_but_unformatted"),
        ("It must be New York.", 0.0, None, "unparsed_answer"),
        ("York or none", 0.0, None, "unparsed_answer"),
        ("Yorkshire", 0.0, None, "unparsed_answer"),
        (" ", 0.0, None, "empty"),
    ],
)
def test_grades(response, reward, answer, kind):
    verdict = grade(response, TRUTH)
    assert (verdict.reward, verdict.extracted_answer, verdict.failure_kind) == (reward, answer, kind)
    assert verdict.format_reward == float(answer is not None)


QUOTED = [
    '"B"',
    "'B'",
    "\u201cB\u201d",
    "\u2018B\u2019",
    "`B`",
    "_B_",
    "__B__",
    "[B]",
    '"(B)"',
    r"\text{B}",
    r"$\mathrm{(B)}$",
    r"\(B\)",
    r"\( (B) \)",
    r"\(\text{B}\)",
]


@pytest.mark.parametrize("letter", QUOTED)
@pytest.mark.parametrize(
    "place",
    [
        "The correct answer is {}.",
        "Answer: {}",
        "I choose option {}, since",
        "{}",
        "<answer>{}</answer>",
        r"So \boxed{{{}}}.",
    ],
)
def test_a_letter_may_have_marks_around_it(letter, place):
    assert grade(place.format(letter), TRUTH).extracted_answer == "B"


@pytest.mark.parametrize(
    "response",
    [
        "The answer is B's neighbor.",
        "The answer is B_1.",
        "The answer is [B-D].",
        "'B's' is a word",
        '"Be quiet"',
        'The answer is "B virus".',
        "The answer is [B virus].",
        r"The answer is \text{B virus}.",
        "I set option_B.",
        'option["B"] is set',
        'answer["B"] is asked for',
    ],
)
def test_a_letter_inside_of_a_word_is_none(response):
    assert grade(response, TRUTH).extracted_answer is None


CITIES = truth_of("B", ["Rome", "Paris", "A virus", "A"])


@pytest.mark.parametrize(
    ("declared", "letter"),
    [
        ("B. Paris", "B"),
        ("(B) Paris, since it is large", "B"),
        ("B) the capital", "B"),
        ("B: Paris", "B"),
        ("[B] Paris", "B"),
        ("**B**. Paris", "B"),
        ("B Paris", "B"),
        ("B - *paris*.", "B"),
        (r"\text{B. Paris}", "B"),
        (r"\textbf{(B) }Paris", "B"),
        ("A. Rome", "A"),
        ("C. A virus", "C"),
        ("C A virus", "C"),
        ("D. A", "D"),
        ("A virus", None),  # the text of C
        ("A big city", None),
        ("A.D. 70", None),
        ("(A) and (C)", None),
        ("A. or C", None),
        ("Paris", None),
        ("E. Paris", None),
        ("A. Rome\nB. Paris", None),
        ("A: no, B: yes", None),
        ("(B).(C)", None),
    ],
)
@pytest.mark.parametrize("place", ["it is </think> <answer> {} </answer>", "So \\boxed{{{}}}"])
def test_tags_and_boxes_may_hold_the_options_text(declared, letter, place):
    assert grade(place.format(declared), CITIES).extracted_answer == letter


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("<think> option A is old, so no. </think> <answer> B. Paris </answer>", "B"),
        ("Option C is no city, so \\boxed{B. Paris}", "B"),
        ("<think>\nIs the answer A?\n</think>\n\n**B. Paris**", "B"),
        ("Is the answer A? </think>\nB", "B"),
        ("<think>So \\boxed{A}?</think> The answer is B.", "B"),
        ("<think>So \\boxed{A}.</think> Done.", "A"),
        ("<think>The answer is A.</think> Done.", None),
        ("<think>The answer is A.</think>\n", "A"),
        ("<think>The answer is A.", "A"),
        ("Option A is old. <answer> Paris </answer>", None),
        ("The answer is B. Option A is old. So \\boxed{\\text{Paris}}", "B"),
        ("The answer is A. So \\boxed{Paris}", None),
        ("The answer is A. So \\boxed{7}", "A"),
        ("First \\boxed{Rome}. The correct answer is B.", "B"),  # what is said last
    ],
)
def test_what_is_declared_counts_and_not_the_thinking(response, letter):
    assert grade(response, CITIES).extracted_answer == letter


def test_the_text_of_the_right_option_without_its_letter_may_follow_thinking_about_others():
    verdict = grade("<think>Rome? No.</think> <answer> Paris </answer>", CITIES)
    assert (verdict.reward, verdict.failure_kind) == (0.0, "correct_but_unformatted")


def test_the_right_option_in_words_may_contain_another():
    truth = truth_of("A", ["New York", "York"])
    assert grade("It must be New York.", truth).failure_kind == "correct_but_unformatted"
    assert grade("It must be York.", truth).failure_kind == "unparsed_answer"


def test_a_bare_letter_is_a_truth_of_four_options():
    assert grade("B", "B").reward == 1.0
    assert grade("The answer is E", "B").failure_kind == "unparsed_answer"


@pytest.mark.parametrize(
    "truth", ["", "E", "AB", "7", "{}", '{"answer": "C", "options": ["1", "2"]}', '{"answer": "A", "options": [1]}']
)
def test_other_truths_are_an_error(truth):
    with pytest.raises(ValueError, match="neither a letter nor options"):
        letter_of(truth)
