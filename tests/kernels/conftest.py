# SPDX-License-Identifier: Apache-2.0
"""Without a GPU the kernels run in Triton's interpreter, which must be chosen before Triton is imported.

Other tests of the same session may have imported Triton already (its own library functions are then compiled ones,
which cannot be interpreted): in that case its Python modules are forgotten, so that the next import chooses anew; who
holds the old ones keeps them. The choice holds while these tests are collected and run, so that processes started by
other tests do not inherit it.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

_CHOSEN = not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ

if _CHOSEN:
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [m for m in sys.modules if m == "triton" or m.startswith("triton.")]:
        if not name.startswith("triton._C"):  # the extension can be initialised only once
            del sys.modules[name]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Undo the choice: tests of other folders run first."""
    if _CHOSEN:
        os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton reads the choice at launch too."""
    if _CHOSEN:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
