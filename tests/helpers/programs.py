"""XLA compiles quickly, and what it has compiled is shared by all processes and the next run.

Tests compile the same small programs again and again: in every process of pytest-xdist, in
every worker, and in every run. JAX's persistent cache finds a program by its text, so a change
of mirrax that changes a program misses, and nothing is ever out of date. An entry that is
damaged, or that another process is writing, is compiled anew, with a warning that is ignored.

`JAX_COMPILATION_CACHE_DIR` chooses another place; empty, it turns sharing off.

Programs of tests run for microseconds and compile for tens of milliseconds, so XLA optimises
their machine code less: two to three times as fast. It also fuses otherwise than for users, so
`make test-newest` compiles as they do; collectives are the same. `XLA_FLAGS`, also empty, wins.

JAX 0.10 makes a context of MLIR's for each program and takes it apart again, which takes longer than
the rest of lowering it; like newer ones, it uses one several times here.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import threading
from pathlib import Path
from typing import Any

import jax
from jax._src.interpreters import mlir

# The newest JAX does not know the second one, and XLA ends a process for a flag that it does not
# know.
_QUICKLY = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)
_PROGRAMS_OF_A_CONTEXT = 50

# Of a run of all tests a tenth; entries of a few KiB.
_MOST_ENTRIES = 100_000

# For a new interpreter in whose output nothing but the test's own may be.
WARNINGS_ARE_ERRORS = (
    *("-W", "error"),
    *("-W", "ignore:Error reading persistent compilation cache"),
    *("-W", "ignore:Error writing persistent compilation cache"),
)


def compile_quickly() -> None:
    """Makes this process, before it uses a device, and those that it starts optimise less.

    Processes that it starts need a call of their own to use contexts again.
    """
    if jax.__version_info__ < (0, 11):
        os.environ.setdefault("XLA_FLAGS", _QUICKLY)
        if mlir.make_ir_context is _make_context:
            mlir.make_ir_context = _take_context


_make_context = mlir.make_ir_context
_own = threading.local()  # a context is for one thread at a time


def _take_context() -> Any:
    """A context of MLIR's that this thread has used before, but not too often: it only grows."""
    uses = getattr(_own, "uses", 0)
    if uses % _PROGRAMS_OF_A_CONTEXT == 0:
        _own.context = _make_context()
    _own.uses = uses + 1
    return _own.context


def share_programs() -> None:
    """Makes this process and those that it starts use one cache."""
    folder = _folder()
    if folder.is_dir() and len(os.listdir(folder)) > _MOST_ENTRIES:
        shutil.rmtree(folder, ignore_errors=True)
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        if name.upper() not in os.environ:
            os.environ[name.upper()] = str(value)
            jax.config.update(name, value)


def _folder() -> Path:
    """One for each JAX and each kind of processor: programs are machine code."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    kind = hashlib.sha256(f"{_processor()} {os.cpu_count()}".encode()).hexdigest()[:8]
    return Path(home, "mirrax-tests", f"jax-{jax.__version__}-{kind}")


def _processor() -> str:
    """What the processor is and can do, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = {x for x in lines if x.startswith(("model name", "flags", "Features"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(told)])
