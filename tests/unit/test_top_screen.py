"""`seer top`'s screen: a function of two answers and the terminal's size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.cells import cell_len
from statuses import engine, status

from seer.common.wire import RolloutStatus, Unwritten
from seer.observe.screen import HEAD, OPEN_HEAD, WORDS, Glance, duration, screen, sparkline

GLANCE = Glance(status(tokens=816), status(), 1.0, rates=(1000.0, 2000.0, 3264.0))

AT_80 = """\
seer top   policy seer   weights v12   4 engines   up 1 h 02 min
rollout step-12   141/192 responses   53,100 tokens   ends in about 1 min 50 s
64 running   107 waiting   3,264 tokens/s ▃▅█
engine       run wait KV used       booked tokens/s accepted cached lost starts
node0-0       16    0 █·······  16%    35%      816     2.00    62%    0      1
node1-0       16    0 █·······  16%    35%      816     2.00    62%    3      1
node2-0       16    0 █·······  16%    35%      816     2.00    62%    0      1
node3-0       16    0 █·······  16%    35%      816     2.00    62%    0      1
longest by prompt  open run   tokens  of about
p18#3                 5   3    1,310     1,420  node0-1, chunk 4

q quit   ? what words mean   ↑ ↓ scroll"""


def lines(glance, width=80, height=24, scroll=0):
    return [line.rstrip() for line in screen(glance, width, height, scroll)[0].plain.split("\n")]


def test_80_columns_show_all():
    assert "\n".join(lines(GLANCE, height=12)) == AT_80


def test_a_log_that_cannot_be_written_stands_above_the_rollouts_with_its_reason():
    why = Unwritten(seconds=200.0, problem="[Errno 28] No space\x1b left\n")
    shown = lines(Glance(status(unwritten={"log": why, "chunks": why})))
    assert shown[1] == r"chunks not written for 3 min 20 s: [Errno 28] No space\x1b left\n"
    assert shown[2].startswith("log not written for 3 min 20 s: ")
    assert shown[3].startswith("rollout step-12")


@given(st.integers(20, 200), st.integers(5, 60), st.integers(0, 700), st.integers(0, 600), st.booleans())
def test_it_fits_whatever_the_size(width, height, scroll, engines, explained):
    glance = Glance(status(engines), None)
    shown = screen(glance, width, height, scroll, explained)[0].plain.split("\n")
    assert len(shown) <= height
    assert all(cell_len(line) <= width for line in shown)
    assert shown[-1].startswith("q quit")


def test_the_end_is_a_range_before_it_is_known_and_the_name_gives_way_to_it():
    early = replace(
        status().open_rollouts[0], rollout_id="rollout-0123456789abcdef", finished=0, eta_seconds=None,
        eta_least=20.4, eta_most=250.0,
    )  # fmt: skip
    shown = lines(Glance(status(open_rollouts=[early])))
    assert shown[1] == "rollout …89abcdef   0/192 responses   53,100 tokens   ends in 20 s to 4 min 10 s"
    assert lines(Glance(status(open_rollouts=[early])), width=120)[1] == (
        "rollout rollout-0123456789abcdef   0/192 responses   53,100 tokens   ends in 20 s to 4 min 10 s"
    )


def test_rollouts_are_named_where_there_are_several_and_an_old_buffer_tells_no_counts():
    first = status().longest_open[0]
    second = replace(first, rollout_id="step-13", prompt_id="q", engine="", chunks=2, open=0, running=0)
    shown = lines(Glance(status(longest_open=[first, second])))
    at = shown.index("longest by prompt  open run   tokens  of about")
    assert shown[at + 1 : at + 3] == [
        "step-12 p18#3         5   3    1,310     1,420  node0-1, chunk 4",
        "step-13 q#3           -   -    1,310     1,420  waits, after 2 chunks",
    ]


def test_every_word_of_the_tables_is_explained():
    words = ", ".join(word for word, _ in WORDS).split(", ")
    assert {*HEAD, *OPEN_HEAD, "KV used", "rollout", "in its tail", "held"} <= set(words)
    _, last = screen(GLANCE, 80, 24, 10**6, explained=True)
    pages = [screen(GLANCE, 80, 24, scroll, explained=True)[0].plain for scroll in range(last + 1)]
    seen = " ".join(" ".join(pages).split())
    for word, meaning in WORDS:
        assert word in seen
        assert meaning.split()[-1] in seen
    assert "? back" in pages[0]


def test_a_long_table_scrolls_to_its_end_and_no_further():
    glance = Glance(status(512), None)
    _, last = screen(glance, 80, 24, 10**6)
    end = lines(glance, scroll=10**6)
    assert end == lines(glance, scroll=last) != lines(glance, scroll=last - 1)
    assert any("p18#3" in line for line in end)
    assert not any("p18#3" in line for line in lines(glance))
    assert any(line.startswith("node511-0") for line in end)
    seen = {
        line.split()[0] for scroll in range(0, last + 10, 10) for line in lines(glance, scroll=scroll) if line
    }
    assert {f"node{number}-0" for number in range(512)} <= seen


def test_an_engine_of_data_parallel_ranks_says_how_many():
    one, other = engine(0), engine(1)
    ranked = replace(other, name="a-name-too-long-for-its-cells", capacity=replace(other.capacity, parts=8))
    shown = lines(Glance(status(instances=[one, ranked])))
    assert "a-name-to x8  16    0 █·······  16%    35%" in "\n".join(shown)


def test_texts_of_peers_are_escaped():
    evil = "a\x1b[2J\nb\u202e\r"
    rollout = RolloutStatus(rollout_id=evil, requests=1, finished=0, tokens=0, groups_open=1, seconds=1.0)
    open_request = replace(status().longest_open[0], prompt_id=evil)
    bad = replace(engine(0), name=evil)
    glance = Glance(
        status(
            instances=[bad],
            policy=evil,
            quarantined={evil: evil},
            open_rollouts=[rollout],
            longest_open=[open_request],
        ),
        problem=evil,
    )
    shown = screen(glance, 200, 24)[0].plain
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert shown.count("\n") == 23
    assert shown.count("\\x1b[2J") >= 5


def test_what_is_out_of_order_is_said():
    glance = Glance(
        status(
            1, engines=3, quarantined={"e9": "no such weights"}, asleep=True, requests_held=5, draining=True
        ),
        problem="it did not answer",
    )
    text = "\n".join(lines(glance))
    for part in (
        "1 engines + 2 not serving",
        "asleep",
        "draining: finishes what it began",
        "5 held",
        "e9: QUARANTINED: no such weights",
    ):
        assert part in text
    assert lines(glance)[-1] == "away, and asked again: it did not answer"
    empty = "\n".join(lines(Glance(status(0, open_rollouts=[], longest_open=[]))))
    assert "no engine serves" in empty
    assert "no rollout is open" in empty


def test_an_engine_that_began_anew_has_no_rate_yet():
    again = replace(engine(0, tokens=5), restarts=1)
    shown = lines(Glance(status(instances=[again]), status()))
    (row,) = [line for line in shown if line.startswith("node0-0")]
    assert row.split()[-5] == "-"
    assert row.split()[-1] == "2"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"),
        (59.4, "59 s"),
        (60, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (3720, "1 h 02 min"),
        (90_000, "1 d 01 h"),
    ],
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


def test_bars_are_as_high_as_rates():
    assert sparkline([0, 1, 2, 4]) == "▁▃▅█"
    assert sparkline([]) == sparkline([0.0]) == ""
