"""Pictures: real files with every label in them, whatever the numbers and the texts are."""

import dataclasses
import math
import re
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from PIL import Image

from rlvr_cli.analysis.pictures import plots
from rlvr_cli.analysis.pictures.picture import COLORS, DASHES, MARKS, Line, Panel, Picture
from rlvr_cli.analysis.pictures.plots import save_plot
from rlvr_cli.errors import RlvrError

NAN = math.nan
LINES = Picture(
    (
        Panel(
            "Held-out reward",
            "step (updates)",
            "mean reward",
            (
                Line([0, 10, 20], [0.38, 0.6, 0.88], [0.3, 0.5, 0.8], [0.4, 0.7, 0.9]),
                Line([0, 20], [0.5, 0.6], series=1),
            ),
        ),
    ),
    series=("base", "sft"),
)
KINDS = Panel(
    "Failures",
    "kind",
    "share",
    (Line([0, 1], [0.5, 0.2], [0.4, 0.1], [0.6, 0.3]), Line([0, 1], [0.1, NAN], series=1, notes=("12", ""))),
    bars=True,
    places=("no answer", "truncated"),
)
BARS = Picture((KINDS,), series=("before", "after"))
HOSTILE = [
    "$\\frac{1}{0}$", "$x", "\\$5 and \\$6", "$$", "_hidden", "\x1b[31m\x00\r\n\x07", "\ud800", "\ufffe\uffff", "\u202e\u2028",
    "W" * 5000, "漢字 😀", "a" + "\u0301" * 200, "<script>&amp;]]>", "%s {x}", "", "   ", "\\", "^_{",
]  # fmt: skip


def one(*lines, series=("",), **changes):
    """A picture of one panel, in which each line is a series."""
    panel = Panel("A title", "step", "reward", tuple(lines), **changes)
    return Picture((panel,), series=series)


def texts(path):
    """The texts of an SVG, in the order in which they are drawn."""
    root = ElementTree.parse(path).getroot()
    return ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]


def svg_texts(tmp_path, picture):
    save_plot(picture, tmp_path / "p.svg")
    return texts(tmp_path / "p.svg")


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def colored(path, number):
    """How many pixels have nearly the color of the series of that number."""
    color = [int(COLORS[number][i : i + 2], 16) for i in (1, 3, 5)]
    return int((np.abs(pixels(path) - color).max(axis=-1) < 12).sum())


def test_png_is_a_picture_on_opaque_white(tmp_path):
    save_plot(LINES, tmp_path / "p.png")
    data = (tmp_path / "p.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    image = Image.open(BytesIO(data))
    assert min(image.size) >= 400
    assert image.convert("RGBA").getextrema()[3] == (255, 255), "a transparent one is illegible on a dark page"
    assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    assert colored(tmp_path / "p.png", 0) > 100
    assert colored(tmp_path / "p.png", 1) > 100


def test_svg_holds_every_label_as_text(tmp_path):
    found = svg_texts(tmp_path, dataclasses.replace(LINES, title="A run", notes=("A note.",)))
    for label in ("Held-out reward", "step (updates)", "mean reward", "base", "sft", "A run", "A note."):
        assert found.count(label) == 1
    found = svg_texts(tmp_path, BARS)
    for label in ("Failures", "kind", "share", "no answer", "truncated", "before", "after", "12"):
        assert found.count(label) == 1


def test_one_legend_for_all_panels(tmp_path):
    (panel,) = LINES.panels
    worst = dataclasses.replace(panel, lines=(*panel.lines, Line([0, 20], [0.1, 0.2], variant=1)))
    found = svg_texts(tmp_path, dataclasses.replace(LINES, panels=(panel, worst, panel), variants=("mean", "worst")))
    assert [found.count(label) for label in ("base", "sft", "mean", "worst")] == [1, 1, 1, 1]
    assert "alone" not in svg_texts(tmp_path, one(Line([0, 1], [0, 1]), series=("alone",)))


def test_a_long_legend_says_how_many_it_leaves_out(tmp_path):
    lines = [Line([0, 1], [0, i], series=i) for i in range(40)]
    found = svg_texts(tmp_path, one(*lines, series=tuple(f"run {i}" for i in range(40))))
    assert "run 22" in found
    assert "run 23" not in found
    assert "… and 17 more" in found


def test_long_labels_that_differ_in_the_middle_do_not_become_equal(tmp_path):
    long = "x" * 120
    series = tuple(f"{long} {i} {long}" for i in range(3))
    found = svg_texts(tmp_path, one(*(Line([0, 1], [0, i], series=i) for i in range(3)), series=series))
    labels = [text for text in found if "xxx" in text]
    assert len(set(labels)) == 3
    assert [label[:2] for label in labels] == ["1:", "2:", "3:"]


@pytest.mark.parametrize("suffix", [pytest.param(".png", marks=pytest.mark.slow), ".svg"])
def test_the_same_input_gives_the_same_bytes(tmp_path, suffix):
    picture = dataclasses.replace(LINES, panels=(*LINES.panels, KINDS), title="t", variants=("a", "b"), notes=("n",))
    first, second = tmp_path / f"1{suffix}", tmp_path / f"2{suffix}"
    save_plot(picture, first)
    with matplotlib.rc_context(
        {"font.size": 30, "text.usetex": True, "savefig.transparent": True, "svg.hashsalt": "x"}
    ):
        save_plot(picture, second)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
def test_another_process_gives_the_same_bytes(tmp_path):
    """Nothing depends on what was drawn before, on the hash seed, on a display or on settings in the directory."""
    (tmp_path / "matplotlibrc").write_text("font.size: 40\naxes.facecolor: black\nsavefig.dpi: 30\n")
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import rlvr_cli.analysis.pictures.plots as p\n"
        "from rlvr_cli.analysis.pictures.picture import Line, Panel, Picture\n"
        "assert not {'matplotlib', 'numpy'} & set(sys.modules)\n"
        "lines = (Line([0, 1], [0, 1], [0, 0], [1, 2]), Line([0, 1], [1, 1], series=1))\n"
        "for name in ('p.svg', 'p.png'):\n"
        "    p.save_plot(Picture((Panel('t', 'x', 'y', lines),), ('a', 'b')), Path(name))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    environment = {"PYTHONPATH": str(Path(plots.__file__).parents[3]), "PYTHONHASHSEED": "7", "HOME": str(Path.home())}
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=tmp_path, env=environment)
    lines = (Line([0, 1], [0, 1], [0, 0], [1, 2]), Line([0, 1], [1, 1], series=1))
    for name in ("p.svg", "p.png"):
        save_plot(Picture((Panel("t", "x", "y", lines),), ("a", "b")), tmp_path / f"here-{name}")
        assert (tmp_path / f"here-{name}").read_bytes() == (tmp_path / name).read_bytes()


