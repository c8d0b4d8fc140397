"""Kernels of our own for the packed runtime on CPU: compiled once on this machine, checked, loaded.

`native.c` is compiled by the system's C compiler at first use, for the processor at hand, into the user's cache
folder, under a name that stands for the source, the compiler and the processor; a wheel carries no binary. The threads
are those of the OpenMP runtime that torch has loaded: the library is handed that runtime's functions and links to none,
so there is never a second pool of threads.

Where anything is missing (a compiler, AVX2, OpenMP) or a small product comes out wrong, `kernels` returns None and the
packed runtime goes on with torch's operators. `CachedModel.kernels` and every run's manifest say which it was.
SPECBENCH_NATIVE=0 switches the kernels off, SPECBENCH_NATIVE=avx2 leaves AVX-512 unused where it is there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import ModelError
from .builtin import made_folder
from .packed_linear import NATIVE, Matrix
from .quantised import INT4_ROWS, check_groups, quantise_int4

BLOCK = 32  # outputs that are stored together
STRETCH = 512  # bytes that `read_through` reads at a time
AHEAD = 4096  # bytes; for processors that do not ask for enough memory by themselves
SOURCE = Path(__file__).with_name("native.c")
PARTS = ("native.c", *(f"native_{part}.h" for part in ("attention", "call", "choice", "matrix", "product", "vector")))
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fno-strict-aliasing", "-fno-math-errno", "-fPIC", "-shared")
# Jumps across such a border are slow on Intel's processors of 2015 to 2019: 10 to 20 % of a pass with eight tokens.
ALIGNED_BRANCHES = "-Wa,-mbranches-within-32B-boundaries"
WITHOUT_AVX512 = "-mno-avx512f"
NEEDED = ({"avx512f", "avx512bw", "avx512dq", "avx512vl"}, {"avx2", "fma"})  # either
COMPILE_S = 300
OPENMP = re.compile(r"/lib(gomp|iomp5|omp)\b[^/]*\.so[^/]*$")
OPENMP_FUNCTIONS = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")


class CMatrix(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("rows", ctypes.c_int32),
                ("units", ctypes.c_int32), ("group", ctypes.c_int32)]  # fmt: skip


class Kernels:
    """The compiled library for one dtype.

    Args:
        openmp: the runtime whose threads it uses.
    """

    def __init__(self, path: Path, dtype: torch.dtype, openmp: ctypes.CDLL) -> None:
        self.dtype = dtype
        self.per_unit = 2 if dtype is torch.bfloat16 else 1  # numbers in 32 bits
        self.library = library = ctypes.CDLL(str(path))
        pointer, number = ctypes.c_void_p, ctypes.c_int
        for name, result, arguments in (
            ("set_up", None, [pointer] * 4),
            ("hint", None, [pointer, ctypes.c_size_t]),
            ("pack", None, [pointer, pointer, number, number, number]),
            ("product", number, [ctypes.POINTER(CMatrix), pointer, pointer, number, number]),
            ("read_through", ctypes.c_uint64, [pointer, ctypes.c_int64, number, number]),
            ("scratch_bytes", ctypes.c_size_t, [pointer, pointer]),
            ("forward", None, [pointer, pointer]),
            ("attention", None, [pointer] * 4),
            ("choose", number, [pointer] * 3),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        library.set_up(*(ctypes.cast(getattr(openmp, name), pointer) for name in OPENMP_FUNCTIONS))

    def c_matrix(self, matrix: Matrix, rows: int) -> CMatrix:
        """For calls; the matrix must outlive it."""
        bias = None if matrix.bias is None else matrix.bias.data_ptr()
        units, group = matrix.weight.shape[1], matrix.group_size // 2
        return CMatrix(matrix.weight.data_ptr(), bias, rows, units * group if group else units, group)

    def product(self, x: torch.Tensor, matrix: Matrix, rows: int) -> torch.Tensor:
        """(tokens, in) times a packed (rows, in) matrix, rounded to the dtype and widened: (tokens, rows) float32."""
        x = _padded(x, self.per_unit)
        to = torch.empty(len(x), rows)
        described = self.c_matrix(matrix, rows)
        threads = torch.get_num_threads()
        if self.library.product(ctypes.byref(described), x.data_ptr(), to.data_ptr(), len(x), threads):
            raise MemoryError(f"no memory for a product of {len(x)} tokens")
        return to

    def agree(self) -> bool:
        """Whether small products, alone and in a tile, are what torch makes of them, and the same bits."""
        source = torch.Generator().manual_seed(0)
        weight, x, bias = (torch.randn(shape, generator=source).to(self.dtype) for shape in ((70, 46), (13, 46), (70,)))
        packed = Packer(self, 0).pack(weight, bias)
        several, single = self.product(x, packed, 70), self.product(x[5:6], packed, 70)
        expected = F.linear(x.double(), weight.double(), bias.double())
        room = 1e-2 if self.per_unit == 2 else 1e-4
        close = torch.allclose(several.double(), expected, rtol=room, atol=room)
        return close and torch.equal(several[5:6], single)


class Packer:
    """Packs matrices for the kernels, one behind the other in one piece of memory, in the order in which they are read.

    Args:
        numbers: how many of the dtype there is room for; a matrix beyond that gets memory of its own.
    """

    def __init__(self, kernels: Kernels, numbers: int) -> None:
        self.kernels, self._free = kernels, torch.empty(numbers, dtype=kernels.dtype)
        kernels.library.hint(self._free.data_ptr(), self._free.nbytes)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
        """A (out, in) matrix of the dtype in blocks of outputs, filled up with zeros; the unpacked one is not kept."""
        weight = _padded(weight, self.kernels.per_unit)
        rows, width = weight.shape
        blocks, units = -(-rows // BLOCK), width // self.kernels.per_unit
        packed = self._take(packed_numbers(rows, width)).view(blocks, units, BLOCK * self.kernels.per_unit)
        self.kernels.library.pack(weight.data_ptr(), packed.data_ptr(), rows, units, torch.get_num_threads())
        return Matrix(NATIVE, packed, _whole_blocks(bias, blocks))

    def pack_int4(self, weight: torch.Tensor, bias: torch.Tensor | None = None, group_size: int = 32) -> Matrix:
        """A bfloat16 matrix in int4, of the very levels, scales and zero points that `quantised` makes for torch.

        Raises:
            ModelError: an unknown group size, or a width that groups do not divide.
        """
        rows, width = weight.shape
        check_groups(width, group_size)
        if rows % INT4_ROWS:
            return self.pack(weight, bias)  # as `pack_quantised` does
        levels, scales_and_zeros = quantise_int4(weight, group_size)
        blocks, groups = -(-rows // BLOCK), width // group_size
        missing = blocks * BLOCK - rows
        levels = F.pad(levels, [0, 0, 0, missing]).view(blocks, BLOCK, groups, group_size // 8, 4, 2)
        words = torch.zeros(levels.shape[:4], dtype=torch.int32)
        for unit in range(4):
            for half in range(2):
                words |= levels[..., unit, half] << (4 * unit + 16 * half)
        facts = F.pad(scales_and_zeros, [0, 0, 0, missing]).view(groups, blocks, BLOCK, 2).permute(1, 0, 3, 2)
        facts = facts.reshape(blocks, groups, 2 * BLOCK).view(torch.int32)  # scales, then zero points
        words = words.permute(0, 2, 3, 1).reshape(blocks, groups, -1)
        packed = self._take(int4_numbers(rows, width, group_size)).view(torch.int32).view(blocks, groups, -1)
        torch.cat([facts, words], 2, out=packed)
        return Matrix(NATIVE, packed, _whole_blocks(bias, blocks), None, group_size)

    def _take(self, numbers: int) -> torch.Tensor:
        if numbers > self._free.numel():
            return torch.empty(numbers, dtype=self.kernels.dtype)
        taken, self._free = self._free[:numbers], self._free[numbers:]
        return taken


def packed_numbers(rows: int, width: int) -> int:
    """Numbers that a packed (rows, width) matrix takes; of even width in bfloat16."""
    return -(-rows // BLOCK) * BLOCK * width


def int4_numbers(rows: int, width: int, group_size: int) -> int:
    """The same in int4, in bfloat16 numbers: scales, zero points and levels."""
    return -(-rows // BLOCK) * BLOCK * (width // group_size) * (2 + group_size // 4)


def _whole_blocks(bias: torch.Tensor | None, blocks: int) -> torch.Tensor | None:
    return None if bias is None else F.pad(bias.float(), [0, blocks * BLOCK - len(bias)])


def _padded(x: torch.Tensor, per_unit: int) -> torch.Tensor:
    """With a column of zeros more where columns do not fill their units."""
    return (F.pad(x, [0, 1]) if x.shape[1] % per_unit else x).contiguous()


def kernels(dtype: torch.dtype) -> Kernels | None:
    """The kernels for a dtype, compiled first if need be; None where they cannot be had or are not wanted."""
    wanted = os.environ.get("SPECBENCH_NATIVE")
    if wanted == "0" or dtype not in (torch.float32, torch.bfloat16):
        return None
    return load(dtype, True) if wanted == "avx2" else load(dtype)


def reads(buffer: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Ways to read a tensor once from one end to the other, for measuring memory; each returns the sum of its words of
    64 bits. Empty where there are no kernels, or the tensor is not in whole stretches."""
    found = kernels(torch.float32)
    if found is None or buffer.nbytes % STRETCH:
        return {}

    def read(ahead: int) -> int:
        return found.library.read_through(buffer.data_ptr(), buffer.nbytes, ahead, torch.get_num_threads())

    return {"our own loop": lambda: read(0), "our own loop, asking ahead": lambda: read(AHEAD)}


