"""How mmrun shows the output of ranks, without starting any."""

import contextlib
import fcntl
import os
import random
import re
import struct
import termios

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimesh.errors import StartupError
from multimesh.launch.mmrun.chatter import ChatterFilter
from multimesh.launch.mmrun.console import ERRORS, OUTPUT, Console
from multimesh.launch.mmrun.logs import Logs
from multimesh.launch.mmrun.options import Options
from multimesh.launch.mmrun.screen import Screen, fit, rank_environment

ERASE = b"\r\x1b[K"
CYAN, YELLOW, RESET = b"\x1b[0;36m", b"\x1b[0;33m", b"\x1b[0m"


@pytest.fixture
def terminal():
    """A terminal of 20 columns: its descriptor, and a function that reads what was drawn."""
    controller, program = os.openpty()
    fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 20, 0, 0))
    attributes = termios.tcgetattr(program)
    attributes[1] &= ~termios.OPOST  # newlines come out as they went in
    termios.tcsetattr(program, termios.TCSANOW, attributes)
    os.set_blocking(controller, False)

    def drawn():
        parts = []
        with contextlib.suppress(BlockingIOError):
            while True:
                parts.append(os.read(controller, 65536))
        return b"".join(parts)

    yield program, drawn
    os.close(controller)
    os.close(program)


def console_on(fd, *, has_colours=False, **options):
    screen = Screen(fd, fd, frozenset({OUTPUT, ERRORS}), has_colours=has_colours)
    return Console(screen, **options)


# Lines


def test_lines_are_whole_and_have_their_rank(capfd):
    console = Console()
    console.feed(0, OUTPUT, b"one\ntwo ")
    console.feed(1, OUTPUT, b"other\r\n")
    console.feed(0, ERRORS, b"err\n")
    console.feed(0, OUTPUT, b"words\n\nend")
    console.finish(0)
    out, err = capfd.readouterr()
    assert out == "[0] one\n[1] other\r\n[0] two words\n[0] \n[0] end\n"
    assert err == "[0] err\n"


def test_bytes_of_the_program_are_its_own(capfdbinary):
    line = b"\xff\xfe \0 \x1b[31mred\x1b[0m \xe2\x82"
    console = Console()
    console.feed(3, OUTPUT, line + b"\n")
    assert capfdbinary.readouterr().out == b"[3] " + line + b"\n"


def test_without_prefix(capfd):
    console = Console(prefix=False)
    console.feed(0, OUTPUT, b"a\nb\n")
    console.show(1, b"Traceback\n  line\n")
    assert capfd.readouterr() == ("a\nb\n", "Traceback\n  line\n")


def test_only_one_rank_is_shown_but_for_tracebacks(capfd):
    console = Console(only_rank=1)
    console.feed(0, OUTPUT, b"hidden\n")
    console.feed(1, OUTPUT, b"shown\n")
    console.finish(0)
    console.show(0, b"Traceback")
    assert capfd.readouterr() == ("[1] shown\n", "[0] Traceback\n")


def test_after_a_failure_only_the_failed_rank_is_heard(capfd):
    console = Console()
    console.feed(0, ERRORS, b"before")
    console.hear_only(1)
    console.feed(0, ERRORS, b"connection lost\n")
    console.feed(1, ERRORS, b"last words")
    console.finish(0)
    console.finish(1)
    assert capfd.readouterr().err == "[0] before\n[1] last words\n"


def test_a_failure_of_another_rank_does_not_undo_the_users_choice(capfd):
    console = Console(only_rank=0)
    console.hear_only(1)
    console.feed(0, OUTPUT, b"echo\n")
    console.feed(1, OUTPUT, b"last words\n")
    assert capfd.readouterr().out == ""


def test_a_long_line_stays_whole(capfdbinary):
    console = Console()
    part = b"x" * 65536
    for _ in range(160):
        console.feed(0, OUTPUT, part)
    console.feed(0, OUTPUT, b"\n")
    assert capfdbinary.readouterr().out == b"[0] " + part * 160 + b"\n"


def test_a_line_without_an_end_is_cut(capfdbinary):
    console = Console()
    for _ in range(300):
        console.feed(0, OUTPUT, b"x" * 65536)
    assert capfdbinary.readouterr().out == b"[0] " + b"x" * (65536 * 257) + b"\n"


