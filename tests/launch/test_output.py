"""What mmrun makes of the output of real ranks: on a terminal, in files, of one rank."""

import re
import subprocess

import pytest

WITH_BAR = """
    import os, sys, time
    from tqdm import tqdm
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    print(os.environ.get("COLUMNS"))
    for step in tqdm(range(20)):
        time.sleep(0.02)
        if step % 5 == rank:
            print("step", step)
    """


def screen_after(sent):
    """The lines that a terminal shows in the end, without colours."""
    rows, column = [""], 0
    for token in re.findall(r"\x1b\[[\d;]*[A-Za-z]|[^\x1b]", sent.decode()):
        if token == "\n":
            rows.append("")
        elif token == "\r":
            column = 0
        elif token == "\x1b[K":
            rows[-1] = rows[-1][:column]
        elif not token.startswith("\x1b"):
            rows[-1] = rows[-1][:column] + token + rows[-1][column + 1 :]
            column += 1
        else:
            assert token.endswith("m"), f"more than colours: {token!r}"
    return rows


def test_a_bar_on_a_terminal(mmrun_on_terminal, write):
    sent = mmrun_on_terminal(2, write(WITH_BAR), TQDM_MININTERVAL="0")
    chosen, *rows, last = screen_after(sent)
    assert chosen.startswith("mmrun: 2 ranks")
    assert last == ""
    drawn = [row for row in re.split(r"[\r\n]+", sent.decode()) if "/20 [" in row]
    assert len(drawn) >= 20  # again and again, and each time in one row
    assert max(len(re.sub(r"\x1b\[[\d;]*\w", "", row)) for row in drawn) <= 60
    bars = [row for row in rows if "|" in row]
    assert [row[:9] for row in sorted(bars)] == ["[0] 100%|", "[1] 100%|"]
    lines = [f"[{rank}] step {step + rank}" for rank in (0, 1) for step in (0, 5, 10, 15)]
    expected = sorted([*lines, "[0] 56", "[1] 56"])
    assert sorted(row for row in rows if "|" not in row) == expected
    colours = set(re.findall(rb"(\x1b\[0;\d+m)\[(\d)\]\x1b\[0m ", sent))
    assert colours == {(b"\x1b[0;36m", b"0"), (b"\x1b[0;33m", b"1")}


def test_without_a_terminal_there_is_nothing_of_it(mmrun, write):
    ended = mmrun(1, write(WITH_BAR))
    assert ended.code == 0
    assert ended.stdout == "[0] None\n" + "".join(f"[0] step {i}\n" for i in (0, 5, 10, 15))
    assert re.fullmatch(r"\[0\] 100%\|.*\n", ended.stderr)
    assert "\x1b" not in ended.output


NOISY = """
    import os, sys
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    print("out", rank)
    print("err", rank, file=sys.stderr)
    if rank == 1 and "fail" in sys.argv:
        raise ValueError("mine")
    """


def test_one_rank_is_shown_and_all_are_kept(mmrun, write, tmp_path):
    ended = mmrun(2, "--only-rank", "0", "--no-prefix", "--log-dir", "logs", write(NOISY))
    assert (ended.code, ended.stdout, ended.stderr) == (0, "out 0\n", "err 0\n")
    for rank in (0, 1):
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert sorted(log.splitlines()) == [f"err {rank}", f"out {rank}"]


def test_a_rank_that_is_not_shown_can_still_say_why_it_failed(mmrun, write):
    ended = mmrun(2, "--only-rank", "0", write(NOISY), "fail")
    assert ended.code == 1
    assert "[1] ValueError: mine" in ended.stderr
    assert "[1] err" not in ended.stderr


def test_a_folder_that_cannot_be_written_starts_nothing(mmrun, write):
    script = write("open('started', 'w')")
    ended = mmrun(1, "--log-dir", script / "logs", script)
    assert ended.code == 2
    assert "mmrun: --log-dir: cannot write" in ended.stderr
    assert not (script.parent / "started").exists()


def test_the_job_ends_when_nobody_reads(start_mmrun, write):
    process = start_mmrun(2, write("while True: print('line')"))
    assert process.stdout.readline().endswith("] line\n")
    process.stdout.close()
    try:
        assert process.wait(20) == 128 + 13
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail("mmrun goes on")
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
