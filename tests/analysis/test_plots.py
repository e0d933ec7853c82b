"""Pictures: real files with every label in them, whatever the numbers and the texts are."""

import dataclasses
import math
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from PIL import Image

from rlvr_cli.analysis import plots
from rlvr_cli.analysis.plots import Bars, Line, Panel, save_plot
from rlvr_cli.errors import RlvrError

NAN = math.nan
LINES = Panel(
    "Held-out reward",
    "step (updates)",
    "mean reward",
    (Line("base", [0, 10, 20], [0.38, 0.6, 0.88], [0.3, 0.5, 0.8], [0.4, 0.7, 0.9]), Line("sft", [0, 20], [0.5, 0.6])),
    share=True,
)
BARS = Bars("Failures", "kind", "share", ("no answer", "truncated"), (("before", (0.5, 0.2)), ("after", (0.1, NAN))))
HOSTILE = [
    "$\\frac{1}{0}$", "$x", "\\$5 and \\$6", "$$", "_hidden", "\x1b[31m\x00\r\n\x07", "\ud800", "\ufffe\uffff", "\u202e\u2028",
    "W" * 5000, "漢字 😀", "a" + "\u0301" * 200, "<script>&amp;]]>", "%s {x}", "", "   ", "\\", "^_{",
]  # fmt: skip


def one(*lines, share=False):
    return Panel("A title", "step", "reward", lines, share=share)


def texts(path):
    """The texts of an SVG, in the order in which they are drawn."""
    root = ElementTree.parse(path).getroot()
    return ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]


def svg_texts(tmp_path, *panels, **keywords):
    save_plot(panels, tmp_path / "p.svg", **keywords)
    return texts(tmp_path / "p.svg")


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def colored(path, number):
    """How many pixels have nearly the color of the series of that number."""
    color = [int(plots._COLORS[number][i : i + 2], 16) for i in (1, 3, 5)]
    return int((np.abs(pixels(path) - color).max(axis=-1) < 12).sum())


def test_png_is_a_picture_on_opaque_white(tmp_path):
    save_plot([LINES], tmp_path / "p.png")
    data = (tmp_path / "p.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    image = Image.open(BytesIO(data))
    assert min(image.size) >= 400
    assert image.convert("RGBA").getextrema()[3] == (255, 255), "a transparent one is illegible on a dark page"
    assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    assert colored(tmp_path / "p.png", 0) > 100
    assert colored(tmp_path / "p.png", 1) > 100


def test_svg_holds_every_label_as_text(tmp_path):
    found = svg_texts(tmp_path, LINES, BARS, title="A run")
    for label in ("Held-out reward", "step (updates)", "mean reward", "base", "sft", "A run"):
        assert found.count(label) == 1
    for label in ("Failures", "kind", "share", "no answer", "truncated", "before", "after"):
        assert found.count(label) == 1


def test_a_legend_only_where_there_is_a_choice(tmp_path):
    assert "alone" not in svg_texts(tmp_path, one(Line("alone", [0, 1], [0, 1])))
    assert "alone" not in svg_texts(tmp_path, dataclasses.replace(BARS, groups=(("alone", (1.0, 2.0)),)))


def test_a_long_legend_says_how_many_it_leaves_out(tmp_path):
    found = svg_texts(tmp_path, one(*(Line(f"run {i}", [0, 1], [0, i]) for i in range(40))))
    assert "run 22" in found
    assert "run 23" not in found
    assert "… and 17 more" in found


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_same_input_gives_the_same_bytes(tmp_path, suffix):
    panels = [LINES, BARS, one()]
    first, second = tmp_path / f"1{suffix}", tmp_path / f"2{suffix}"
    save_plot(panels, first, title="t")
    with matplotlib.rc_context(
        {"font.size": 30, "text.usetex": True, "savefig.transparent": True, "svg.hashsalt": "x"}
    ):
        save_plot(panels, second, title="t")
    assert first.read_bytes() == second.read_bytes()


def test_another_process_gives_the_same_bytes(tmp_path):
    """Nothing depends on what was drawn before, on the hash seed, on a display or on settings in the directory."""
    (tmp_path / "matplotlibrc").write_text("font.size: 40\naxes.facecolor: black\nsavefig.dpi: 30\n")
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import rlvr_cli.analysis.plots as p\n"
        "assert not {'matplotlib', 'numpy'} & set(sys.modules)\n"
        "for name in ('p.svg', 'p.png'):\n"
        "    p.save_plot([p.Panel('t', 'x', 'y', (p.Line('a', [0, 1], [0, 1], [0, 0], [1, 2]), p.Line('b', [0, 1], [1, 1])))], Path(name))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    environment = {"PYTHONPATH": str(Path(plots.__file__).parents[2]), "PYTHONHASHSEED": "7", "HOME": str(Path.home())}
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=tmp_path, env=environment)
    panel = Panel("t", "x", "y", (Line("a", [0, 1], [0, 1], [0, 0], [1, 2]), Line("b", [0, 1], [1, 1])))
    for name in ("p.svg", "p.png"):
        save_plot([panel], tmp_path / f"here-{name}")
        assert (tmp_path / f"here-{name}").read_bytes() == (tmp_path / name).read_bytes()


