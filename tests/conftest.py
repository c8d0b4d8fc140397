"""Every test runs offline, and with one thread: tensors here are too small for more."""

from __future__ import annotations

import gc
import os

# Before transformers or datasets are imported: nothing may be looked up on a hub.
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

# Files that take longest begin first, so that none is left to one worker at the end; `make test` keeps this order.
LONGEST = (
    "test_ray.py",
    "test_lossless.py",
    "test_cascade.py",
    "test_contract.py",
    "test_sparse_kv.py",
    "test_remote.py",
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def quick_collections():
    """`measure` collects garbage before each sample; what earlier files imported need not be looked at again."""
    gc.collect()
    gc.freeze()
