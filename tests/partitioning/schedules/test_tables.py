"""Schedules of all sizes keep the contract of tables, and cost what their papers say."""

import dataclasses
import pathlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioning.declaration import DeclarationError
from partitioning.schedules import SCHEDULES, Costs, Table, Work, check, from_csv, live_counts, looped, make, measure, to_csv

sizes = given(stages=st.integers(1, 9), microbatches=st.integers(1, 24), latency=st.integers(1, 2))
few = settings(max_examples=60, deadline=None)


def made(name, stages, microbatches, latency=1, chunks=None):
    """The table, with as many more microbatches as the schedule needs."""
    if name == "interleaved":
        microbatches = -(-microbatches // (stages * latency)) * stages * latency
    latency = None if name == "one_f_one_b_alternating" else latency
    return make(name, stages, microbatches, chunks, latency)        # `make` checks it


@pytest.mark.parametrize("name", SCHEDULES)
@few
@sizes
def test_every_schedule_is_valid_at_every_size(name, stages, microbatches, latency):
    table = made(name, stages, microbatches, latency)
    assert table.num_stages == stages and table.num_microbatches >= microbatches
    assert from_csv(to_csv(table), table.name) == table


@few
@given(stages=st.integers(1, 6), groups=st.integers(1, 3), chunks=st.integers(1, 4))
def test_interleaving_divides_the_bubble_by_its_chunks(stages, groups, chunks):
    microbatches = stages * groups
    bubble = measure(make("interleaved", stages, microbatches, chunks)).time_bubble
    assert bubble == pytest.approx((stages - 1) / chunks / (microbatches + (stages - 1) / chunks))


@few
@given(stages=st.integers(1, 9), microbatches=st.integers(1, 24), backward=st.integers(1, 3))
def test_the_bubbles_of_gpipe_and_1f1b_are_the_closed_form(stages, microbatches, backward):
    expected = (stages - 1) / (microbatches + stages - 1)
    costs = Costs(1, backward / 2, backward / 2)
    for name in ("gpipe", "one_f_one_b"):
        figures = measure(make(name, stages, microbatches), costs)
        assert figures.time_bubble == pytest.approx(expected) and figures.bubble == pytest.approx(expected)


@few
@given(stages=st.integers(2, 9), microbatches=st.integers(2, 24))
def test_zero_bubble_schedules_wait_less_than_1f1b_does(stages, microbatches):
    plain = measure(make("one_f_one_b", stages, microbatches)).time_bubble
    for name in ("zero_bubble", "zero_bubble_paired", "zero_bubble_v"):
        assert measure(make(name, stages, microbatches)).time_bubble < plain, name


@few
@given(stages=st.integers(1, 9), microbatches=st.integers(1, 40))
def test_what_is_live_is_bounded_by_the_stages(stages, microbatches):
    def live(name):
        return live_counts(make(name, stages, microbatches))

    assert live("gpipe") == (microbatches,) * stages
    assert live("one_f_one_b") == tuple(min(microbatches, 2 * (stages - stage) - 1) for stage in range(stages))
    assert live("one_f_one_b_alternating") == tuple(min(microbatches, stages - stage) for stage in range(stages))
    assert max(live("zero_bubble")) <= stages and max(live("zero_bubble_v")) <= 2 * stages


def test_a_pair_in_one_tick_beats_one_piece_per_tick():
    assert measure(make("one_f_one_b_alternating", 8, 32)).time_ratio == pytest.approx(1.54, abs=0.005)
    assert measure(make("one_f_one_b", 8, 32)).time_ratio == pytest.approx(1.22, abs=0.005)


# What is wrong with a table is said with its place.


def table_of(*rows, microbatches=1, **fields):
    """Each row a stage, each cell work in the words of a sheet."""
    sheet = "\n".join(f"{stage},{row}" for stage, row in enumerate(rows))
    return dataclasses.replace(from_csv(sheet, "mine"), num_microbatches=microbatches, **fields)


@pytest.mark.parametrize("table, words", [
    (table_of("F0,,,B0", ",F0,B0,", latency=3), "its latency is 3"),
    (table_of("F0,,,B0", ",F0,,B0"), "tick 3, stage 0, B0 (backward) needs tick 3, stage 1"),
    (table_of("F0,,,B0", "F0,B0,,"), "tick 0, stage 1, F0 (forward) needs tick 0, stage 0"),
    (table_of("F0,,,B0", ",F0,B0,", latency=2), "whose result can be used from tick 2 on (latency 2)"),
    (table_of("F0,,,B0,B0", ",F0,B0,"), "tick 4, stage 0, B0 (backward) was done at tick 3 already"),
    (table_of("F0,,,", ",F0,B0,"), "needs either a backward or an input half and a weight half; it has none of them"),
    (table_of("F0,,,I0", ",F0,B0,"), "it has input half"),
    (table_of("F0,,,W0,I0", ",F0,B0,"), "tick 3, stage 0, W0 (weight half) needs tick 4, stage 0, I0"),
    (table_of("F0,,,B0", ",F0,B0,", microbatches=2), "microbatch 1 at position 0 (stage 0) has no forward"),
    (table_of("F0 F1,,,B0,B1", ",F0 F1,B0,B1", microbatches=2), "sends two results to the next stage"),
    (table_of("F0,F1,,B0,B1", ",F0,F1 B0,B1", microbatches=2, live=(1, 2)), "stage 0 has up to 2 microbatches live"),
    (table_of("F0,,,B0", ",F0,B0,", live=(1,)), "live has 1 numbers"),
    (table_of("F0,,,B0", ",F0,B0,", placement=((0, 0),)), "its placement is ((0, 0),)"),
    (table_of("F0 B0", "F0 B0", "F0 B0", "F0 B0", placement=((0, 2, 1, 3),)), "these are no neighbours"),
    (table_of("F0.1,,,B0", ",F0,B0,", placement=looped(2)), "its chunks go from 0 to 0"),
])
def test_a_table_that_breaks_the_contract_is_refused(table, words):
    with pytest.raises(DeclarationError) as caught:
        check(table)
    assert words in str(caught.value)


def test_a_valid_table_by_hand_is_let_pass():
    check(table_of("F0,F1,,B0,B1", ",F0,F1 B0,B1", microbatches=2, live=(2, 2)))


# By name, from a file, from a function.

def test_microbatches_that_do_not_suit_are_answered_with_those_that_do():
    with pytest.raises(DeclarationError, match="config.pipeline.num_microbatches = 10 .* The nearest that work: 8 or 12"):
        make("interleaved", 4, 10)


@pytest.mark.parametrize("schedule, words", [
    ("one_f_on_b", "did you mean 'one_f_one_b'"), ("no.csv", "cannot be read"), ("no.py:wave", "there is no file no.py")])
def test_a_schedule_that_is_not_there_is_refused(schedule, words):
    with pytest.raises(DeclarationError, match=words):
        make(schedule, 2, 4)


def test_a_sheet_and_a_function_of_ones_own_serve(tmp_path):
    table = make("one_f_one_b", 2, 4)
    (tmp_path / "mine.csv").write_text(to_csv(table))
    assert make(str(tmp_path / "mine.csv"), 2, 4) == dataclasses.replace(table, name="mine")
    with pytest.raises(DeclarationError, match="config.pipeline.num_microbatches = 8, but the schedule mine is for 4"):
        make(str(tmp_path / "mine.csv"), 2, 8)
    (tmp_path / "own.py").write_text("from partitioning.schedules import gpipe\n\ndef wave(stages, microbatches):\n"
                                     "    return gpipe(stages, microbatches)\n")
    assert make(f"{tmp_path / 'own.py'}:wave", 2, 4) == make("gpipe", 2, 4)


@pytest.mark.parametrize("sheet, words", [
    ("0,F0,X1", "line 1, tick 1 has 'X1'"), ("1,F0", "begins with '1'"), ("", "has no line for a stage"),
    ("latency,a\n0,F0", "has 'a'; expected a number"), ("latency,1\nlatency,1\n0,F0", "2 lines latency")])
def test_a_sheet_with_a_mistake_is_answered_with_its_line(sheet, words):
    with pytest.raises(DeclarationError) as caught:
        from_csv(sheet, "mine")
    assert words in str(caught.value)


def test_a_table_may_be_made_without_the_fields_that_have_defaults():
    table = Table("mine", 1, looped(1), (((Work("F", 0), Work("B", 0)),),))
    check(table)
    assert measure(table).time_bubble == 0


def test_the_figures_in_the_documentation_are_those_of_the_tables():
    page = (pathlib.Path(__file__).parents[3] / "docs" / "pipelines.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \| (.*) \|$", page, re.M)
    assert len(rows) == 4 * len(SCHEDULES)
    for stages, microbatches, name, figures in rows:
        found = measure(make(name, int(stages), int(microbatches)))
        assert figures == (f"{found.ticks} | {found.bubble:.1%} | {found.time_bubble:.1%} | {found.time_ratio:.2f} | "
                           f"{max(found.live):g}")


@pytest.mark.parametrize("code, words", [
    ("def f(p, m): raise ValueError('no idea')", "failed for 2 stages and 4 microbatches: ValueError: no idea"),
    ("def f(): pass", "failed for 2 stages .*TypeError"), ("def f(p, m): import sys; sys.exit(7)", "failed .*SystemExit: 7"),
    ("def f(p, m) return 1", "cannot be loaded: SyntaxError"), ("import nowhere", "cannot be loaded: ModuleNotFoundError"),
    ("f = 3", "has no function 'f'")])
def test_what_goes_wrong_in_a_function_of_ones_own_is_one_message(code, words, tmp_path):
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(DeclarationError, match=words):
        make(f"{tmp_path / 'mine.py'}:f", 2, 4)


def test_a_function_of_ones_own_may_have_dataclasses_beside_it(tmp_path):
    (tmp_path / "mine.py").write_text("""
from __future__ import annotations
import dataclasses
from partitioning.schedules import make

@dataclasses.dataclass
class Sizes:
    stages: int

def f(p, m):
    return make("gpipe", Sizes(p).stages, m)
""")
    assert make(f"{tmp_path / 'mine.py'}:f", 2, 4) == make("gpipe", 2, 4)


@pytest.mark.parametrize("change, words", [
    (dict(placement=()), "its placement is"), (dict(num_microbatches=2.0), "its num_microbatches is 2.0"),
    (dict(latency=1.0), "its latency is 1.0"), (dict(live=("a", "b")), "its live is"),
    (dict(ticks=(tick for tick in ())), "its ticks are a generator"), (dict(ticks=((("F", 0),),)), "tick 0 has"),
    (dict(ticks=(3,)), "tick 0 is 3")])
def test_a_table_made_of_other_things_is_refused(change, words):
    with pytest.raises(DeclarationError, match=words):
        check(dataclasses.replace(make("gpipe", 2, 2), **change))


def test_a_sheet_that_speaks_of_a_chunk_far_away_is_refused_before_any_is_made():
    with pytest.raises(DeclarationError, match="speaks of chunk 300000000, and has 2 pieces of work in all"):
        from_csv("0,F0.300000000 B0", "sheet")


def test_the_documented_function_is_a_schedule(tmp_path):
    """docs/pipelines.md's own."""
    text = (pathlib.Path(__file__).parents[3] / "docs" / "pipelines.md").read_text("utf-8")
    (tmp_path / "mine.py").write_text(re.search(r"```python\n(.*?)```", text, re.S)[1])
    table, known = (make(schedule, 4, 6) for schedule in (f"{tmp_path / 'mine.py'}:all_then_back", "gpipe"))
    assert measure(table) == measure(known) and hash(table)