# Progress bars


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"\r10 %\r20 %\n", "[0] 20 %\n"),
        (b"10 %\r20 %\r\n", "[0] 20 %\r\n"),
        (b"\r10 %\r\x1b[2K20 %\n", "[0] 20 %\n"),
        (b"\r10 %\r    \rdone\n", "[0] done\n"),
        (b"\r10 %\r    \r", ""),
        (b"\r10 %", "[0] 10 %\n"),
    ],
    ids=["before", "behind", "erased", "removed", "gone", "unfinished"],
)
@pytest.mark.parametrize("step", [1, 100])
def test_a_bar_leaves_its_last_state(capfd, data, lines, step):
    console = Console()
    for start in range(0, len(data), step):
        console.feed(0, ERRORS, data[start : start + step])
    console.finish(0)
    assert capfd.readouterr().err == lines


def test_a_bar_is_redrawn_below_other_lines(terminal):
    fd, drawn = terminal
    console = console_on(fd)
    console.feed(0, ERRORS, b"\r10 %")
    assert drawn() == b"[0] 10 %"
    console.feed(1, OUTPUT, b"hello\nand")
    assert drawn() == ERASE + b"[1] hello\n[0] 10 %"
    console.feed(0, ERRORS, b"\r20 %")
    assert drawn() == ERASE + b"[0] 20 %"
    console.say("mmrun: a word")
    assert drawn() == ERASE + b"mmrun: a word\n[0] 20 %"
    console.feed(0, ERRORS, b"\r100 %\n")
    assert drawn() == ERASE + b"[0] 100 %\n"


def test_a_bar_that_a_failure_stops_is_not_left_behind(terminal):
    fd, drawn = terminal
    console = console_on(fd)
    console.feed(0, ERRORS, b"\r10 %")
    console.hear_only(1)
    console.feed(0, ERRORS, b"\r11 %")
    console.show(1, b"Traceback")
    console.close()
    assert drawn() == b"[0] 10 %" + ERASE + b"[0] 10 %\n[1] Traceback\n"


def test_bars_of_other_ranks_are_not_drawn(terminal):
    fd, drawn = terminal
    console = console_on(fd)
    console.feed(1, ERRORS, b"\r10 %")
    console.feed(1, ERRORS, b"\r20 %\n")
    assert drawn() == b"[1] 20 %\n"
    console = console_on(fd, only_rank=1)
    console.feed(1, ERRORS, b"\r10 %")
    assert drawn() == b"[1] 10 %"


def test_a_bar_never_takes_a_second_row(terminal):
    fd, drawn = terminal
    console = console_on(fd)
    console.feed(0, ERRORS, b"\r" + b"#" * 30)
    assert drawn() == b"[0] " + b"#" * 16


NESTED = (
    b"\repoch 1",
    b"\n",
    b"\rbatch 1",
    b"\x1b[A",
    b"\repoch 2",
    b"\n",
    b"\rbatch 2",
    b"\x1b[A",
    b"\n",
    b"\r       ",  # tqdm's way to remove it
    b"\x1b[A",
    b"\repoch 3",
    b"\n",
)


def test_bars_below_each_other_leave_their_last_states(capfd):
    console = Console()
    for part in NESTED:
        console.feed(0, ERRORS, part)
    console.feed(0, ERRORS, b"done\n\nreally\n")
    console.finish(0)
    # That the cursor can go up is known only after the first line.
    lines = ["epoch 1", "epoch 3", "done", "", "really"]
    assert capfd.readouterr().err == "".join(f"[0] {line}\n" for line in lines)


def test_bars_below_each_other_are_redrawn_together(terminal):
    fd, drawn = terminal
    console = console_on(fd)
    for part in NESTED[:8]:
        console.feed(0, ERRORS, part)
    assert drawn().endswith(b"[0] epoch 2\n[0] batch 2")
    console.feed(1, OUTPUT, b"hello\n")
    assert drawn() == ERASE + b"\x1b[A" + ERASE + b"[1] hello\n[0] epoch 2\n[0] batch 2"
    for part in NESTED[8:]:
        console.feed(0, ERRORS, part)
    removed, changed = ERASE + b"\x1b[A" + ERASE + b"[0] epoch 2", ERASE + b"[0] epoch 3"
    assert drawn() == removed + changed
    console.finish(0)
    assert drawn() == ERASE + b"[0] epoch 3\n"