def products(dtype: str, size: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Ways to multiply two square matrices of so many rows, for measuring arithmetic. Empty where there are no kernels
    for the type."""
    found = kernels(getattr(torch, dtype))
    if found is None:
        return {}
    x, weight = torch.randn(2, size, size).to(found.dtype)
    matrix = Packer(found, 0).pack(weight)
    return {"our own kernels": lambda: found.product(x, matrix, size)}


@functools.cache
def load(dtype: torch.dtype, avx2: bool = False) -> Kernels | None:
    """As `kernels`, whatever the environment says; found out once per process.

    Args:
        avx2: those of AVX2, on any processor.
    """
    processor, openmp = _processor(), _openmp()
    if processor is None or openmp is None:
        return None
    for compiler in _compilers([WITHOUT_AVX512] if avx2 else []):
        with contextlib.suppress(OSError, subprocess.SubprocessError, AttributeError):
            with built(compiler, dtype, processor) as path:
                found = Kernels(path, dtype, openmp)
            if found.agree():
                return found
    return None


@contextlib.contextmanager
def built(compiler: list[str], dtype: torch.dtype, processor: str) -> Iterator[Path]:
    """The compiled library, from the cache folder where it is there; in a passing folder where none can be kept.

    Raises:
        OSError, subprocess.SubprocessError: the compiler is not there or fails.
    """
    name = str(dtype).removeprefix("torch.")
    define = ["-DBFLOAT16"] if dtype is torch.bfloat16 else []

    def compile_to(folder: Path) -> None:
        command = [*compiler, *FLAGS, *define, str(SOURCE), "-o", str(folder / "native.so"), "-lm"]
        subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=COMPILE_S, check=True)

    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=COMPILE_S, check=True).stdout
    parts = [SOURCE.with_name(part).read_bytes() for part in PARTS]
    parts += [version, " ".join([*compiler, *FLAGS]).encode(), processor.encode()]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    with contextlib.ExitStack() as leaving:
        try:
            folder = made_folder(f"native-{name}-{key}", compile_to)
        except ModelError:  # the cache cannot be written
            folder = Path(leaving.enter_context(tempfile.TemporaryDirectory()))
            compile_to(folder)
        yield folder / "native.so"


def _compilers(options: list[str]) -> list[list[str]]:
    """Commands to try, the user's own choice first, each with aligned branches where its assembler can do that."""
    named = [shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]]
    there = [command for command in named if command and shutil.which(command[0])]
    return [[*command, *more, *options] for command in there for more in ([ALIGNED_BRANCHES], [])]


def _processor() -> str | None:
    """What the processor is and can do, as Linux says it; None where it lacks AVX2 or cannot be asked."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
        lines = [line for line in text.splitlines() if line.startswith(("model name", "flags"))]
        has = set(" ".join(lines).split())
        if any(has >= needed for needed in NEEDED):
            return "\n".join(lines)
    return None


def _openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that this process has loaded, torch's own before any other."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    paths = {fields[5].strip() for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    home = str(Path(torch._C.__file__).parent)
    for path in sorted(filter(OPENMP.search, paths), key=lambda path: (not path.startswith(home), path)):
        with contextlib.suppress(OSError):
            library: Any = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            if all(hasattr(library, name) for name in OPENMP_FUNCTIONS):
                return library
    return None