def test_settings_are_as_they_were(tmp_path):
    before = dict(matplotlib.rcParams)
    save_plot(LINES, tmp_path / "p.png")
    with pytest.raises(ValueError, match="zip"):
        save_plot(one(Line([0, 1], [0])), tmp_path / "p.png")
    assert dict(matplotlib.rcParams) == before


def test_what_cannot_be_drawn_is_a_gap(tmp_path):
    """Of five points the middle one is missing: the axes are those of the other four, and nothing joins the halves."""

    def drawn(gap) -> str:
        line = Line(x, [1, 1, gap, 1, 1], [0.5, gap, gap, 0.5, 0.5], [1.5, 1.5, gap, gap, 1.5])
        save_plot(one(line), tmp_path / "gap.svg")
        return (tmp_path / "gap.svg").read_text()

    x = [0, 1, 2, 3, 4]
    whole = drawn(NAN)
    assert [gap for gap in (-math.inf, None, 1e300) if drawn(gap) != whole] == []

    save_plot(one(Line(x, [1, 1, NAN, 1, 1])), tmp_path / "gap.png")
    save_plot(one(Line(x, [1, 1, 1, 1, 1])), tmp_path / "whole.png")
    assert colored(tmp_path / "gap.png", 0) < 0.8 * colored(tmp_path / "whole.png", 0)


def test_gaps_in_bars(tmp_path):
    lines = (Line([0, 1], [0.5, NAN]), Line([0, 1], [math.inf, 0.2], series=1))
    assert "no answer" in svg_texts(
        tmp_path, dataclasses.replace(BARS, panels=(dataclasses.replace(KINDS, lines=lines),))
    )


@pytest.mark.parametrize(
    "picture",
    [
        one(),
        one(Line([0, 1], [NAN, NAN], [NAN, NAN], [NAN, NAN]), Line([], [], series=1), series=("a", "b")),
        one(Line([], []), bars=True),
        one(Line([0], [NAN]), bars=True, places=("one",)),
        one(Line([0, 1], [0, -1]), log="y"),
    ],
)
def test_empty_panels_say_so(tmp_path, picture):
    found = svg_texts(tmp_path, picture)
    assert "no data" in found
    assert "A title" in found


def test_no_panels_at_all(tmp_path):
    assert svg_texts(tmp_path, Picture(())) == ["no data"]


def test_a_series_without_data_is_named_so(tmp_path):
    found = svg_texts(tmp_path, one(Line([0, 1], [0, 1]), series=("full", "empty")))
    assert "full" in found
    assert "empty (no data)" in found