def test_lines_of_a_file_do_not_disturb_the_bar(terminal):
    fd, drawn = terminal
    read_end, write_end = os.pipe()
    console = Console(Screen(write_end, fd, frozenset({ERRORS})))
    console.feed(0, ERRORS, b"\r10 %")
    console.feed(1, OUTPUT, b"hello\n")
    assert (os.read(read_end, 100), drawn()) == (b"[1] hello\n", b"[0] 10 %")
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize(
    ("line", "row"),
    [
        (b"abcdef", b"abcd"),
        ("äöüäöü".encode(), "äöüä".encode()),
        ("\u6f22\u5b57\u6f22".encode(), "\u6f22\u5b57".encode()),
        (b"e\xcc\x81abcd", b"e\xcc\x81abc"),
        (b"\x1b[31mabcdef", b"\x1b[31mabcd\x1b[0m"),
        (b"\x1b[1Aab\x1b[?25l\a", b"ab"),
        (b"a\tb", b"a b"),
        (b"\xff", "\ufffd".encode()),
    ],
    ids=["ascii", "utf-8", "wide", "combining", "colour", "movement", "tab", "invalid"],
)
def test_a_row_shows_what_fits(line, row):
    assert fit(line, 4) == row


# Colours and sizes


def test_prefixes_are_coloured_on_a_terminal(terminal):
    fd, drawn = terminal
    console = console_on(fd, has_colours=True)
    console.feed(0, OUTPUT, b"a\nb\n")
    console.feed(1, ERRORS, b"c\n")
    zero, one = CYAN + b"[0]" + RESET, YELLOW + b"[1]" + RESET
    assert drawn() == zero + b" a\n" + zero + b" b\n" + one + b" c\n"


@pytest.mark.parametrize(
    ("environ", "prefix", "has_live_rows"),
    [
        ({}, CYAN + b"[0]" + RESET, True),
        ({"NO_COLOR": "1"}, b"[0]", True),
        ({"NO_COLOR": ""}, CYAN + b"[0]" + RESET, True),
        ({"TERM": "dumb"}, b"[0]", False),
    ],
)
def test_colours_are_a_matter_of_the_environment(monkeypatch, environ, prefix, has_live_rows):
    monkeypatch.setattr(os, "isatty", lambda fd: True)
    screen = Screen.on_standard_output(environ)
    assert screen.coloured(OUTPUT, 0, b"[0]") == prefix
    assert screen.has_live_rows is has_live_rows


def test_no_colours_in_a_file():
    assert Screen.on_standard_output({}).coloured(OUTPUT, 0, b"[0]") == b"[0]"


def test_ranks_know_how_wide_the_terminal_is(terminal):
    fd, _ = terminal
    assert console_on(fd, has_colours=True).rank_environment({}) == {"COLUMNS": "16", "LINES": "10"}
    assert console_on(fd, prefix=False).rank_environment({"LINES": "5"}) == {"COLUMNS": "20"}
    assert Console().rank_environment({}) == {}
    assert rank_environment(os.terminal_size((2, 2)), 4, {})["COLUMNS"] == "1"


# Log files


def test_each_rank_has_a_file_with_all_that_it_wrote(tmp_path, capfd):
    folder = tmp_path / "new" / "logs"
    console = Console.from_options(Options(("x",), log_dir=str(folder), only_rank=0), 11)
    console.feed(1, OUTPUT, b"out\nunfin")
    console.feed(1, ERRORS, b"err\n")
    assert (folder / "rank-01.log").read_bytes() == b"out\nerr\n"  # before anything is closed
    console.feed(1, OUTPUT, b"ished\r\rbar")
    console.hear_only(2)
    console.feed(1, ERRORS, b"echo\n")
    console.close()
    assert (folder / "rank-01.log").read_bytes() == b"out\nerr\nbar\necho\n"
    assert (folder / "rank-10.log").read_bytes() == b""
    assert capfd.readouterr() == ("", "")


def test_a_log_file_is_continued(tmp_path):
    for text in (b"first\n", b"second\n"):
        logs = Logs(str(tmp_path), 1)
        logs.write(0, text)
        logs.close()
    assert (tmp_path / "rank-0.log").read_bytes() == b"first\nsecond\n"


def test_a_folder_that_cannot_be_written_starts_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=r"cannot write .*file: File exists"):
        Console.from_options(Options(("x",), log_dir=str(tmp_path / "file")), 2)


