"""Where the main thread is, as another thread sees it."""

from __future__ import annotations

import threading

from helpers.scripts import run_script

from mirrax._src.base.errors import main_threads_line, main_threads_stack


def test_another_thread_sees_the_users_line_and_the_whole_stack():
    lines, stacks = [], []

    def look() -> None:
        lines.append(main_threads_line())
        stacks.append(main_threads_stack())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert lines[0].startswith("test_stacks.py:")
    (here,) = [at for at in stacks[0] if "whole_stack" in at.name]
    assert here.line in ("thread.start()", "thread.join()")


_BUSY = """
import io, os, sys, threading, warnings
from mirrax._src.base.errors import main_threads_stack

sys.setswitchinterval(1e-5)
warnings.simplefilter("ignore", ResourceWarning)

def numbers(depth):
    if depth:
        yield from numbers(depth - 1)
    yield depth

def close_at_the_end(_):
    file = io.FileIO(os.devnull)  # others run while it closes and this returns to C

def work(rounds):
    for _ in range(rounds):
        list(numbers(8))
        list(map(close_at_the_end, range(8)))
    return "done"

looks = []
def look():
    while not done:
        looks.append({at.name for at in main_threads_stack()})

done = False
watcher = threading.Thread(target=look)
watcher.start()
while len(looks) < 2000:
    work(50)
done = True
watcher.join()
names = {"<module>", "work", "numbers", "close_at_the_end", "start", "wait"}
print(set.union(*looks) - names, "work" in set.union(*looks))
"""


def test_looking_at_a_busy_thread_finds_only_its_lines():
    done = run_script(_BUSY)
    assert (done.returncode, done.stdout) == (0, "set() True\n"), done.stderr