def test_each_of_two_seeds_is_a_thin_line(tmp_path):
    mean, seeds = Line([0, 1], [0.5, 0.5]), ([0.1, 0.2], [0.9, 0.8])
    for line, thin in ((mean, 0), (dataclasses.replace(mean, seeds=seeds), 2)):
        save_plot(one(line), tmp_path / "p.svg")
        assert (tmp_path / "p.svg").read_text().count("stroke-opacity: 0.4") == thin


@pytest.mark.parametrize("y", [[0.5], [NAN] * 101 + [0.5] + [NAN] * 98])
def test_a_point_alone_is_seen(tmp_path, y):
    save_plot(one(Line(range(len(y)), y)), tmp_path / "p.png")
    assert colored(tmp_path / "p.png", 0) > 20
    save_plot(one(Line(range(len(y)), y, [v - 0.4 for v in y], [v + 0.4 for v in y])), tmp_path / "i.png")
    image = pixels(tmp_path / "i.png")
    blueish = (image[..., 2] - image[..., 0] > 60).any(axis=1)
    assert blueish.sum() > 0.3 * len(blueish), "its interval too, which is a line from 0.1 to 0.9"


# Of mathematics, of control characters and of markup; the others: slow.
@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.slow] * (n not in (0, 4, 12))) for n in range(0, len(HOSTILE), 2)]
)
def test_hostile_texts_are_shown_as_they_are(tmp_path, number):
    lines = (Line([0, 1], [0, 1]), Line([0, 1], [1, 0], series=1))
    a, b = HOSTILE[number : number + 2]
    noted = dataclasses.replace(lines[0], notes=(b, b))
    panels = (Panel(a, a, a, lines), Panel(b, b, b, (noted, lines[1]), bars=True, places=(b, "b" + b)))
    found = svg_texts(tmp_path, Picture(panels, (a, "b" + a), (b, "c" + b), a, (a,)))
    for text, least in ((a, 6), (b, 4)):
        plain = plots._plain(text).strip()
        if len(text) < 50:
            assert sum(t.strip() == plain for t in found) >= least or not plain
    for drawn in found:
        assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u2028\ufffe\uffff" for c in drawn)


def test_hostile_texts_can_be_painted(tmp_path):
    lines = tuple(Line([0], [i], series=i) for i in range(len(HOSTILE)))
    save_plot(one(*lines, series=tuple(HOSTILE), bars=True, places=("p",)), tmp_path / "p.png")
    assert colored(tmp_path / "p.png", 1) > 20


def test_long_texts_keep_both_ends_and_stay_in_the_picture(tmp_path):
    long = "start " + "W" * 200 + " end"
    panel = dataclasses.replace(LINES.panels[0], title=long, x_label=long)
    sentence = "every word of a long note is to be read, " * 6 + "W" * 200 + " end"
    picture = Picture((panel, panel), ("a", "b"), title=long, notes=(sentence,))
    found = svg_texts(tmp_path, picture)
    shortened = [t for t in found if "…" in t and t.startswith("start") and t.endswith("end")]
    assert len(shortened) == 5
    assert sum("…" in t for t in found) == 6, "and the long word"
    lines = [t for t in found if "every" in t or "note" in t]
    assert len(lines) > 1
    assert " ".join(reversed(lines)) in sentence, "drawn from the lowest line up"
    save_plot(picture, tmp_path / "p.png")
    image = pixels(tmp_path / "p.png")
    border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
    assert (border == 255).all(), "nothing is cut off at the edge"


@pytest.mark.parametrize(("count", "columns", "rows"), [(3, 2, 2), (5, 3, 2)])
def test_the_grid(tmp_path, count, columns, rows):
    (panel,) = one(Line([0, 1], [0, 1])).panels
    save_plot(Picture(tuple(dataclasses.replace(panel, title=f"panel {i}") for i in range(count))), tmp_path / "p.svg")
    elements = ElementTree.parse(tmp_path / "p.svg").getroot().iter("{http://www.w3.org/2000/svg}text")
    places = [(e.get("x"), e.get("y")) for e in elements if "".join(e.itertext()).startswith("panel")]
    assert len(places) == count
    assert len({x for x, _ in places}) == columns
    assert len({y for _, y in places}) == rows


def test_the_ticks_are_those_of_the_description(tmp_path):
    found = svg_texts(tmp_path, one(Line([1, 2, 4, 8], [0.1, 0.2, 0.4, 0.48]), log="x"))
    assert found[: found.index("step")] == ["1", "2", "4", "8"]
    assert {"0", "0.1", "0.2", "0.3", "0.4", "0.5"} <= set(found)
    assert {"0.001", "0.01", "0.1"} <= set(svg_texts(tmp_path, one(Line([0, 1], [0.0005, 0.2]), log="y")))
    assert {"0.6", "0.7", "0.8", "0.9"} <= set(svg_texts(tmp_path, one(Line([0, 1], [0.52, 0.95]), log="y")))