def test_settings_are_as_they_were(tmp_path):
    before = dict(matplotlib.rcParams)
    save_plot([LINES], tmp_path / "p.png")
    with pytest.raises(ValueError, match="zip"):
        save_plot([one(Line("a", [0, 1], [0]))], tmp_path / "p.png")
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("gap", [NAN, math.inf, -math.inf, None, 1e300])
def test_what_cannot_be_drawn_is_a_gap(tmp_path, gap):
    """Of five points the middle one is missing: the axes are those of the other four, and nothing joins the halves."""
    x, y = [0, 1, 2, 3, 4], [1, 1, gap, 1, 1]
    save_plot([one(Line("a", x, y, [0.5, gap, gap, 0.5, 0.5], [1.5, 1.5, gap, gap, 1.5]))], tmp_path / "gap.svg")
    save_plot(
        [one(Line("a", x, [1, 1, NAN, 1, 1], [0.5, NAN, NAN, 0.5, 0.5], [1.5, 1.5, NAN, NAN, 1.5]))],
        tmp_path / "nan.svg",
    )
    assert (tmp_path / "gap.svg").read_bytes() == (tmp_path / "nan.svg").read_bytes()

    save_plot([one(Line("a", x, y))], tmp_path / "gap.png")
    save_plot([one(Line("a", x, [1, 1, 1, 1, 1]))], tmp_path / "whole.png")
    assert colored(tmp_path / "gap.png", 0) < 0.8 * colored(tmp_path / "whole.png", 0)


def test_gaps_in_bars(tmp_path):
    bars = dataclasses.replace(BARS, groups=(("a", (0.5, NAN)), ("b", (math.inf, 0.2))))
    assert "no answer" in svg_texts(tmp_path, bars)


@pytest.mark.parametrize(
    "panel",
    [
        one(),
        one(Line("a", [], [])),
        one(Line("a", [0, 1], [NAN, NAN], [NAN, NAN], [NAN, NAN]), Line("b", [], []), share=True),
        Bars("A title", "x", "y", (), ()),
        Bars("A title", "x", "y", (), (("a", ()),)),
        Bars("A title", "x", "y", ("one",), (("a", (NAN,)),)),
    ],
)
def test_empty_panels_say_so(tmp_path, panel):
    save_plot([panel], tmp_path / "p.png")
    found = svg_texts(tmp_path, panel)
    assert "no data" in found
    assert "A title" in found


def test_no_panels_at_all(tmp_path):
    assert svg_texts(tmp_path) == ["no data"]


def test_an_empty_line_beside_a_full_one_is_named(tmp_path):
    found = svg_texts(tmp_path, one(Line("full", [0, 1], [0, 1]), Line("empty", [], [])))
    assert "full" in found
    assert "empty (no data)" in found
    assert "no data" not in found


@pytest.mark.parametrize("y", [[0.5], [NAN, 0.5, NAN], [NAN] * 101 + [0.5] + [NAN] * 98])
def test_a_point_alone_is_seen(tmp_path, y):
    save_plot([one(Line("a", range(len(y)), y))], tmp_path / "p.png")
    assert colored(tmp_path / "p.png", 0) > 20
    save_plot(
        [one(Line("a", range(len(y)), y, [v - 0.4 for v in y], [v + 0.4 for v in y]), share=True)], tmp_path / "i.png"
    )
    image = pixels(tmp_path / "i.png")
    blueish = (image[..., 2] - image[..., 0] > 60).any(axis=1)
    assert blueish.sum() > 0.3 * len(blueish), "its interval too, which is a line from 0.1 to 0.9"


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_shown_as_they_are(tmp_path, text):
    panels = [
        Panel(text, text, text, (Line(text, [0, 1], [0, 1]), Line("b" + text, [0, 1], [1, 0]))),
        Bars(text, text, text, (text, "b" + text), ((text, (1, 2)), ("b" + text, (3, 4)))),
    ]
    save_plot(panels, tmp_path / "p.png", title=text)
    found = svg_texts(tmp_path, *panels, title=text)
    plain = plots._plain(text).strip()
    if len(text) < 50:
        assert sum(t.strip() == plain for t in found) >= 9 or not plain
    for drawn in found:
        assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u2028\ufffe\uffff" for c in drawn)


