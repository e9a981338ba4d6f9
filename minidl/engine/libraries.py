"""What Numba makes of a function: machine code, which is called, and bitcode, which is copied into its callers.

Numba calls the two together a library, and makes both for every function. A helper of kernels (`jit.helper`) gets only
bitcode here, since its callers contain copies of it. Machine code of helpers would take a tenth of all compile time.
A function that is loaded from the cache has only machine code until another function needs its bitcode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompileResult

NO_MACHINE_CODE = b""  # in a file of the cache


class _NoMachineCode:
    """The code generator of a library without machine code. It has no place for the function's environment.

    An environment has the Python objects that a function uses, as `print` does. The callers get it (`ToMachineCode`).
    """

    @staticmethod
    def set_env(name: str, environment: Any) -> None:
        """Do nothing."""


class Bitcode(JITCodeLibrary):  # type: ignore[misc]  # Numba has no types
    """A function of which each caller contains a copy: bitcode, without machine code."""

    codegen = _NoMachineCode

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def _get_compiled_object(self) -> bytes:
        return NO_MACHINE_CODE

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0, which means that there is no such function."""
        self._ensure_finalized()
        return 0


class MachineCode(JITCodeLibrary):  # type: ignore[misc]
    """A function from a file. Its bitcode is parsed when it is needed, since few processes need it.

    Numba parses it at once, which is a seventh of the time until the first step of an MLP, and a sixth of ResNet-20's.
    """

    _shared_module: Any

    def _get_module_for_linking(self) -> Any:
        if self._shared_module is None:
            self._shared_module = binding.parse_bitcode(self.bitcode)
        return self._shared_module


def save(compiled: CompileResult) -> tuple[Any, ...]:
    """Return what `CompileResult._rebuild` needs. The first element is for `load`."""
    (name, _, code), *others = compiled._reduce()
    module = compiled.library._get_module_for_linking()
    defined = [one.name for kind in (module.functions, module.global_variables) for one in kind
               if not one.is_declaration]  # fmt: skip
    return (name, defined, *code), *others


def load(codegen: Any, saved: tuple[Any, ...]) -> JITCodeLibrary:
    """Replaces Numba's `codegen.unserialize_library`, for the functions that a user keeps in Numba's cache, too."""
    if len(saved) == 3:
        return JITCodeLibrary._unserialize(codegen, saved)
    name, defined, machine_code, bitcode = saved
    if machine_code == NO_MACHINE_CODE:
        library = Bitcode(codegen, name)
        library._final_module = library._shared_module = binding.parse_bitcode(bitcode)
        library._finalize_final_module()
        return library
    library = MachineCode(codegen, name)
    library.bitcode = bitcode
    library.enable_object_caching()
    library._set_compiled_object(machine_code)
    library._finalize_final_module()
    codegen._engine._defined_symbols.update(defined)
    return library


# -- the compiler of each kind ----------------------------------------------------------------------------------------


class ToBitcode(Compiler):  # type: ignore[misc]
    """Compiles a function that only other compiled functions contain."""

    def compile_extra(self, function: Callable[..., Any]) -> CompileResult:
        """Return the compiled function."""
        self.state.library = Bitcode(self.state.targetctx.codegen(), function.__qualname__)
        return super().compile_extra(function)


class ToMachineCode(Compiler):  # type: ignore[misc]
    """Compiles a function that is called. It also gets the environments of the functions that it contains."""

    def compile_extra(self, function: Callable[..., Any]) -> CompileResult:
        """Return the compiled function."""
        compiled = super().compile_extra(function)
        for environment in compiled._find_referenced_environments():
            compiled.codegen.set_env(environment.env_name, environment)
        return compiled