def test_numbers_of_any_size(tmp_path):
    for scale in (5e-324, 9e99):
        line = Line([0, scale, -scale], [scale, -scale, 0], [0, -scale, -scale], [scale, 0, scale])
        of_a_log, of_bars = (
            one(Line([0, scale], [scale, 1]), log="xy"),
            one(Line([0], [scale]), bars=True, places=("l",)),
        )
        save_plot(Picture(one(line).panels + of_a_log.panels + of_bars.panels, ("",)), tmp_path / "p.png")


def test_many_bars_have_as_many_labels_as_fit(tmp_path):
    labels = tuple(f"question number {i:03}" for i in range(100))
    found = svg_texts(tmp_path, one(Line(range(100), range(100)), bars=True, places=labels))
    written = [t for t in found if t.startswith("question")]
    assert 10 <= len(written) <= 40
    assert written == sorted(written)


def test_what_the_description_names_can_be_drawn():
    """Neither two lines, nor two groups of bars, look alike but for their color."""
    assert set(plots._MARKERS) == {*MARKS, "dot", ""}
    assert len(set(plots._MARKERS.values())) == len(plots._MARKERS)
    assert len(set(DASHES)) == len(DASHES)
    assert math.gcd(len(set(plots._HATCHES)), len(COLORS)) == 1, "as long as both differ, their pairs do"


def test_points_that_are_not_joined_have_no_line(tmp_path):
    line = Line((0, 1, 2), (0.5, 0.1, 0.9))
    drawn = {}
    for joined in (True, False):
        save_plot(Picture((Panel("t", "x", "y", (dataclasses.replace(line, joined=joined),)),)), tmp_path / "p.svg")
        drawn[joined] = (tmp_path / "p.svg").read_text()
    paths = {
        joined: len(re.findall(r'clip-path="url[^"]*" style="fill: none; stroke: #0072b2', text))
        for joined, text in drawn.items()
    }
    assert paths == {True: 1, False: 0}
    assert drawn[False].count("<use") - drawn[True].count("<use") == 0, "each point has its mark"


def test_whiskers_stand_beside_each_other(tmp_path):
    """Bands of many lines would hide each other."""
    lines = [Line([0, 1], [0.5, 0.5], [0.2, 0.2], [0.8, 0.8], series=i) for i in range(4)]
    assert one(*lines).panels[0].has_whiskers
    assert not one(*lines[:3]).panels[0].has_whiskers
    assert one(Line([0], [0.5], [0.2], [0.8])).panels[0].has_whiskers, "a band of one point would not be seen"
    save_plot(one(*lines, series=tuple("abcd")), tmp_path / "p.png")
    image = pixels(tmp_path / "p.png")
    height = len(image)
    for number in range(3):  # a column of the color far above the lines
        color = [int(COLORS[number][i : i + 2], 16) for i in (1, 3, 5)]
        near = np.abs(image[: height // 2] - color).max(axis=-1) < 90
        assert near.sum(axis=0).max() > 0.1 * height


def test_an_axis_from_0_is_logarithmic_in_the_file_too(tmp_path):
    save_plot(one(Line([0, 1, 10, 100], [0.1, 0.2, 0.4, 0.5]), log="x"), tmp_path / "p.svg")
    (path,) = re.findall(r'<path d="(M [^"]*)" clip-path[^>]*stroke: #0072b2', (tmp_path / "p.svg").read_text())
    xs = [float(x) for x, _ in re.findall(r"([-\d.]+) ([-\d.]+)", path)]
    steps = [(b - a) / math.log1p(v) for a, b, v in zip(xs[:1] * 3, xs[1:], (1, 10, 100), strict=True)]
    assert steps == pytest.approx([steps[0]] * 3, rel=1e-3)


@pytest.mark.parametrize("name", ["p.pdf", "p", "p.png.gz", ".png"])
def test_another_ending_is_refused(tmp_path, name):
    with pytest.raises(RlvrError, match=r"does not end in \.png or \.svg"):
        save_plot(LINES, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_endings_in_capitals(tmp_path):
    save_plot(LINES, tmp_path / "P.PNG")
    assert (tmp_path / "P.PNG").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_written_is_said(tmp_path):
    with pytest.raises(RlvrError, match=r"Cannot write .*p\.png"):
        save_plot(LINES, tmp_path / "missing" / "p.png")
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(RlvrError, match=r"taken\.png is not a regular file"):
        save_plot(LINES, tmp_path / "taken.png")
    assert [p.name for p in tmp_path.iterdir()] == ["taken.png"], "no temporary file is left"


def test_an_old_picture_is_replaced(tmp_path):
    (tmp_path / "p.svg").write_text("old")
    save_plot(LINES, tmp_path / "p.svg")
    assert "old" not in texts(tmp_path / "p.svg")