def test_dollars_are_no_mathematics(tmp_path):
    found = svg_texts(tmp_path, dataclasses.replace(LINES, title=r"$a_1$ costs \$5"))
    assert r"$a_1$ costs \$5" in found


def test_long_texts_keep_both_ends_and_stay_in_the_picture(tmp_path):
    long = "start " + "W" * 200 + " end"
    panels = [dataclasses.replace(LINES, title=long, x_label=long)] * 2
    found = svg_texts(tmp_path, *panels, title=long)
    shortened = [t for t in found if "…" in t]
    assert len(shortened) == 5
    assert all(t.startswith("start") and t.endswith("end") for t in shortened)
    save_plot(panels, tmp_path / "p.png", title=long)
    image = pixels(tmp_path / "p.png")
    border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
    assert (border == 255).all(), "nothing is cut off at the edge"


@pytest.mark.parametrize(
    ("count", "columns", "rows"), [(1, 1, 1), (2, 2, 1), (3, 2, 2), (4, 2, 2), (5, 3, 2), (7, 3, 3)]
)
def test_the_grid(tmp_path, count, columns, rows):
    panel = one(Line("a", [0, 1], [0, 1]))
    save_plot([dataclasses.replace(panel, title=f"panel {i}") for i in range(count)], tmp_path / "p.svg")
    elements = ElementTree.parse(tmp_path / "p.svg").getroot().iter("{http://www.w3.org/2000/svg}text")
    places = [(e.get("x"), e.get("y")) for e in elements if "".join(e.itertext()).startswith("panel")]
    assert len(places) == count
    assert len({x for x, _ in places}) == columns
    assert len({y for _, y in places}) == rows


def test_steps_have_whole_ticks_and_shares_run_from_0_to_1(tmp_path):
    found = svg_texts(tmp_path, one(Line("a", [0, 1, 2], [0.41, 0.42, 0.43]), share=True))
    assert found[: found.index("step")] == ["0", "1", "2"]
    assert {"0.0", "0.2", "0.4", "0.6", "0.8", "1.0"} <= set(found)
    lonely = svg_texts(tmp_path, one(Line("a", [100000], [0.5])))
    assert [t for t in lonely if t.startswith(("99", "100"))] == ["99999", "100000", "100001"]
    assert "0.2" in svg_texts(tmp_path, one(Line("a", [0, 0.5, 1], [7, 8, 9]))), "times need no whole ticks"


def test_numbers_of_any_size(tmp_path):
    for scale in (5e-324, 1e-310, 1e-30, 1e9, 1e17, 9e99):
        line = Line("a", [0, scale, -scale], [scale, -scale, 0], [0, -scale, -scale], [scale, 0, scale])
        panels = [
            one(line),
            Bars("b", "x", "y", ("l",), (("a", (scale,)),)),
        ]
        save_plot(panels, tmp_path / "p.png")


def test_many_bars_have_as_many_labels_as_fit(tmp_path):
    labels = tuple(f"question number {i:03}" for i in range(200))
    found = svg_texts(tmp_path, Bars("b", "x", "y", labels, (("a", tuple(map(float, range(200)))),)))
    written = [t for t in found if t.startswith("question")]
    assert 10 <= len(written) <= 40
    assert written == sorted(written)


def test_series_differ_without_color():
    """Neither two lines, nor two groups of bars, look alike but for their color."""
    assert len({(plots._cycled(plots._MARKERS, i), str(plots._cycled(plots._DASHES, i))) for i in range(35)}) == 35
    assert len(set(plots._HATCHES)) == len(plots._COLORS)


@pytest.mark.parametrize("name", ["p.pdf", "p", "p.png.gz", ".png"])
def test_another_ending_is_refused(tmp_path, name):
    with pytest.raises(RlvrError, match=r"does not end in \.png or \.svg"):
        save_plot([LINES], tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_endings_in_capitals(tmp_path):
    save_plot([LINES], tmp_path / "P.PNG")
    assert (tmp_path / "P.PNG").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_written_is_said(tmp_path):
    with pytest.raises(RlvrError, match=r"Cannot write .*p\.png"):
        save_plot([LINES], tmp_path / "missing" / "p.png")
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(RlvrError, match=r"taken\.png is not a regular file"):
        save_plot([LINES], tmp_path / "taken.png")
    assert [p.name for p in tmp_path.iterdir()] == ["taken.png"], "no temporary file is left"


def test_an_old_picture_is_replaced(tmp_path):
    (tmp_path / "p.svg").write_text("old")
    save_plot([LINES], tmp_path / "p.svg")
    assert "old" not in texts(tmp_path / "p.svg")
