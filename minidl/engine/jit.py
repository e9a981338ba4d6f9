"""Compilation of kernels: the only module that calls `numba.njit` and chooses its flags.

    @jit            serial machine code, without the GIL, cached on disk
    @parallel_jit   the same, with `prange` loops distributed over the threads
    @in_parts(...)  a parallel kernel, made from a function that computes one part of the result
    @helper         a short function for compiled code: each caller contains a copy of it
    @apart_jit      a long function for compiled code, compiled once: callers call this code and contain no copy of it
    @choice         a kernel that is one of several: a function of Python returns the one for given arguments

Python calls the machine code of the first three. For that, Numba writes a second function, which unpacks the arguments,
and needs a fifth of all compile time. The next two do without. If Python calls them with numbers, it runs them as
Python. So the size of scratch memory is known before anything is compiled.

Three choices hold for every kernel:

- No fast-math: the compiler adds terms in the order in which they are written, and never contracts `a * b + c`. With
  the flag `reassoc`, LLVM may choose another order each time it inlines a kernel. As a result, a process that compiles
  the kernel and a process that loads it from the cache may compute different bits.
- The division of a sum into parts depends only on the size of the arrays. So the bits of the result do not depend on
  the number of threads.
- The name of the cache folder is a hash of the CPU, of the size of its second-level cache, of whether AMX may be used,
  of this file, of kernel_cache.py and libraries.py, and of every Python file under kernels/, but those of CUDA. So an
  edit in a helper leads to another folder, and the kernels that import the helper are compiled again.
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import inspect
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial, update_wrapper
from importlib import import_module
from pathlib import Path
from typing import Any

from minidl.engine.environment import WHOLE_VECTORS, isa, prepare, second_level_cache

KERNELS = Path(__file__).parents[1] / "kernels"
KEY_FILES = ("jit.py", "kernel_cache.py", "libraries.py")  # beside the kernels, what the cached code depends on

prepare()
import numba  # noqa: E402
from llvmlite import binding  # noqa: E402
from numba import prange, types  # noqa: E402
from numba.core.base import user_function  # noqa: E402
from numba.core.registry import cpu_target  # noqa: E402
from numpy import ndarray as Part  # noqa: E402  # an array of which a function receives one part, see `in_parts`

from minidl.engine import libraries  # noqa: E402
from minidl.engine.kernel_cache import KernelCache, find_folder  # noqa: E402
from minidl.errors import ConfigError  # noqa: E402


def _use_whole_vectors() -> None:
    """Let LLVM use 512-bit vectors in plain loops, if the CPU has them.

    For Intel's CPUs it prefers 256 bits, since early ones lowered their clock rate for wider vectors. Today, the wider
    ones are faster (Intel Xeon, family 6 model 167, 256 MB: tanh 1.6 times, gelu 1.4 times, SGD the same).
    """
    features = binding.get_host_cpu_features()
    if features.get("avx512f") and not isa():
        os.environ.setdefault("NUMBA_CPU_FEATURES", f"{features.flatten()},{WHOLE_VECTORS}")


_use_whole_vectors()
numba.config.reload_config()  # with these features, and if Numba was imported before this module
L2 = second_level_cache()  # bytes


def _has_amx() -> bool:
    """Return whether kernels may use AMX's tiles of bfloat16 (kernels/matmul/amx.py).

    A process must ask Linux for them, since a thread that uses them needs 8 KB more when it is interrupted.
    """
    compiled_for = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    if sys.platform != "linux" or not {"+amx-bf16", "+amx-tile", "+avx512bw"} <= set(compiled_for):
        return False
    arch_prctl, request_permission, tiles = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tiles) == 0)


HAS_AMX = _has_amx()


def _version() -> str:
    """Return the hash that names the cache folder."""
    target = cpu_target.target_context.codegen().magic_tuple()  # the target CPU and its features
    digest = hashlib.sha256(repr((target, L2, HAS_AMX)).encode())
    root = KERNELS if KERNELS.is_dir() else KERNELS.parent.parent / "kernels"
    for file in sorted([*root.rglob("*.py"), *(Path(__file__).with_name(name) for name in KEY_FILES)]):
        if not file.name.startswith("cuda"):  # numba-cuda compiles these, and keeps them elsewhere
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


_folder, _refused = find_folder(_version())


def _vector_unit() -> tuple[int, int, bool]:
    """Return the bytes and the number of the CPU's vector registers, and whether x * y + z is one instruction."""
    features = binding.get_host_cpu_features()
    if isa() in ("", "avx512") and features.get("avx512f"):
        return 64, 32, True
    if isa() in ("", "avx2") and features.get("avx2") and features.get("fma"):
        return 32, 16, True
    return 16, 32 if platform.machine() in ("aarch64", "arm64") else 16, platform.machine() in ("aarch64", "arm64")


