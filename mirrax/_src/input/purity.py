"""Whether a function depends on nothing but its arguments, as far as its code tells.

The functions of pipelines may draw random numbers, count, read files. Only a function
whose every name is known to be harmless may be called once for many rows, or not at all
for rows that nobody asks for.
"""

from __future__ import annotations

import builtins
import dis
import math
import operator
import types
from typing import Any

import numpy as np

_HARMLESS = frozenset(
    """abs all any bool complex dict divmod enumerate float int isinstance len list map max
    min pow range reversed round set slice sorted str sum tuple zip True False None
    Ellipsis""".split()
)
_EFFECTS = frozenset(
    "STORE_GLOBAL DELETE_GLOBAL STORE_ATTR DELETE_ATTR STORE_SUBSCR DELETE_SUBSCR "
    "STORE_SLICE STORE_DEREF DELETE_DEREF IMPORT_NAME IMPORT_FROM RAISE_VARARGS "
    "YIELD_VALUE SEND GET_AWAITABLE LOAD_BUILD_CLASS "
    "PUSH_EXC_INFO".split()  # `try` and `with`, which may hide what we have to see
)
# NumPy's functions whose results differ from call to call, or that reach outside.
_DANGEROUS = frozenset(
    """random empty empty_like load save savez savez_compressed savetxt loadtxt genfromtxt
    fromfile memmap frompyfunc vectorize seterr seterrcall setbufsize ctypeslib
    copyto put place putmask fill_diagonal put_along_axis out fill sort partition itemset
    setfield setflags resize tofile dump at""".split()
)
_PLAIN = (
    int
    | float
    | complex
    | str
    | bytes
    | bool
    | None
    | np.generic
    | np.dtype
    | np.ndarray
)


def is_pure(fn: Any) -> bool:
    """Whether it can be told that `fn` depends on nothing but its arguments."""
    return _is_harmless(fn, set())


def _is_harmless(value: Any, seen: set[int]) -> bool:
    if isinstance(value, _PLAIN | np.ufunc) or value is Ellipsis:
        return True
    if isinstance(value, tuple):
        return all(_is_harmless(part, seen) for part in value)
    if isinstance(value, types.ModuleType):
        return value in (np, math, operator)
    if isinstance(value, type):
        return issubclass(value, np.generic) or value in (np.ndarray, np.dtype)
    home = getattr(value, "__module__", None) or ""
    if isinstance(value, types.FunctionType) and home.partition(".")[0] != "numpy":
        return id(value) in seen or _is_pure_code(value, {*seen, id(value)})
    name = getattr(value, "__name__", "")
    is_function = isinstance(value, types.FunctionType | types.BuiltinFunctionType)
    is_numpys = home == "numpy" and name not in _DANGEROUS
    return (is_function or callable(value)) and (
        is_numpys or home in ("math", "_operator", "operator")
    )


def _is_pure_code(fn: types.FunctionType, seen: set[int]) -> bool:
    codes = [fn.__code__]
    for code in codes:
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    if any(_has_effects(code) or _DANGEROUS & set(code.co_names) for code in codes):
        return False
    for name in {name for code in codes for name in globals_of(code)}:
        if name in fn.__globals__:
            if not _is_harmless(fn.__globals__[name], seen):
                return False
        elif name not in _HARMLESS or not hasattr(builtins, name):
            return False
    cells = [cell.cell_contents for cell in fn.__closure__ or () if is_filled(cell)]
    defaults = (fn.__defaults__ or (), tuple((fn.__kwdefaults__ or {}).values()))
    return _is_harmless((tuple(cells), defaults), seen)


def _has_effects(code: types.CodeType) -> bool:
    is_loop = code.co_name in ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
    if any(isinstance(c, tuple) and "out" in c for c in code.co_consts):
        return True  # a call with `out=...`
    for op in dis.get_instructions(code):
        if op.opname == "BINARY_OP" and op.argrepr.endswith("="):
            return True  # `x += 1` may change what others hold
        is_own = op.opname == "STORE_DEREF" and op.argval in code.co_cellvars
        is_step = op.opname == "YIELD_VALUE" and is_loop
        if op.opname in _EFFECTS and not is_own and not is_step:
            return True
    return False


def globals_of(code: types.CodeType) -> set[str]:
    """The global names that a function's code refers to."""
    return {
        op.argval
        for op in dis.get_instructions(code)
        if op.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }


def is_filled(cell: types.CellType) -> bool:
    """Whether a name of a function around has a value yet."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