def test_a_rank_to_show_must_exist():
    with pytest.raises(StartupError, match="a rank from 0 to 1"):
        Console.from_options(Options(("x",), only_rank=2), 2)


def test_a_full_disk_ends_the_log_and_not_the_job(tmp_path, capfd):
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    console = Console(logs=Logs(str(tmp_path), 1))
    console.feed(0, OUTPUT, b"a\n")
    console.feed(0, OUTPUT, b"b\n")
    out, err = capfd.readouterr()
    assert out == "[0] a\n[0] b\n"
    assert err == (
        f"mmrun: no more output of rank 0 in {tmp_path}/rank-0.log: No space left on device\n"
    )


# Gloo's chatter


def sentence(rank, peers):
    return (
        b"[Gloo] Rank ",
        b"%d" % rank,
        b" is connected to ",
        b"%d" % peers,
        b" peer ranks. ",
        b"Expected number of connected peer ranks is : ",
        b"%d" % peers,
        b"\n",
    )


def test_chatter_is_taken_out_of_the_line_that_it_interrupts(capfd):
    chatter = b"".join(sentence(0, 1))
    console = Console()
    console.feed(0, OUTPUT, b"loss = " + chatter[:30])
    console.feed(0, OUTPUT, chatter[30:] + b"6.5\n" + chatter)
    console.finish(0)
    assert capfd.readouterr().out == "[0] loss = 6.5\n"


@pytest.mark.parametrize(
    "text",
    [
        b"[Gloo] Rank 1\n",
        b"the cable is connected to 3 peer ranks. \n",
        b"Expected number of connected peer ranks is : 1, got 2\n",
        b"[Gloo] Rank 1 is connected to my friend\n[Gloo] Rank 2\n\n7\n",
    ],
)
def test_a_text_about_gloo_is_not_chatter(text):
    assert ChatterFilter().remove(text) == text


# Not such as Gloo's own: nobody could tell whose it is.
user_texts = st.one_of(
    st.sampled_from(
        [b"loss = ", b"step 3", b"and 6.5\n", b"[Gloo] is loud\n", b"\r50 %", b"Rank 1\n"]
    ),
    st.binary(min_size=1, max_size=20),
).filter(
    lambda text: (
        not re.search(rb"\A\n|(?m:^)\d", text) and not re.search(rb" ranks|connected", text)
    )
)


@st.composite
def mixed_writes(draw):
    """What threads that print the sentence and a program beside them write, in their order."""
    shuffle = random.Random(draw(st.integers(0, 1 << 30)))
    sizes = draw(
        st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=4)
    )
    threads = [list(sentence(*numbers)) for numbers in sizes]
    writes, buffer = [], b""
    while threads:
        thread = shuffle.choice(threads)
        buffer += thread.pop(0)
        if buffer.endswith(b"\n"):  # std::endl
            writes.append(buffer)
            buffer = b""
        threads = list(filter(None, threads))
    texts = draw(st.lists(user_texts, max_size=4))
    return writes, texts, shuffle


@given(mixed_writes())
@settings(max_examples=100, deadline=None)
def test_threads_that_interrupt_each_other_leave_nothing(mixed):
    writes, texts, shuffle = mixed
    before, after = b"".join(texts) + b"\n", b"\n".join(texts) + b"\n"
    assert filtered([before, *writes, after], shuffle) == before + after


@given(mixed_writes())
@settings(max_examples=100, deadline=None)
def test_no_text_of_the_program_is_lost(mixed):
    writes, texts, shuffle = mixed
    everything = [*writes]
    position = 0
    for text in texts:
        position = shuffle.randint(position, len(everything))
        everything.insert(position, text)
        position += 1
    shown = iter(filtered([*everything, b"\n"], shuffle))
    assert all(byte in shown for byte in b"".join(texts))  # in this order


def filtered(writes, shuffle):
    """The stream without the chatter, given in parts that end anywhere."""
    stream, chatter, kept, pending = b"".join(writes), ChatterFilter(), b"", b""
    while stream:
        size = shuffle.randint(1, len(stream))
        pending, stream = pending + stream[:size], stream[size:]
        end = pending.rfind(b"\n") + 1
        if end:
            text, rest = chatter.remove(pending[:end]), pending[end:]
            kept += text[: text.rfind(b"\n") + 1]
            pending = text[text.rfind(b"\n") + 1 :] + rest
    return kept + pending