VECTOR_BYTES, REGISTERS, HAS_FMA = _vector_unit()
if isa() == "avx512" and VECTOR_BYTES < 64:
    raise ConfigError("MINIDL_ISA is 'avx512', which this CPU lacks: unset it, or choose avx2 or portable")


# -- decorators -------------------------------------------------------------------------------------------------------


def _compile(function: Callable[..., Any], parallel: bool, apart: bool, called_by_python: bool) -> Any:
    kernel = numba.njit(nogil=True, error_model="numpy", parallel=parallel, no_cfunc_wrapper=True,
                        no_cpython_wrapper=not called_by_python)(function)  # fmt: skip
    called = called_by_python or apart
    kernel._compiler.pipeline_class = libraries.ToMachineCode if called else libraries.ToBitcode
    kernel._cache = KernelCache(function, _folder, _refused, called_by_python)
    kernel.get_call_template = partial(_call_template, kernel, apart)
    if apart:
        _apart[kernel.__module__, kernel.__qualname__] = kernel
    return kernel


class _Helper:
    """A function for compiled code. Python can call it, too: without arrays it runs as Python, with arrays as a kernel.

    compiled: Numba's dispatcher, whose machine code Python cannot call. kernel: the same function, compiled for Python.
    """

    def __init__(self, function: Callable[..., Any], apart: bool) -> None:
        update_wrapper(self, function)
        self.py_func = function
        self.compiled = _compile(function, parallel=False, apart=apart, called_by_python=False)
        self._numba_type_ = types.Dispatcher(self.compiled)  # what compiled code calls

    @cached_property
    def kernel(self) -> Any:
        return jit(self.py_func)

    def __call__(self, *arguments: Any) -> Any:
        arrays = any(isinstance(argument, Part) for argument in arguments)
        return self.kernel(*arguments) if arrays else self.py_func(*arguments)


def jit(function: Callable[..., Any]) -> Any:
    """Compile a kernel to serial machine code."""
    return _compile(function, parallel=False, apart=False, called_by_python=True)


def helper(function: Callable[..., Any]) -> Any:
    """Compile a short function of kernels to serial machine code, of which each caller contains a copy."""
    return _Helper(function, apart=False)


def apart_jit(function: Callable[..., Any]) -> Any:
    """Compile a long function of kernels once. Its callers call this code, and contain no copy of it."""
    return _Helper(function, apart=True)


def parallel_jit(function: Callable[..., Any]) -> Any:
    """Compile a kernel with parallel `prange` loops. Unless it is a nested function, it is compiled apart, too."""
    apart = "<locals>" not in function.__qualname__
    return _compile(function, parallel=True, apart=apart, called_by_python=True)


class _Choice:
    """A kernel that is one of several. choose: returns the one for these arguments.

    Only the kernels that are chosen are compiled. A recorded step (program/table.py) chooses once, when it is compiled.
    """

    def __init__(self, choose: Callable[..., Any]) -> None:
        update_wrapper(self, choose)
        self.choose = self.py_func = choose

    def __call__(self, *arguments: Any) -> None:
        self.choose(*arguments)(*arguments)


def choice(choose: Callable[..., Any]) -> Any:
    """Make a kernel of a function that returns the kernel for its arguments, a `jit` function of the same module."""
    return _Choice(choose)


_KERNEL = """
def {name}({parameters}):
    parts = _count({last})
    if parts == 1:
        part = 0
        _part({whole})
        return
"""

_EACH_PART = """\
    for part in prange(parts):
        _part({cut})
        {after}
"""

_EACH_RUN = """\
    runs = _runs(parts)
    length = parts // runs
    for run in prange(runs):
        first = int64(run) * length
        for part in range(first, first + length):
            {before}
            _part({cut})
        {after}
"""


