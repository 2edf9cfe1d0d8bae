"""Plots are the same bytes for the same numbers, on any machine's settings, and the training log is read strictly."""

import matplotlib
import pytest

from clinrl.analysis.exam import Confusion
from clinrl.errors import ArtefactError
from clinrl.reports import figures

pytestmark = pytest.mark.usefixtures("real")
COUNTS = Confusion(
    rows=("1", "2", "3"), columns=("1", "2", "3", "unreadable"), counts=((5, 1, 0, 2), (0, 0, 0, 0), (0, 1, 7, 0))
)
HISTORY = [
    {"step": step, "loss": 0.01, "reward": step / 10, "reward/think": 0.1, "reward/direct": 0.2, "reward_std": 0.6,
     "terms/level": 0.5, "terms/clamp": 0.0, "answer/1": 0.4, "answer/2": 0.6, "clipped/think": 0.0, "entropy": 0.3}
    for step in (1, 2, 3)
]  # fmt: skip


@pytest.mark.long
def test_plots_are_the_same_bytes_whatever_the_machine_prefers(tmp_path):
    figures.confusion(COUNTS, "v1, mode think", tmp_path / "a.png")
    figures.curves(HISTORY, "Training of v1", tmp_path / "b.png")
    with matplotlib.rc_context({"font.size": 30, "savefig.facecolor": "red", "axes.facecolor": "black"}):
        figures.confusion(COUNTS, "v1, mode think", tmp_path / "c.png")
        figures.curves(HISTORY, "Training of v1", tmp_path / "d.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "c.png").read_bytes()
    assert (tmp_path / "b.png").read_bytes() == (tmp_path / "d.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert b"Software" not in (tmp_path / "a.png").read_bytes()


def test_history_columns_start_with_step_and_what_is_plotted():
    columns = figures.history_columns(HISTORY)
    assert columns[0] == "step"
    assert columns[1:5] == ["loss", "reward", "reward/direct", "reward/think"]
    assert set(columns) == {*HISTORY[0], "loss"}
    assert len(set(columns)) == len(columns)
    assert columns.index("reward_std") > columns.index("entropy")


def test_curves_of_imitation_show_the_loss(tmp_path):
    assert figures.history_columns([{"step": 1, "loss": 2.0, "lr": 0.1}]) == ["step", "loss", "reward", "lr"]
    figures.curves([{"step": 1, "loss": 2.0}], "Training of v1", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_log_without_quantities_has_no_curves(tmp_path):
    with pytest.raises(ArtefactError, match="none of the quantities"):
        figures.curves([{"step": 1, "lr": 0.1}], "Training of v1", tmp_path / "a.png")


def test_read_history_keeps_numbers_and_leaves_out_what_was_not_finite(tmp_path):
    log = tmp_path / "history.jsonl"
    log.write_text('{"step":1,"reward":0.5,"why":"text","grad_norm":null}\n{"step":2,"reward":0.6}\n')
    assert figures.read_history(log) == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.6}]


@pytest.mark.parametrize("line", ["{", "[1]", '{"reward":1}'])
def test_read_history_names_the_bad_line(tmp_path, line):
    log = tmp_path / "history.jsonl"
    log.write_text('{"step":1}\n' + line + "\n")
    with pytest.raises(ArtefactError, match="line 2"):
        figures.read_history(log)


@pytest.mark.parametrize("text", ["", "step,lo", "step,loss\n1,2.0\n2,0.", "step,loss\n1\n", "step,loss\n1,2.x\n"])
def test_a_table_that_was_cut_short_is_named(tmp_path, text):
    table = tmp_path / "history.csv"
    table.write_text(text)
    with pytest.raises(ArtefactError, match=rf"{table} is cut short or .*; restore it with `git checkout {table}`"):
        figures.read_table(table)
    table.write_text("step,loss,kl\n1,2.0,\n")
    assert figures.read_table(table) == [{"step": 1, "loss": 2.0}]


def test_answers_keep_the_order_of_the_labels(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "_save", lambda figure, _: drawn.append(figure))
    history = [{"step": 1, "answer/May Be": 0.2, "answer/Always": 0.3, "answer/Never": 0.5}]
    figures.curves(history, "Training of v1", tmp_path / "a.png", ("Never", "May Be", "Always"))
    legend = drawn[0].axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["Never", "May Be", "Always"]


def served(step):
    """A step of a run in three phases; in the second chance leaves a level out now and then."""
    phase = 1 if step <= 4 else 2 if step <= 9 else 3
    shares = {1: (1.0, 0.0, 0.0), 2: (0.5, 0.5, 0.0) if step % 2 else (0.25, 0.25, 0.5), 3: (0.0, 0.0, 1.0)}[phase]
    levels = dict(zip(("easy", "medium", "hard"), shares, strict=True))
    return {"step": step, "reward": step / 10, "phase": phase, **{f"served/{name}": of for name, of in levels.items()}}


def test_phases_are_bounded_where_one_follows_another(tmp_path, monkeypatch):
    history = [served(step) for step in range(1, 13)]
    assert figures.phases(history) == [(0.5, 4.5), (4.5, 9.5), (9.5, 12.5)]
    assert figures.phases(history[:3]) == [(0.5, 3.5)]
    assert figures.phases(HISTORY) == []
    drawn = []
    monkeypatch.setattr(figures, "_save", lambda figure, _: drawn.append(figure))
    figures.curves(history, "Training of v1", tmp_path / "a.png")
    shown = [axes for axes in drawn[0].axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == ["", ""]
    assert [axes.get_title(loc="left") for axes in shown] == ["Reward", "Served"]
    assert [text.get_text() for text in shown[1].get_legend().get_texts()] == ["easy", "medium", "hard"]
    for axes in shown:
        assert [(span.get_x(), span.get_x() + span.get_width()) for span in axes.patches] == figures.phases(history)


@pytest.mark.parametrize(("in_turn", "lines"), [(True, ["direct", "think"]), (False, ["all", "direct", "think"])])
def test_a_mean_over_modes_is_drawn_where_a_step_has_both(in_turn, lines, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "_save", lambda figure, _: drawn.append(figure))
    history = [
        {"step": step, "reward": 0.5}
        | {
            f"reward/{mode}": 0.5
            for number, mode in enumerate(("think", "direct"))
            if not in_turn or step % 2 == number
        }
        for step in range(1, 7)
    ]
    figures.curves(history, "Training of v1", tmp_path / "a.png")
    assert [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()] == lines


def test_a_run_without_phases_is_drawn_without_shades(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "_save", lambda figure, _: drawn.append(figure))
    figures.curves(HISTORY, "Training of v1", tmp_path / "a.png")
    assert not any(axes.patches for axes in drawn[0].axes)
    assert "Served" not in {axes.get_title(loc="left") for axes in drawn[0].axes}
