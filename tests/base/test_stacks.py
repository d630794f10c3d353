"""Where the main thread is, as another thread sees it."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
from helpers.scripts import run_script

from mirrax._src.base.stacks import main_threads_line, main_threads_stack


def look_from_another_thread() -> str:
    found = []
    thread = threading.Thread(target=lambda: found.append(main_threads_line()))
    thread.start()
    thread.join()
    return found[0]


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
from mirrax._src.base.stacks import main_threads_stack

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
        own = [at for at in main_threads_stack() if at.filename == "<string>"]
        looks.append({at.name for at in own})

done = False
watcher = threading.Thread(target=look)
watcher.start()
while len(looks) < 2000:
    work(50)
done = True
watcher.join()
names = {"<module>", "work", "numbers", "close_at_the_end"}
print(set.union(*looks) - names, "work" in set.union(*looks))
"""


def test_looking_at_a_busy_thread_finds_only_its_lines():
    done = run_script(_BUSY)
    assert (done.returncode, done.stdout) == (0, "set() True\n"), done.stderr


_COLLECTED = """
import gc, sys, threading, time
from mirrax._src.base.stacks import main_threads_stack

def numbers(depth):
    keep = {"depth": depth}
    return numbers(depth - 1) if depth else len(keep)

names, looks, done = set(), 0, False
def look():
    global looks
    while not done:
        names.update(at.name for at in main_threads_stack())
        looks += 1

watcher = threading.Thread(target=look)
sys.setswitchinterval(1e-5)
# As JAX does, at the worst moments: the main thread runs on while a collection is under way.
gc.callbacks.append(lambda phase, info: time.sleep(0))
gc.set_threshold(2)
watcher.start()
while (looks < 300 or "numbers" not in names) and watcher.is_alive():
    numbers(12)
done = True
watcher.join()
print(looks >= 300)
"""


def test_a_garbage_collection_meanwhile_is_no_problem():
    done = run_script(_COLLECTED)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_left_as_it_was(is_on):
    assert gc.isenabled()
    try:
        gc.enable() if is_on else gc.disable()
        look_from_another_thread()
        assert gc.isenabled() == is_on
    finally:
        gc.enable()


_FORKED = """
import gc, os, threading, warnings
from mirrax._src.base.stacks import main_threads_line

warnings.simplefilter("ignore")
done = False
def look():
    while not done:
        main_threads_line()

watcher = threading.Thread(target=look)
watcher.start()
codes = set()
for _ in range(100):
    child = os.fork()
    if child == 0:
        main_threads_line()
        os._exit(0 if gc.isenabled() else 1)
    codes.add(os.waitpid(child, 0)[1])
done = True
watcher.join()
print(codes)
"""


def test_forked_children_have_a_collector_and_can_look():
    assert run_script(_FORKED).stdout == "{0}\n"


def test_many_threads_hide_nothing():
    done = threading.Event()
    others = [threading.Thread(target=done.wait) for _ in range(150)]
    try:
        for thread in others:
            thread.start()
        assert look_from_another_thread().startswith("test_stacks.py:")
    finally:
        done.set()
        for thread in others:
            thread.join()


def test_names_of_files_are_as_the_user_wrote_them():
    file = "/home/jürgen/prüfung.py"
    known: dict[str, Any] = {"look": main_threads_stack}
    exec(compile("stack = look()", file, "exec"), known)
    assert file in [at.filename for at in known["stack"]]


_NO_DESCRIPTORS = """
import os, resource, threading
from mirrax._src.base.stacks import main_threads_line

opened, found = [], []
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, most))
try:
    while True:
        opened.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
watcher = threading.Thread(target=lambda: found.append(main_threads_line()))
watcher.start()
watcher.join()
for descriptor in opened:
    os.close(descriptor)
print(len(found))
"""


def test_no_file_is_needed():
    assert run_script(_NO_DESCRIPTORS).stdout == "1\n"