def in_parts(
    count: Any, cut: Any, after: Any = None, runs: Any = None, before: Any = None, **computed: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a parallel kernel from a function that computes one part of the result.

    The function may have three kinds of parameters (`last` is the last argument annotated `Part`):
    - annotated `Part`: the kernel receives an array, the function receives `cut(array, part, parts)`;
    - named in `computed`: the function receives `computed[name](last, part, parts)`; the kernel does not have this
      parameter;
    - all others: passed on unchanged.

    The number of parts is `count(last)`. If there is only one part, the calling thread computes it, since waking other
    threads would take time. The function then receives whole arrays, since making slices would take time (25 ns for
    relu). `kernel.part` is the compiled function.

    With `runs` and `before`, a thread takes several consecutive parts at a time: a run. `runs(parts)`, the number of
    runs, divides `parts`. Before each part, the kernel calls `before(array, array is last, part, parts)` for each
    array. With `after`, it calls `after(last)` after each run, or, without runs, after each part.

    The kernel is generated as source code with explicit parameter names. A closure that takes `*arguments` would be
    slower, and Numba could not load it from the cache: the key would contain the enclosed function, which differs in
    each process.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        name, parameters = function.__name__, inspect.signature(function).parameters
        arrays = [p for p, parameter in parameters.items() if parameter.annotation == "Part"]
        whole = {p: f"_{p}({arrays[-1]}, part, parts)" if p in computed else p for p in parameters}
        cut_arrays = {p: f"_cut({p}, part, parts)" for p in arrays}
        source = (_KERNEL + (_EACH_RUN if runs else _EACH_PART)).format(
            name=name,
            parameters=", ".join(p for p in parameters if p not in computed),
            last=arrays[-1],
            whole=", ".join(whole.values()),
            cut=", ".join((whole | cut_arrays).values()),
            before="; ".join(f"_before({p}, {p == arrays[-1]}, part, parts)" for p in arrays),
            after=f"_after({arrays[-1]})" if after else "pass",
        )
        function.__qualname__ += "_part"
        scope = {"_part": apart_jit(function), "_count": count, "_cut": cut, "prange": prange}
        scope |= {"_runs": runs, "_before": before, "_after": after, "int64": types.int64}
        scope |= {f"_{p}": compute for p, compute in computed.items()} | {"__name__": function.__module__}
        code = function.__code__  # the kernel gets the file of `function`: Numba caches only functions from a file
        tree = ast.increment_lineno(ast.parse(source), code.co_firstlineno - 2)  # the source begins with an empty line
        exec(compile(tree, code.co_filename, "exec"), scope)
        kernel = parallel_jit(scope[name])
        kernel.part = scope["_part"]
        return kernel

    return decorate


def cached(kernel: Any, signature: tuple[Any, ...]) -> bool:
    """Return whether the cache contains the machine code for arguments of these types."""
    return bool(kernel._cache.contains(signature, kernel.targetctx.codegen()))


# -- calls between compiled functions ---------------------------------------------------------------------------------

_apart: dict[tuple[str, str], Any] = {}  # (module, name) -> function
_symbols: set[str] = set()  # symbols that are defined for the linker


def _call_template(kernel: Any, apart: bool, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Return Numba's template for a call of `kernel` from compiled code. Replaces `kernel.get_call_template`."""
    _, folded = kernel._compiler.fold_argument_types(arguments, keywords)
    folded = tuple(types.unliteral(argument) for argument in folded)  # f(0) and f(1) call the same compiled function
    template = type(kernel).get_call_template(kernel, folded, {})
    if apart:
        _Symbol(kernel.__module__, kernel.__qualname__, folded)()
    return template


@dataclass(frozen=True)
class _Symbol:
    """The linker symbol of a function compiled apart, for arguments of given types.

    Without the symbol, Numba links a copy of the function into each caller, and optimises it again there.
    With the symbol, callers refer to the function's address.
    """

    module: str
    function: str
    arguments: tuple[Any, ...]

    def __call__(self) -> None:
        """Define the symbol. Numba calls this when it loads a caller from the cache (`_reload_init`)."""
        import_module(self.module)
        kernel = _apart[self.module, self.function]
        kernel.compile(self.arguments)  # or loads it from the cache
        compiled = kernel.overloads[self.arguments]
        name = f"{self.module}.{self.function}{self.arguments}"
        if name in _symbols:
            return
        _symbols.add(name)
        binding.add_symbol(name, compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))
        named = copy(compiled.fndesc)
        named.mangled_name = name
        call_name = user_function(named, ())

        def call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            context.active_code_library._reload_init.add(self)
            return call_name(context, builder, signature, arguments)

        call.signature, call.libs = call_name.signature, ()  # type: ignore[attr-defined]
        context = kernel.targetctx
        context.remove_user_function(compiled.entry_point)  # Numba's own implementation of the call
        context._defns[compiled.entry_point].append(call, call.signature)  # type: ignore[attr-defined]


def threads() -> int:
    """Return the number of threads that parallel kernels use."""
    return numba.get_num_threads()


def set_threads(threads: int) -> None:
    """Set the number of threads of parallel kernels, at most NUMBA_NUM_THREADS (by default, one per core)."""
    numba.set_num_threads(max(1, min(threads, numba.config.NUMBA_NUM_THREADS)))


if os.environ.get("MINIDL_THREADS"):
    set_threads(int(os.environ["MINIDL_THREADS"]))  # an earlier import of Numba may have set another number


__all__ = [
    "HAS_AMX", "HAS_FMA", "REGISTERS", "VECTOR_BYTES", "Part", "apart_jit", "cached", "choice", "helper", "in_parts",
    "jit", "parallel_jit", "prange", "set_threads", "threads",
]  # fmt: skip
