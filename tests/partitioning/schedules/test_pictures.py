"""Schedules drawn as text and as a part of a page."""

import xml.etree.ElementTree as ElementTree

import pytest

from partitioning.schedules import SCHEDULES, make, schedule_html, schedule_text



def test_the_picture_shows_what_each_stage_does_at_each_tick():
    lines = schedule_text(make("one_f_one_b", 2, 2), width=80).splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("stage")]
    assert [[cell.split() for cell in row] for row in rows] == [
        [["F0"], ["F1", "."], [".", "B0"], ["B1"]], [["."], ["F0", "B0"], ["F1", "B1"], ["."]]]
    assert "33.3% of the time" in " ".join(lines) and "live at once on each stage: 2 1" in " ".join(lines)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(name, width):
    text = schedule_text(make(name, 4, 16), width=width)
    assert max(map(len, text.splitlines())) <= width and "F15" in text


def test_of_many_stages_and_ticks_the_first_and_the_last_are_drawn():
    text = schedule_text(make("one_f_one_b", 64, 256), width=100)
    assert "stages are not drawn" in text and "are not drawn" in text and len(text.splitlines()) < 150
    assert "stage 0 " in text and "stage 63" in text


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_part_of_a_page_is_well_formed_and_draws_every_piece(name):
    table = make(name, 4, 8)
    root = ElementTree.fromstring(schedule_html(table))
    assert len(root.findall(".//rect")) == sum(1 for _ in table.entries())
    assert len(root.findall(".//tbody/tr")) == 4


def test_a_long_schedule_is_cut_and_says_so():
    section = schedule_html(make("gpipe", 8, 64), most=100)
    assert "ticks are drawn." in section and section.count("<rect") <= 100 + 8
