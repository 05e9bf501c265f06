"""Progress says what a run does, in plain lines or with bars."""

import io
import re
import threading

import pytest

from quartet.obs.progress import Progress


class Lines(io.StringIO):
    """A stream that can wait for a line."""

    def __init__(self, tty=False):
        super().__init__()
        self.tty = tty
        self.wrote = threading.Event()

    def isatty(self):
        return self.tty

    def write(self, text):
        self.wrote.set()
        return super().write(text)


def test_phase_ends_with_one_line_and_its_rate():
    stream, now = Lines(), [0.0]
    progress = Progress(stream=stream, clock=lambda: now[0])
    with progress.phase("step 1 generate", total=8, unit="samples") as phase:
        phase.advance(6)
        now[0] = 4.0
        phase.note = "640 tokens"
        phase.skip(1)
        phase.advance(1)
        # All work is done: the line is written now, not when the block is left.
        assert stream.getvalue() != ""
        now[0] = 9.0
    progress.close()
    assert stream.getvalue() == (
        "step 1 generate: 7 samples in 4.0 s (1.8 samples/s), 640 tokens\n"
    )
    assert phase.seconds == 4.0


def test_long_phase_says_what_it_waits_for():
    stream = Lines()
    progress = Progress(stream=stream, interval=0.01)
    with progress.phase("start", total=2, unit="services") as phase:
        phase.waiting_for = "learner: loading model"
        assert stream.wrote.wait(5)
    progress.close()
    first = stream.getvalue().splitlines()[0]
    assert re.fullmatch(r"start: 0/2 services, 0 s, waiting for learner: loading model", first)


def test_failed_phase_has_no_closing_line():
    stream = Lines()
    progress = Progress(stream=stream)
    with pytest.raises(ValueError, match="no"), progress.phase("x"):
        raise ValueError("no")
    progress.close()
    progress.close()
    assert stream.getvalue() == ""


def test_terminal_gets_lines_as_well():
    stream = Lines(tty=True)
    progress = Progress(stream=stream)
    with progress.phase("step 1 train", total=4, unit="samples") as phase:
        phase.advance(4)
    progress.say("[done]")
    progress.close()
    assert "step 1 train: 4 samples in" in stream.getvalue()
    assert "[done]" in stream.getvalue()
