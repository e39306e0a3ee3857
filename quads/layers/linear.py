# SPDX-License-Identifier: Apache-2.0
"""nn.Linear with fake-quantized weight and input: y = A(x) W(w)^T + b, x [..., K], w [N, K].

Only `__class__` is exchanged and one plain attribute is set, so the parameters are the module's own.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from quads.layers.setup import LayerSetup


class QuadsLinear(torch.nn.Linear):
    """A torch.nn.Linear after surgery; `quads` holds its set-up."""

    quads: LayerSetup

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        x_TK = self.quads.activation(x.reshape(-1, x.shape[-1]))
        w_NK = self.quads.weight(self, "weight", lambda w: self.quads.fake(w, self.quads.kept_amax(), "weight"))
        return linear(x_TK, w_NK, self.bias).view(*x.shape[:-1], -1)
