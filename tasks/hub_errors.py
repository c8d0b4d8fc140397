"""What went wrong with a data set from the hub, in one line that says what to do, and without anybody's token."""

from __future__ import annotations

import os
import re
from typing import Any


def explain(error: BaseException, id: str, config: str, split: str, options: Any) -> str:
    """One line for what `datasets` raised: what is wrong and the way out, without tokens.

    Args:
        options: the task's options, of which `path` and `revision` are read.
    """
    name = f"{id} ({config})"
    said = redact(" ".join(str(error).split()))
    chain = _chain(error)
    kinds = {kind.__name__ for link in chain for kind in type(link).__mro__}
    lower = " ".join(str(link) for link in chain).lower()
    if options.path is not None:
        if isinstance(error, KeyError):
            return f'{options.path} has no split "{split}".'
        return f"cannot read {options.path}: {type(error).__name__}: {_short(said)}"
    if "GatedRepoError" in kinds or "gated dataset" in lower:
        return (
            f"{name} is Gated: log in with `hf auth login` and ask for access at https://huggingface.co/datasets/{id}"
        )
    if "scripts are no longer supported" in lower:
        return f"{name} needs a loading script, which datasets 4 and later refuses; use a parquet mirror, or path."
    if "revision" in lower and "doesn't exist" in lower:
        return f'{name} has no revision "{options.revision}" on the hub.'
    if {"DatasetNotFoundError", "RepositoryNotFoundError"} & kinds:
        return (
            f"no data set {name} on the hub, or it is private: check the id; "
            "for a private one log in with `hf auth login`."
        )
    if {getattr(getattr(link, "response", None), "status_code", None) for link in chain} & {401, 403}:
        return f"the hub does not let this user read {name}: log in with `hf auth login`. It said: {_short(said)}"
    if "not found. available" in lower or "unknown split" in lower or "bad split" in lower:
        return f"{name}, split {split}: {_short(said)}"
    offline = {"ConnectionError", "OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectError", "TimeoutException"}
    if offline & kinds or "couldn't find cache" in lower or "couldn't reach" in lower:
        return (
            f"{name} is not in the local cache, and the hub is offline or cannot be reached ({_short(said)}); "
            f"where there is a network, run: hf download --repo-type dataset {id} --local-dir DIR, "
            f"and pass DIR with the option path"
        )
    return f"cannot load {name}: {type(error).__name__}: {_short(said)}"


def redact(text: str) -> str:
    """`text` without tokens: those of the hub's shape, bearer headers, passwords in URLs, and HF_TOKEN itself."""
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := os.environ.get(variable):
            text = text.replace(token, "***")
    text = re.sub(r"\b(hf|api_org)_[A-Za-z0-9]+", "***", text)
    text = re.sub(r"(?i)\b(bearer|token)([ =:]+)(?!is\b|was\b)[^\s'\",;]{8,}", r"\1\2***", text)
    return re.sub(r"://[^/\s@]+@", "://***@", text)


def _short(text: str) -> str:
    return text if len(text) <= 300 else text[:300] + "..."


def _chain(error: BaseException | None) -> list[BaseException]:
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links
